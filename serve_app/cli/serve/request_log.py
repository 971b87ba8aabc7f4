"""Request log of `talkray serve`, which follows the ingress replicas' files and prints one line per request."""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from serve_app.api.request_record import HAND_ON_S, LINES, OLDER_FILES, Entry

_FILES = f"session_2*/logs/serve/{LINES}Ingress_*"  # in Ray's folder; segments of jobs are in files of `Jobs`
_POLL_S = 0.25


def line(entry: Entry) -> str:
    parts = [entry["time"][:19].replace("T", " "), f"{entry['method']} {entry['path']}", entry["id"], entry["client"]]
    parts += [f"key {entry['key']}"] if entry["key"] is not None else []
    if entry["voice"] is not None:
        parts.append(entry["voice"])
    if entry["ttfa_ms"] is not None:
        parts.append(f"{entry['audio_s']:.1f} s of audio, the first after {entry['ttfa_ms']} ms")
    return "  ".join([*parts, entry["outcome"]])


@contextlib.contextmanager
def followed(folder: Path, show: Callable[[Entry], None]) -> Iterator[None]:
    """Pass entries of the request files in Ray's `folder` to `show` as they are written, on a separate thread."""
    is_over = threading.Event()
    reader = threading.Thread(target=_follow, args=(folder, show, is_over), daemon=True)
    reader.start()
    try:
        yield
    finally:
        is_over.set()
        reader.join()


def _follow(folder: Path, show: Callable[[Entry], None], is_over: threading.Event) -> None:
    places: dict[int, int] = {}  # bytes already read, by inode, because files are renamed when full
    is_last = False
    while not is_last:
        is_last = is_over.wait(_POLL_S)
        if is_last and places:
            time.sleep(HAND_ON_S + _POLL_S)  # replicas may not have written the records of finished requests yet
        for each in _new_lines(folder, places):
            with contextlib.suppress(OSError):  # closed output, as in `talkray serve | head`, or a full disk
                show(json.loads(each))


def _new_lines(folder: Path, places: dict[int, int]) -> Iterator[bytes]:
    replicas = {path.parent / f"{path.name.partition('.')[0]}.jsonl" for path in folder.glob(_FILES)}
    for newest in sorted(replicas):
        # Files may be renamed to a higher number at any moment. In this order, no file is missed, but a file may be
        # read twice.
        names = [newest, *(newest.with_name(f"{newest.name}.{number}") for number in range(1, OLDER_FILES + 1))]
        with contextlib.ExitStack() as opened:
            files: list[BinaryIO] = []
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    files.append(opened.enter_context(name.open("rb")))
            for file in reversed(files):
                yield from _new_lines_of(file, places)


def _new_lines_of(file: BinaryIO, places: dict[int, int]) -> list[bytes]:
    status = os.fstat(file.fileno())
    known = places.get(status.st_ino, 0)
    start = known if known <= status.st_size else 0  # a new file may reuse the inode of a deleted file
    file.seek(start)
    read = file.read()
    whole = read[: read.rfind(b"\n") + 1]
    places[status.st_ino] = start + len(whole)
    return whole.splitlines()
