"""Processes the records of finished requests on its own thread, so that requests do not wait for it."""

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from itertools import pairwise
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Protocol

from deployments.serving import metrics
from serve_app.api.request_record import HAND_ON_S, LINES, OLDER_FILES, RequestRecord
from serve_app.extension import Opened
from serve_app.extensions.records.request_lines import story_of

logger = logging.getLogger(__name__)

# Records are processed in batches: one alone, on a thread that has just slept, takes as long as three.
FLUSH_S = 10.0
_FILE_BYTES = 64 << 20  # of each ingress replica: about 300,000 requests


class RecordSink(Protocol):
    """Receives the records, on the keeper's thread."""

    def receive(self, record: RequestRecord) -> None: ...

    def flush(self, *, is_last: bool) -> None:
        """Called every FLUSH_S, and at the end."""
        ...


class RecordKeeper(Opened):
    """Passes each record to all sinks."""

    def __init__(self, sinks: Sequence[RecordSink]) -> None:
        self._sinks = sinks
        self._records = queue.SimpleQueue[RequestRecord]()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="records", daemon=True)
        self._thread.start()

    def receive(self, record: RequestRecord) -> None:
        self._records.put(record)

    def close(self) -> None:
        """Return when all records have been processed."""
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        flushed_s = time.monotonic()
        while not self._is_over.wait(HAND_ON_S):
            self._hand_on()
            if time.monotonic() - flushed_s >= FLUSH_S:
                self._flush(is_last=False)
                flushed_s = time.monotonic()
        self._hand_on()
        self._flush(is_last=True)

    def _hand_on(self) -> None:
        while not self._records.empty():
            record = self._records.get()
            with _going_on("request %s is not measured", record.request_id):
                for (_, before_ns), (stage, at_ns) in pairwise(record.usage.marks):
                    metrics.STAGES.record((at_ns - before_ns) / 1e9, stage=stage)
            for sink in self._sinks:
                with _going_on("request %s is not kept by %s", record.request_id, type(sink).__name__):
                    sink.receive(record)

    def _flush(self, *, is_last: bool) -> None:
        for sink in self._sinks:
            with _going_on("%s does not write what it keeps", type(sink).__name__):
                sink.flush(is_last=is_last)


@contextmanager
def _going_on(problem: str, *names: str) -> Iterator[None]:
    """Log errors, such as a write to a full disk, and continue the thread: else records would pile up in memory."""
    try:
        yield
    except Exception:
        logger.exception(problem, *names)


class _PrivateFile(RotatingFileHandler):
    """Files that only this user can read, because they contain names and addresses of clients."""

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600))

    def write(self, line: str) -> None:
        """Write a line at once. Raises OSError, unlike `emit`, which also spends time on a LogRecord."""
        if self.stream is None or self.stream.tell() >= self.maxBytes:  # None: the last one could not be renamed
            self.doRollover()
        assert self.stream is not None
        self.stream.write(line)
        self.stream.flush()


class RequestLines:
    """Writes a line of JSON per request to a file of this replica, next to Serve's logs. It never contains the text."""

    def __init__(self, folder: Path, replica: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{LINES}{replica.replace('#', '_')}.jsonl"
        self._ingress = {"ingress": replica}
        self._file = _PrivateFile(file, maxBytes=_FILE_BYTES, backupCount=OLDER_FILES)

    def receive(self, record: RequestRecord) -> None:
        self._file.write(f"{json.dumps(story_of(record) | self._ingress)}\n")

    def flush(self, *, is_last: bool) -> None:
        """Nothing to flush: each line is written at once."""
        if is_last:
            self._file.close()
