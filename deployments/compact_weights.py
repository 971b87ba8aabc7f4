"""Checkpoints packed for shipping: the official layout with large tensors as int8 and a scale for each row.

`pack` writes such a folder and `expand` turns it into a checkpoint that any loader takes. A packed
tensor `x` [rows, ...] is `x` int8 beside `x.row_scale` [rows] float32; the others are float16. Files are gzipped,
which takes out the rows of zeros and the rareness of large values.
"""

import gzip
import shutil
from pathlib import Path

import torch
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor

_SCALE = ".row_scale"
_LARGEST = 127
_WORTH_PACKING = 4096  # values; smaller tensors are biases, norms and the like
_FORMAT = {"format": "pt"}


def pack(checkpoint: Path, compact: Path, *, without: str = "") -> None:
    """Write `checkpoint` to the new folder `compact`; tensors whose names begin with `without` are left out."""
    shutil.copytree(checkpoint, compact, ignore=shutil.ignore_patterns("*.safetensors"))
    for file in sorted(checkpoint.rglob("*.safetensors")):
        packed: dict[str, Tensor] = {}
        for name, tensor in load_file(file).items():
            if not (without and name.startswith(without)):
                packed |= _packed(name, tensor)
        target = compact / file.relative_to(checkpoint)
        target.with_suffix(".safetensors.gz").write_bytes(gzip.compress(save(packed, _FORMAT), mtime=0))


def expand(compact: Path, checkpoint: Path) -> None:
    """Write the new folder `checkpoint` in the official layout, in float16; the same bytes every time."""
    shutil.copytree(compact, checkpoint, ignore=shutil.ignore_patterns("*.gz"))
    for file in sorted(compact.rglob("*.safetensors.gz")):
        packed = load(gzip.decompress(file.read_bytes()))
        tensors = {name: _expanded(name, packed) for name in packed if not name.endswith(_SCALE)}
        save_file(tensors, checkpoint / file.relative_to(compact).with_suffix(""), _FORMAT)


def _packed(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A row's largest value becomes 127. Rows are output channels, or entries of a table."""
    if tensor.dim() < 2 or tensor.numel() < _WORTH_PACKING:
        return {name: tensor.half()}
    rows = tensor.float().flatten(1)
    scale = rows.abs().amax(1) / _LARGEST
    steps = rows / torch.where(scale > 0, scale, 1.0)[:, None]
    return {name: steps.round().to(torch.int8).view(tensor.shape), name + _SCALE: scale}


def _expanded(name: str, packed: dict[str, Tensor]) -> Tensor:
    tensor, scale = packed[name], packed.get(name + _SCALE)
    if scale is None:
        return tensor
    return (tensor.float() * scale.view(-1, *[1] * (tensor.dim() - 1))).half()
