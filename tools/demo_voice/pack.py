"""Packs a checkpoint for shipping; `deployments/voice/unpack.py` says what a packed folder is and reads it."""

import gzip
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from deployments.voice.unpack import FORMAT, ROW_SCALE

_LARGEST = 127
_WORTH_PACKING = 4096  # values; smaller tensors are biases, norms and the like


def pack(checkpoint: Path, packed: Path, *, without: str = "") -> None:
    """Write `checkpoint` to the new folder `packed`; tensors whose names begin with `without` are left out."""
    shutil.copytree(checkpoint, packed, ignore=shutil.ignore_patterns("*.safetensors"))
    for file in sorted(checkpoint.rglob("*.safetensors")):
        stored: dict[str, Tensor] = {}
        for name, tensor in load_file(file).items():
            if not (without and name.startswith(without)):
                stored |= _packed(name, tensor)
        target = packed / file.relative_to(checkpoint)
        target.with_suffix(".safetensors.gz").write_bytes(gzip.compress(save(stored, FORMAT), mtime=0))


def _packed(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A row's largest value becomes 127. Rows are output channels, or entries of a table."""
    if tensor.dim() < 2 or tensor.numel() < _WORTH_PACKING:
        return {name: tensor.half()}
    rows = tensor.float().flatten(1)
    scale = rows.abs().amax(1) / _LARGEST
    steps = rows / torch.where(scale > 0, scale, 1.0)[:, None]
    return {name: steps.round().to(torch.int8).view(tensor.shape), name + ROW_SCALE: scale}
