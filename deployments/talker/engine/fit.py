"""Predicts how many sequences fit on a GPU, and selects settings, before anything is loaded.

`talkray doctor` and `talkray serve` run `python -m deployments.talker.engine.fit`. The size of the weights is read from
their file headers. The rest of the arithmetic is shared with the engine.
"""

import argparse
import contextlib
import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from deployments.codec.backends.registry import choose_decoders
from deployments.codec.codec_config import SpeechTokenizerConfig
from deployments.config import TalkerConfig
from deployments.errors import EngineError, TalkrayError
from deployments.gpu.card import SMALL_BYTES
from deployments.talker.audio.audio_streams import SLOTS_PER_RECORDING
from deployments.talker.engine.device import EngineDevice, cache_bounds
from deployments.talker.model.model_config import ModelConfig
from deployments.talker.state.kv_cache import BESIDE_BYTES, CONTEXT_BYTES, KVCache
from deployments.weights.checkpoint import read_shapes

_TEXT_EMBEDDING = "talker.model.text_embedding.weight"
_USUAL_POSITIONS = 320  # about twenty seconds of speech, plus the prompt
_SPARE_BYTES = 128 << 20  # memory on a small GPU that the engine leaves unused
_UNCOUNTED_SHARE = 0.1  # of a talker without a codec, beyond its tensors; 330 MiB for a 1.7B model on an H200
_ENCODER_GRAPHS_BYTES = 700 << 20  # captured recording encoders; 35 MiB per second of the longest recording, on an H200
_LEAST_ROWS = 4
_SHORTER = (2048, 1024)  # positions for 160 and 80 seconds; a text segment lasts about a minute


@dataclass(frozen=True, slots=True)
class Fit:
    """Predicted memory use and capacity for a checkpoint on a GPU."""

    loaded: int  # bytes for weights and codec
    kv: int  # bytes for keys and values
    usual: int  # number of concurrent twenty-second sequences
    longest: int  # number of concurrent sequences of maximum length
    beside: int = BESIDE_BYTES  # bytes for CUDA and for a step


def choose(directory: Path, config: TalkerConfig, total: int, free: int, *, makes_audio: bool = True) -> TalkerConfig:
    """Return `config` with settings for a GPU with `free` of `total` bytes. Raises EngineError if nothing fits.

    On a small GPU, selects the fewest rows that still allow the most twenty-second streams. The maximum sequence
    length is reduced if nothing would fit otherwise.
    """
    if free >= SMALL_BYTES:
        return config
    whole_gpu = config.model_copy(update={"gpu_memory_fraction": max(0.01, (free - _SPARE_BYTES) / total)})
    most, chosen = 0, None
    for length in (whole_gpu.max_model_len, *(each for each in _SHORTER if each < whole_gpu.max_model_len)):
        rows = whole_gpu.max_num_seqs
        while rows >= min(_LEAST_ROWS, whole_gpu.max_num_seqs):
            candidate = whole_gpu.model_copy(update={"max_num_seqs": rows, "max_model_len": length})
            with contextlib.suppress(EngineError):
                usual = predict(directory, candidate, total, free, makes_audio=makes_audio).usual
                if usual >= most:
                    most, chosen = usual, candidate
            rows //= 2
        if chosen is not None:
            return chosen
    predict(directory, candidate, total, free, makes_audio=makes_audio)  # raises an error with the reason
    raise AssertionError("the smallest settings fit, although none were selected")


def predict(directory: Path, config: TalkerConfig, total: int, free: int, *, makes_audio: bool = True) -> Fit:
    """Predict the load on a GPU with `free` of `total` bytes. Raises EngineError if no sequence fits."""
    model_config, gpu = ModelConfig.load(directory), EngineDevice(config, "cuda")
    size, dtype = gpu.block_size, gpu.dtype
    block_bytes = KVCache.bytes_per_position(model_config.talker, dtype) * size
    num_slots = 2 * config.max_num_seqs if makes_audio else 0
    loaded = talker = _talker_bytes(directory, model_config, dtype)
    loaded += _codec_bytes(directory, num_slots, free - CONTEXT_BYTES, clones=model_config.speaker_encoder is not None)
    loaded += 0 if makes_audio else int(_UNCOUNTED_SHARE * talker)
    share = cache_bounds(config, block_bytes, size)
    kv = config.kv_cache_bytes or share.kv_bytes(total, loaded, others_bytes=total - free)
    blocks = kv // block_bytes - 1

    def at_once(positions: int) -> int:
        return min(config.max_num_seqs, blocks // -(-min(positions, config.max_model_len) // size))

    return Fit(loaded, kv, at_once(_USUAL_POSITIONS), at_once(config.max_model_len))


def _talker_bytes(directory: Path, model_config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes of the talker, with its text table instead of the embedding, and of a base's speaker encoder."""
    shapes = read_shapes(directory)
    talker = _count(shapes, "talker.") - math.prod(shapes.get(_TEXT_EMBEDDING, (0,)))
    table = (model_config.text_vocab_size + 1) * model_config.talker.hidden_size
    return (talker + table) * dtype.itemsize + _count(shapes, "speaker_encoder.") * torch.float32.itemsize


def _codec_bytes(directory: Path, num_slots: int, within_reach: int, *, clones: bool) -> int:
    """Return the bytes of a codec decoder with `num_slots` streams. 0 means that there is no decoder.

    `within_reach` is the number of bytes that the process can allocate. A model that `clones` also has recording
    encoders, their captured graphs, and decoder states after recordings.
    """
    folder = directory / "speech_tokenizer"
    shapes = read_shapes(folder)
    codec = SpeechTokenizerConfig.load(folder)
    slots = choose_decoders(codec, torch.device("cuda")).slots
    config = codec.decoder
    weights = _count(shapes, "decoder.")
    decoder = slots.gpu_bytes(config, num_weights=weights, num_slots=num_slots, within_reach=within_reach)
    decoder *= num_slots > 0
    states = num_slots // SLOTS_PER_RECORDING * slots.state_bytes(config)
    return decoder + clones * (_count(shapes, "encoder.") * torch.float32.itemsize + states + _ENCODER_GRAPHS_BYTES)


def _count(shapes: dict[str, tuple[int, ...]], prefix: str) -> int:
    return sum(math.prod(shape) for name, shape in shapes.items() if name.startswith(prefix))


def main(arguments: list[str]) -> int:
    """Print the settings and their `Fit` as JSON. If nothing fits, print the reason and return 1."""
    parser = argparse.ArgumentParser(prog="python -m deployments.talker.engine.fit")
    parser.add_argument("directory", type=Path)
    parser.add_argument("total", type=int, help="bytes of the GPU")
    parser.add_argument("free", type=int, help="unused bytes of the GPU")
    parser.add_argument("config", help="the settings of the talker, as JSON")
    parser.add_argument("--choose", action="store_true", help="select settings that fit")
    parser.add_argument("--no-audio", dest="makes_audio", action="store_false", help="codec.placement: pool")
    options = parser.parse_args(arguments)
    config = TalkerConfig.model_validate_json(options.config)
    memory = (options.total, options.free)
    try:
        if options.choose:
            config = choose(options.directory, config, *memory, makes_audio=options.makes_audio)
        fit = predict(options.directory, config, *memory, makes_audio=options.makes_audio)
    except TalkrayError as error:
        sys.stdout.write(f"{error}\n")
        return 1
    sys.stdout.write(json.dumps({"talker": config.model_dump(), "fit": asdict(fit)}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
