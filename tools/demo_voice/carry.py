"""Keeps what a step left where the machine may be taken away: in files small enough to be fetched one by one.

    python -m tools.demo_voice.carry pack RUN OUT
    python -m tools.demo_voice.carry unpack OUT RUN

Holds the codec's and the talker's weights without the state of their training, the codes and the index. The audio is
not worth its size: the teacher reads it again within a minute or two.
"""

import argparse
import io
import logging
import sys
import tarfile
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

_PART = 14_000_000  # bytes
_CODEC = "codec/latest.pt"
_CODEC_WEIGHTS = "codec/weights.pt"
_CONTENTS = {  # archives by name: what a later step needs may be brought alone
    "corpus": ("index.jsonl", "codes.i16", "frames.json"),
    "codec": ("codec/report.json", "codec/log.jsonl"),
    "talker": ("talker/best.pt", "talker/log.jsonl", "talker/model"),
}


def pack(run: Path, out: Path) -> None:
    """Write what there is of a run to OUT/corpus.tgz.000 and so on."""
    out.mkdir(parents=True, exist_ok=True)
    for archive, names in _CONTENTS.items():
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=6) as files:
            for name in names:
                if (run / name).exists():
                    files.add(run / name, name)
            if archive == "codec" and (run / _CODEC).exists():
                _add(files, _CODEC_WEIGHTS, _codec_weights(run / _CODEC))
        _write_parts(out, archive, packed.getvalue())


def unpack(out: Path, run: Path) -> None:
    """Put everything back that is in OUT."""
    for archive in _CONTENTS:
        content = b"".join(part.read_bytes() for part in sorted(out.glob(f"{archive}.tgz.*")))
        if content:
            with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as files:
                files.extractall(run, filter="data")


def _write_parts(out: Path, archive: str, content: bytes) -> None:
    for old in out.glob(f"{archive}.tgz.*"):
        old.unlink()
    for number, first in enumerate(range(0, len(content), _PART)):
        (out / f"{archive}.tgz.{number:03d}").write_bytes(content[first : first + _PART])
    logger.info(f"{archive}: {len(content) / 1e6:.1f} MB in {-(-len(content) // _PART)} files")


def _codec_weights(checkpoint: Path) -> bytes:
    """In full precision: the nearest entries are sensitive."""
    state = torch.load(checkpoint, map_location="cpu", weights_only=True)
    buffer = io.BytesIO()
    torch.save({"model": state["model"]}, buffer)
    return buffer.getvalue()


def _add(files: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    files.addfile(entry, io.BytesIO(content))


def main(arguments: list[str]) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo_voice.carry")
    parser.add_argument("action", choices=("pack", "unpack"))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    (pack if options.action == "pack" else unpack)(options.source, options.target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
