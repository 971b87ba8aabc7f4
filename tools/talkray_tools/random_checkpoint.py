"""Create checkpoints with random weights in the official layout, for tests and benchmarks.

    talkray random-checkpoint OUT --like 1.7B-CustomVoice

Weights are uniform, drawn directly from Philox bits, so they are equal on every machine. Normal values would need a
logarithm, which differs between machines. Only the codec's weights are scaled to suit the signals in its layers.
"""

import hashlib
import json
import logging
import math
import os
import shutil
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import typer
from safetensors.torch import save_file
from torch import Tensor, nn

from deployments.codec.codec_config import SpeechTokenizerConfig
from deployments.codec.encoder import EncoderNetwork
from deployments.errors import CheckpointError
from deployments.talker.model.model_config import ModelConfig
from deployments.talker.model.speaker_encoder import SpeakerEncoder
from deployments.talker.model.talker import Talker
from talkray_tools.arguments import run_command
from talkray_tools.byte_tokenizer import write_tokenizer
from talkray_tools.random_codec import Stress, randomize_codec
from talkray_tools.released import AUDIO_PREPROCESSOR, GENERATION, PREPROCESSOR, SHAPES, Json, Shape
from talkray_tools.stress import stress_networks
from talkray_tools.unfolded_codec import DecoderNetwork

logger = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_WORTH_A_REPORT = 50e6  # minimum number of values for which progress is logged
_PIECE = 1 << 22  # values drawn and converted at a time; must be even, because a 64-bit draw yields four values
_TOKENIZER_FILES = ("vocab.json", "merges.txt", "tokenizer_config.json")


@dataclass(frozen=True, slots=True)
class Options:
    """Options for drawing and storing a checkpoint."""

    seed: int = 0
    dtype: torch.dtype = torch.bfloat16
    codec_dtype: torch.dtype = torch.float32
    stress: Stress | None = None  # makes weights as numerically demanding as trained ones
    tokenizer: Path | None = None  # directory of tokenizer files to copy; None writes the byte tokenizer


def write_checkpoint(directory: Path, shape: Shape, options: Options) -> None:
    """Write a complete checkpoint. Raises `CheckpointError` if `directory` is not empty."""
    if directory.exists() and any(directory.iterdir()):
        raise CheckpointError(f"{directory} is not empty: name a new directory")
    if options.tokenizer is not None:
        _check_tokenizer(options.tokenizer)
    codec_directory = directory / "speech_tokenizer"
    codec_directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", shape.config)
    _write_json(directory / "generation_config.json", GENERATION)
    _write_json(directory / "preprocessor_config.json", PREPROCESSOR)
    _write_json(codec_directory / "config.json", shape.codec)
    _write_json(codec_directory / "preprocessor_config.json", AUDIO_PREPROCESSOR)
    _write_tokenizer(directory, shape, options.tokenizer)
    _write_talker(directory, shape, options)
    _write_codec(codec_directory, shape, options)


def _write_json(file: Path, value: Json) -> None:
    file.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _write_tokenizer(directory: Path, shape: Shape, source: Path | None) -> None:
    if source is None:
        write_tokenizer(directory, num_tokens=shape.text_tokens, assistant_token=shape.assistant_token)
        return
    for name in _TOKENIZER_FILES:
        shutil.copy(source / name, directory)


def _check_tokenizer(source: Path) -> None:
    for name in _TOKENIZER_FILES:
        if not (source / name).is_file():
            raise CheckpointError(f"{source / name} is missing: a tokenizer needs {', '.join(_TOKENIZER_FILES)}")


def _write_talker(directory: Path, shape: Shape, options: Options) -> None:
    config = ModelConfig.load(directory)
    modules: dict[str, nn.Module] = {}
    with torch.device("meta"):
        modules["talker"] = Talker(config)
        if config.speaker_encoder is not None:
            modules["speaker_encoder"] = SpeakerEncoder(config.speaker_encoder)
    shapes = {
        f"{prefix}.{name}": tensor.shape
        for prefix, module in modules.items()
        for name, tensor in module.state_dict().items()
    }
    fills = {name: Fill.of(name, size, unit_scale=shape.unit_scale) for name, size in shapes.items()}
    tensors = random_tensors(fills, options)
    tensors["talker.codec_head.weight"][config.codes.eos] *= shape.eos_scale
    if options.stress is not None:
        stress_networks(tensors, torch.Generator().manual_seed(options.seed))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _write_codec(directory: Path, shape: Shape, options: Options) -> None:
    config = SpeechTokenizerConfig.load(directory)
    decoder, encoder = DecoderNetwork(config.decoder), EncoderNetwork(config.encoder)
    generator = torch.Generator().manual_seed(options.seed)
    randomize_codec(decoder, encoder, generator=generator, stress=options.stress)
    if options.stress is not None:
        stress_networks(decoder.state_dict(), generator)
    tensors: dict[str, Tensor] = {
        f"{prefix}.{name}": tensor.to(options.codec_dtype)
        for prefix, module in (("decoder", decoder), ("encoder", encoder))
        for name, tensor in module.state_dict().items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@dataclass(frozen=True, slots=True)
class Fill:
    """Distribution of the values of one tensor."""

    shape: torch.Size
    mean: float
    deviation: float

    @classmethod
    def of(cls, name: str, shape: torch.Size, *, unit_scale: bool) -> "Fill":
        """Use the official initialisation's deviation or, with `unit_scale`, one for signals near 1 in narrow layers.

        With `unit_scale`, norm weights and biases are not constant, so comparisons detect a missing norm or bias.
        """
        if name.endswith("norm.weight"):
            return cls(shape, 1.0, 0.1 if unit_scale else 0.0)
        if len(shape) == 1:
            return cls(shape, 0.0, 0.02)
        if "embedding" in name:
            return cls(shape, 0.0, 1.0 if unit_scale else 0.02)
        if unit_scale or name.startswith("speaker_encoder."):
            return cls(shape, 0.0, 1 / math.sqrt(shape[1:].numel()))
        return cls(shape, 0.0, 0.02)

    def draw(self, key: str, count: int) -> Tensor:
        """Return `count` float32 values that depend only on `key`."""
        digest = hashlib.sha256(key.encode()).digest()
        bits = np.random.Philox(key=int.from_bytes(digest[:16], "little")).random_raw(-(-count // 4))
        values = torch.from_numpy(bits.astype("<u8").view("<u2")[:count].astype(np.float32))
        return values.sub_(32767.5).mul_(self.deviation * math.sqrt(3) / 32767.5).add_(self.mean)


def random_tensors(fills: Mapping[str, Fill], options: Options) -> dict[str, Tensor]:
    """Draw all tensors in pieces on all cores. Logs progress in tenths if there are many values."""

    def drawn(name: str) -> Tensor:
        fill, count = fills[name], fills[name].shape.numel()
        pieces = (
            fill.draw(f"{options.seed}/{name}/{first}", min(_PIECE, count - first)).to(options.dtype)
            for first in range(0, count, _PIECE)
        )
        return torch.cat([*pieces]).view(fill.shape)

    tensors, total, done = dict[str, Tensor](), sum(fill.shape.numel() for fill in fills.values()), 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, tensor in zip(fills, pool.map(drawn, fills), strict=True):
            before, done = done, done + tensor.numel()
            if total > _WORTH_A_REPORT and before * 10 // total < done * 10 // total:
                logger.info("talker %3d %% of %.2f billion values", done * 100 // total, total / 1e9)
            tensors[name] = tensor
    return tensors


def main(arguments: list[str]) -> int:
    """Run the command line and return the exit code."""
    return run_command(random_checkpoint, "talkray random-checkpoint", arguments)


def _known(like: str) -> str:
    if like not in SHAPES:
        raise typer.BadParameter(f"{like!r} is unknown. Use one of: {', '.join(sorted(SHAPES))}")
    return like


def random_checkpoint(
    out: Annotated[Path, typer.Argument(help="New or empty directory.")],
    like: Annotated[
        str, typer.Option(callback=_known, help=f"Checkpoint with the same shapes: {', '.join(sorted(SHAPES))}.")
    ],
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Directory with the official vocab.json and merges.txt.")
    ] = None,
    stress: Annotated[Stress | None, typer.Option(help="Make precision as critical as for trained weights.")] = None,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(help="Dtype of the talker. Default: bfloat16, or float32 for tiny shapes without --stress."),
    ] = None,
) -> None:
    """Write a checkpoint with random weights."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    shape = SHAPES[like].with_official_text() if tokenizer else SHAPES[like]
    dtype = dtype or ("float32" if shape.unit_scale and stress is None else "bfloat16")
    codec_dtype = torch.float32 if stress is None else torch.bfloat16
    try:
        write_checkpoint(out, shape, Options(seed, DTYPES[dtype], codec_dtype, stress=stress, tokenizer=tokenizer))
    except CheckpointError as error:
        raise SystemExit(f"talkray: {error}") from error
    logger.info("wrote %s, shaped like %s", out, like)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
