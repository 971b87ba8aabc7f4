"""Create the released tokenizer's vocab.json and merges.txt from `qwen.tiktoken` in the wheel of `dashscope`.

`python -m tools.experiments.parity.qwen_tokenizer OUT` downloads the wheel and writes the files.
"""

import argparse
import base64
import json
import subprocess
import sys
import tempfile
import zipfile
from itertools import pairwise
from pathlib import Path

from talkray_tools.byte_tokenizer import byte_alphabet, tokenizer_config

WHEEL = "dashscope==2.0.2"

Ranks = dict[bytes, int]


def fetch_ranks(scratch: Path) -> Ranks | None:
    """Return tokens and their ids, or None if the wheel cannot be downloaded."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), WHEEL]
    if subprocess.run(command, check=False).returncode:
        return None
    (wheel,) = scratch.glob("dashscope-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith("/qwen.tiktoken"))
        pairs = (line.split() for line in archive.read(member).splitlines())
        return {base64.b64decode(token): int(rank) for token, rank in pairs}


def merge_of(token: bytes, ranks: Ranks) -> tuple[bytes, bytes]:
    """Return the two tokens that the last merge joined, by applying all lower-ranked merges to the token's bytes."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        joined = [ranks.get(first + second, len(ranks)) for first, second in pairwise(parts)]
        best = joined.index(min(joined))
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    first, second = parts
    return first, second


def write_tokenizer(directory: Path, ranks: Ranks) -> None:
    letters = dict(zip(byte_order(), byte_alphabet(), strict=True))

    def spell(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = {spell(token): rank for token, rank in ranks.items()}
    (directory / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    tokens = sorted((token for token in ranks if len(token) > 1), key=ranks.__getitem__)
    merges = [" ".join(map(spell, merge_of(token, ranks))) for token in tokens]
    (directory / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(len(ranks))), encoding="utf-8")


def byte_order() -> list[int]:
    """Return the bytes in the order of `byte_alphabet`: printable bytes first."""
    printable = [ord(letter) for letter in byte_alphabet() if ord(letter) < 256]
    return printable + sorted(set(range(256)) - set(printable))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.experiments.parity.qwen_tokenizer")
    parser.add_argument("out", type=Path)
    directory = parser.parse_args().out
    with tempfile.TemporaryDirectory() as scratch:
        ranks = fetch_ranks(Path(scratch))
    if ranks is None:
        return 1
    write_tokenizer(directory, ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
