"""The packed checkpoint as one that any loader takes.

A packed folder is a checkpoint whose large tensors are int8: `x` [rows, ...] beside `x.row_scale` [rows] float32. The
others are float16. Files are gzipped, which takes out the rows of zeros and the rareness of large values.
"""

import gzip
import shutil
from pathlib import Path

from safetensors.torch import load, save_file
from torch import Tensor

ROW_SCALE = ".row_scale"
FORMAT = {"format": "pt"}


def unpack(packed: Path, checkpoint: Path) -> None:
    """Write the new folder `checkpoint` in the official layout, in float16; the same bytes every time."""
    shutil.copytree(packed, checkpoint, ignore=shutil.ignore_patterns("*.gz"))
    for file in sorted(packed.rglob("*.safetensors.gz")):
        stored = load(gzip.decompress(file.read_bytes()))
        tensors = {name: _unpacked(name, stored) for name in stored if not name.endswith(ROW_SCALE)}
        save_file(tensors, checkpoint / file.relative_to(packed).with_suffix(""), FORMAT)


def _unpacked(name: str, stored: dict[str, Tensor]) -> Tensor:
    tensor, scale = stored[name], stored.get(name + ROW_SCALE)
    if scale is None:
        return tensor
    return (tensor.float() * scale.view(-1, *[1] * (tensor.dim() - 1))).half()
