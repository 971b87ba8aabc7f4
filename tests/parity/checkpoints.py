"""The tiny checkpoints of the parity tests, and what identifies the weights that golden files were made with."""

import hashlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from deployments.weights.checkpoint import read_tensors
from talkray_tools.random_checkpoint import Options, write_checkpoint
from talkray_tools.random_codec import Stress
from talkray_tools.released import SHAPES

GOLDEN_DIRECTORY = Path(__file__).parent.parent / "data"
NAMES = {shape.config["tts_model_type"]: name for name, shape in SHAPES.items() if name.startswith("tiny-")}


def write_tiny(directory: Path, kind: str, *, seed: int = 0, tokenizer: Path | None = None) -> Path:
    """A tiny checkpoint over its own small vocabulary, or over the tokenizer files in `tokenizer`."""
    shape = SHAPES[NAMES[kind]]
    shape = shape if tokenizer is None else shape.with_official_text()
    write_checkpoint(directory, shape, Options(seed=seed, dtype=torch.float32, tokenizer=tokenizer))
    return directory


def write_stressed(directory: Path, kind: str, stress: Stress, *, seed: int) -> Path:
    """A tiny checkpoint as hard on numbers as trained ones, in bfloat16 as they are."""
    options = Options(seed=seed, dtype=torch.bfloat16, codec_dtype=torch.bfloat16, stress=stress)
    write_checkpoint(directory, SHAPES[NAMES[kind]], options)
    return directory


def golden_file(kind: str) -> Path:
    return GOLDEN_DIRECTORY / f"official_tiny_{kind}.npz"


def talker_digest(checkpoint: Path) -> str:
    """Of everything that decides codes; bitwise the same wherever the checkpoint is generated."""
    digest = hashlib.sha256()
    for name, tensor in sorted(read_tensors(checkpoint).items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    for name in ("vocab.json", "merges.txt"):
        digest.update((checkpoint / name).read_bytes())
    return digest.hexdigest()


def codec_profile(checkpoint: Path) -> NDArray[np.float64]:
    """The root mean square of each codec tensor: its scales come from float sums, which differ in the last digits."""
    tensors = sorted(read_tensors(checkpoint / "speech_tokenizer").items())
    return np.array([float(tensor.double().pow(2).mean().sqrt()) for _, tensor in tensors])
