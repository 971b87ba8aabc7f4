"""Embedded checkpoints, which are packed in this folder and unpacked to the user's cache on first use.

A packed folder is a checkpoint whose large tensors are int8: `x` [rows, ...] with `x.row_scale` [rows] float32. The
other tensors are float16. Files are gzipped, which works well because of rows of zeros and because large values are
rare. A second packed folder may add tensors to the first folder's files, and replaces its small files.
"""

import gzip
import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deployments.errors import CheckpointError

if TYPE_CHECKING:  # the application imports this module without torch
    from torch import Tensor

EMBEDDED = "embedded"
EMBEDDED_BASE = "embedded-base"  # the same networks with a speaker encoder, for cloning the voice in a recording
EMBEDDED_BYTES = 37_000_000  # maximum disk space for each
_HERE = Path(__file__).parent
# Folders that are unpacked on top of each other. The last folder contains all small files that differ.
PACKED = {EMBEDDED: (_HERE / "packed",), EMBEDDED_BASE: (_HERE / "packed", _HERE / "packed_base")}
ROW_SCALE = ".row_scale"  # suffix for a packed tensor's scales
FORMAT = {"format": "pt"}
_DIGITS = 12  # length of the digest in a folder name


def unpacked(model: str, cache: Path) -> Path:
    """Return an embedded checkpoint's directory in `cache`, unpacking it if it is missing. Raises CheckpointError.

    The checkpoint is written to a temporary folder, which is then renamed. Readers therefore never see an incomplete
    one, and concurrent writers are safe.
    """
    directory = place(model, cache)
    if directory.is_dir():
        return directory
    from safetensors import SafetensorError

    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix="voice-") as scratch:
            written = Path(scratch) / "checkpoint"
            unpack(PACKED[model], written)
            try:
                written.rename(directory)
            except OSError:
                if not directory.is_dir():  # otherwise another process has created it
                    raise
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(
            f"the embedded voice needs {EMBEDDED_BYTES / 1e6:.0f} MB in {cache} ({reason}): "
            "free space there, or set TALKRAY_CACHE to another folder"
        ) from error
    return directory


def place(model: str, cache: Path) -> Path:
    """Return the directory that `unpacked` uses for a checkpoint. The digest in its name distinguishes versions."""
    digest = hashlib.sha256()
    for folder in PACKED[model]:
        for file in sorted(file for file in folder.rglob("*") if file.is_file()):
            digest.update(f"{file.relative_to(folder)}\0{file.stat().st_size}\0".encode())
            digest.update(file.read_bytes())
    return cache / f"voice-{digest.hexdigest()[:_DIGITS]}"


def unpack(packed: Sequence[Path], checkpoint: Path) -> None:
    """Write `checkpoint`, a new folder in the official layout in float16. Always writes the same bytes."""
    from safetensors.torch import load, save_file

    stored: dict[Path, dict[str, Tensor]] = {}
    for folder in packed:
        shutil.copytree(folder, checkpoint, ignore=shutil.ignore_patterns("*.gz"), dirs_exist_ok=True)
        for file in sorted(folder.rglob("*.safetensors.gz")):
            tensors = stored.setdefault(file.relative_to(folder).with_suffix(""), {})
            tensors |= load(gzip.decompress(file.read_bytes()))
    for name, packed_tensors in stored.items():
        names = (each for each in packed_tensors if not each.endswith(ROW_SCALE))
        save_file({each: _in_float16(each, packed_tensors) for each in names}, checkpoint / name, FORMAT)


def _in_float16(name: str, stored: "dict[str, Tensor]") -> "Tensor":
    tensor, scale = stored[name], stored.get(name + ROW_SCALE)
    if scale is None:
        return tensor
    return (tensor.float() * scale.view(-1, *[1] * (tensor.dim() - 1))).half()
