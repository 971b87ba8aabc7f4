"""The voice that needs no download: a small checkpoint of the served architecture that speaks English.

It ships packed, in `voice/` beside this file, and is expanded into the user's cache on first use. How it was made and
what it is worth: `docs/demo-voice.md`.
"""

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from deployments.compact_weights import expand

_PACKED = Path(__file__).parent / "voice"
_DIGITS = 12  # of the digest that names a folder


def embedded_path() -> Path:
    """The directory of the embedded checkpoint; written first where this user has none yet.

    It is written aside and renamed, so that a reader sees all of it or nothing and two writers at once do no harm.
    """
    directory = cache_directory() / f"voice-{digest(_PACKED)}"
    if not directory.is_dir():
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix="voice-") as scratch:
            written = Path(scratch) / "checkpoint"
            write_embedded(written)
            _publish(written, directory)
    return directory


def cache_directory() -> Path:
    """Where generated files live: TALKRAY_CACHE, else the user's cache."""
    named = os.environ.get("TALKRAY_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "talkray"


def write_embedded(directory: Path) -> None:
    """Write the embedded checkpoint to a new directory; the same bytes every time."""
    expand(_PACKED, directory)


def digest(directory: Path) -> str:
    """Of the names and contents of all files, so that another voice never meets an older one's folder."""
    state = hashlib.sha256()
    for file in sorted(file for file in directory.rglob("*") if file.is_file()):
        state.update(f"{file.relative_to(directory)}\0{file.stat().st_size}\0".encode())
        state.update(file.read_bytes())
    return state.hexdigest()[:_DIGITS]


def _publish(written: Path, directory: Path) -> None:
    try:
        written.rename(directory)
    except OSError:
        if not directory.is_dir():
            raise
        shutil.rmtree(written)  # another process was first
