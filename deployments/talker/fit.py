"""The sequences of a checkpoint that fit a GPU, before anything is loaded: `python -m deployments.talker.fit`, for
`talkray doctor`.

The weights' size comes from the headers of their files, the rest of the arithmetic is the engine's own.
"""

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from deployments.codec.config import SpeechTokenizerConfig
from deployments.codec.slots import slots_on
from deployments.config import TalkerConfig
from deployments.errors import TalkrayError
from deployments.talker.audio_streams import SLOTS_PER_RECORDING
from deployments.talker.kv_cache import BESIDE_BYTES, KVCache
from deployments.talker.loading import block_size_of, dtype_of, gpu_share
from deployments.talker.model.config import ModelConfig
from deployments.weights.checkpoint import read_shapes

_TEXT_EMBEDDING = "talker.model.text_embedding.weight"
_USUAL_POSITIONS = 320  # about twenty seconds of speech, and its prompt


@dataclass(frozen=True, slots=True)
class Fit:
    """The load that a GPU can hold of a checkpoint."""

    loaded: int  # bytes of weights and codec
    kv: int  # bytes of keys and values
    usual: int  # sequences of twenty seconds at once
    longest: int  # sequences of the greatest length at once
    beside: int = BESIDE_BYTES  # bytes of CUDA and of a step


def predict(directory: Path, config: TalkerConfig, total: int) -> Fit:
    """The load that fits an otherwise unused GPU of `total` bytes. Raises EngineError if no sequence fits."""
    model, device = ModelConfig.load(directory), torch.device("cuda")
    size = config.kv_block_size or block_size_of(device, config.attention)
    dtype = dtype_of(config, device)
    block_bytes = KVCache.bytes_per_position(model.talker, dtype) * size
    clones = model.speaker_encoder is not None
    loaded = _talker_bytes(directory, model, dtype)
    loaded += _codec_bytes(directory, 2 * config.max_num_seqs, total, clones=clones)
    kv = config.kv_cache_bytes or gpu_share(config, block_bytes, size).kv_bytes(total, loaded)
    blocks = kv // block_bytes - 1

    def at_once(positions: int) -> int:
        return min(config.max_num_seqs, blocks // -(-min(positions, config.max_model_len) // size))

    return Fit(loaded, kv, at_once(_USUAL_POSITIONS), at_once(config.max_model_len))


def _talker_bytes(directory: Path, model: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of the talker, whose text table replaces its embedding, and of the speaker encoder of a base model."""
    shapes = read_shapes(directory)
    talker = _count(shapes, "talker.") - math.prod(shapes.get(_TEXT_EMBEDDING, (0,)))
    table = (model.text_vocab_size + 1) * model.talker.hidden_size
    return (talker + table) * dtype.itemsize + _count(shapes, "speaker_encoder.") * torch.float32.itemsize


def _codec_bytes(directory: Path, num_slots: int, total: int, *, clones: bool) -> int:
    """Bytes of the codec decoder with so many streams, on a GPU of `total` bytes; for a model that `clones` with the
    encoder of recordings and the decoder's states after recordings.
    """
    folder, shapes = directory / "speech_tokenizer", read_shapes(directory / "speech_tokenizer")
    slots, config = slots_on(torch.device("cuda"), folder), SpeechTokenizerConfig.load(folder).decoder
    weights = _count(shapes, "decoder.")
    decoder = slots.gpu_bytes(config, num_weights=weights, num_slots=num_slots, total=total)
    states = num_slots // SLOTS_PER_RECORDING * slots.state_bytes(config)
    return decoder + clones * (_count(shapes, "encoder.") * torch.float32.itemsize + states)


def _count(shapes: dict[str, tuple[int, ...]], prefix: str) -> int:
    return sum(math.prod(shape) for name, shape in shapes.items() if name.startswith(prefix))


def main(arguments: list[str]) -> int:
    """Command line: a `Fit` as JSON, or why nothing fits and 1."""
    parser = argparse.ArgumentParser(prog="python -m deployments.talker.fit")
    parser.add_argument("directory", type=Path)
    parser.add_argument("total", type=int, help="bytes of the GPU")
    parser.add_argument("config", help="the settings of the talker, as JSON")
    options = parser.parse_args(arguments)
    try:
        fit = predict(options.directory, TalkerConfig.model_validate_json(options.config), options.total)
    except TalkrayError as error:
        sys.stdout.write(f"{error}\n")
        return 1
    sys.stdout.write(json.dumps(asdict(fit)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
