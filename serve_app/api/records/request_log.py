"""One line for each request, in the command that started the server. Its replicas send it the records by a pipe."""

import contextlib
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from deployments.serving import reports
from serve_app.api.records.request_record import Entry, now

_CUT_OFF = "server stopped"


def line(entry: Entry) -> str:
    parts = [entry["time"][:19].replace("T", " "), f"{entry['method']} {entry['path']}", entry["id"], entry["client"]]
    parts += [f"key {entry['key']}"] if entry["key"] is not None else []
    if entry["voice"] is not None:
        parts.append(entry["voice"])
    if entry["ttfa_ms"] is not None:
        parts.append(f"{entry['audio_s']:.1f} s of audio, the first after {entry['ttfa_ms']} ms")
    return "  ".join([*parts, entry["outcome"]])


@contextlib.contextmanager
def shown(
    show: Callable[[Entry], None], folder: Path, *, report: Callable[[str], None] = lambda stage: None
) -> Iterator[None]:
    """Pass the entries of all replicas that are started within to `show`, and the stages of their starts to `report`,
    on a thread of its own.

    The pipe is made in a `folder` that only this user may enter.
    """
    pipe = folder / "reports"
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDWR)  # one that can write as well never reads an end
    reader = threading.Thread(target=_read, args=(end, show, report), daemon=True)
    reader.start()
    os.environ[reports.VARIABLE] = str(pipe)
    try:
        yield
    finally:
        del os.environ[reports.VARIABLE]
        os.write(end, b"\n")
        reader.join()


def _read(end: int, show: Callable[[Entry], None], report: Callable[[str], None]) -> None:
    """Until an empty line; then what has begun and has not ended."""
    spoken: dict[str, Entry] = {}
    with open(end, encoding="utf-8") as lines:
        for report_line in itertools.takewhile(lambda report_line: report_line != "\n", lines):
            kind, *values = json.loads(report_line)
            if kind == "stage":
                report(*values)
                continue
            name, is_over, entry = values
            spoken.pop(name, None)
            if is_over:
                _show(show, entry)
            else:
                spoken[name] = entry
    for entry in spoken.values():
        _show(show, entry | {"time": now(), "outcome": _CUT_OFF})


def _show(show: Callable[[Entry], None], entry: Entry) -> None:
    with contextlib.suppress(OSError):  # of our own output, as after `talkray serve | head`, or on a full disk
        show(entry)
