"""One line for each request, for whoever started the server: who asked, what came of it, never the text.

A command that starts the application names a pipe in TALKRAY_REQUESTS, which ingress replicas inherit. They never wait
for its reader: a line that finds no room, or nobody, is lost.
"""

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deployments.protocol import FinishReason, Marks, PcmChunk

VARIABLE = "TALKRAY_REQUESTS"
SAMPLE_BYTES = 2

Entry = dict[str, Any]  # as in `RequestRecord.entry`

_NO_ADDRESS = re.compile(r"[^0-9A-Za-z.:%_-]")  # a proxy in front may pass on anything


@dataclass(slots=True)
class Usage:
    """What a stream has consumed and produced so far."""

    input_tokens: int = 0
    frames: int = 0
    samples: int = 0
    first_audio_ns: int | None = None  # of time.time_ns()
    finish_reason: FinishReason | None = None
    marks: Marks = ()  # of its first audio, where anybody wants to know; later segments bring their own
    ignored: Sequence[Mapping[str, str]] = ()  # of the request
    seed: int | None = None  # as in PcmChunk

    @property
    def tokens(self) -> dict[str, int]:
        """As answers tell them; an output token is one codec frame."""
        inputs, outputs = self.input_tokens, self.frames
        return {"input_tokens": inputs, "output_tokens": outputs, "total_tokens": inputs + outputs}

    def add(self, chunk: PcmChunk) -> None:
        """Counts one more chunk."""
        self.input_tokens = chunk.num_text_tokens
        self.frames += len(chunk.codes)
        self.samples += len(chunk.pcm) // SAMPLE_BYTES
        if chunk.pcm and self.first_audio_ns is None:
            self.first_audio_ns = time.time_ns()
        self.finish_reason = chunk.finish_reason
        self.marks = self.marks or chunk.marks
        self.seed = self.seed if chunk.seed is None else chunk.seed


@dataclass(slots=True)
class RequestRecord:
    """What becomes of one request. One that neither spoke nor failed is not worth a line."""

    request_id: str
    received_ns: int  # of time.time_ns()
    client: str = "unknown"
    voice: str | None = None
    samples_per_s: float = 1.0  # of the audio as it is heard
    usage: Usage = field(default_factory=Usage)
    error: str | None = None  # its code, or what the client did

    def entry(self) -> Entry:
        """As JSON has it."""
        first_ns = self.usage.first_audio_ns
        return {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "id": self.request_id,
            "client": _NO_ADDRESS.sub("?", self.client)[:64],
            "voice": self.voice,
            "audio_s": round(self.usage.samples / self.samples_per_s, 2),
            "ttfa_ms": None if first_ns is None else round((first_ns - self.received_ns) / 1e6),
            "outcome": self.error or self.usage.finish_reason,
        }

    def publish(self) -> None:
        """Show it to the command that started this replica, if one did."""
        named = os.environ.get(VARIABLE)
        if not named or not (self.error or self.usage.finish_reason):
            return
        with contextlib.suppress(OSError):
            pipe = os.open(named, os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(pipe, f"{json.dumps(self.entry())}\n".encode())  # this short it is written whole
            finally:
                os.close(pipe)


def line(entry: Entry) -> str:
    """An entry for people."""
    parts = [entry["time"][11:19], entry["id"], entry["client"]]
    if entry["voice"] is not None:
        parts.append(entry["voice"])
    if entry["ttfa_ms"] is not None:
        parts.append(f"{entry['audio_s']:.1f} s of audio, the first after {entry['ttfa_ms']} ms")
    return "  ".join([*parts, entry["outcome"]])


@contextlib.contextmanager
def shown(show: Callable[[Entry], None], folder: Path) -> Iterator[None]:
    """Pass the entries of all replicas that are started within to `show`, on a thread of its own.

    The pipe is made in a `folder` that only this user may enter.
    """
    pipe = folder / "requests"
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDWR)  # one that can write as well never reads an end
    reader = threading.Thread(target=_read, args=(end, show), daemon=True)
    reader.start()
    os.environ[VARIABLE] = str(pipe)
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        os.write(end, b"\n")
        reader.join()


def _read(end: int, show: Callable[[Entry], None]) -> None:
    """Until an empty line."""
    with open(end, encoding="utf-8") as lines:
        for each in lines:
            if each == "\n":
                return
            with contextlib.suppress(OSError):  # of our own output, as after `talkray serve | head`, or on a full disk
                show(json.loads(each))
