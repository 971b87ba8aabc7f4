"""Process the records of finished requests on a separate thread, so that requests do not wait for this work."""

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
from serve_app.extension import ExtensionState
from serve_app.extensions.records.request_lines import story_of

logger = logging.getLogger(__name__)

# The thread processes records in batches, because after a sleep, a single record takes as long as three.
FLUSH_S = 10.0
_FILE_BYTES = 64 << 20  # maximum size per file, about 300,000 requests


class RecordSink(Protocol):
    """Consumer of request records, called on the record keeper's thread."""

    def receive(self, record: RequestRecord) -> None: ...

    def flush(self, *, is_last: bool) -> None:
        """Write buffered data. The record keeper calls `flush` every FLUSH_S seconds, and at the end."""
        ...


class RecordKeeper(ExtensionState):
    """Thread that passes each record to all sinks."""

    def __init__(self, sinks: Sequence[RecordSink]) -> None:
        self._sinks = sinks
        self._records = queue.SimpleQueue[RequestRecord]()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="records", daemon=True)
        self._thread.start()

    def receive(self, record: RequestRecord) -> None:
        self._records.put(record)

    def close(self) -> None:
        """Process all remaining records, and stop the thread."""
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
            with _going_on("request %s is missing from the stage metrics", record.request_id):
                for (_, before_ns), (stage, at_ns) in pairwise(record.usage.marks):
                    metrics.STAGES.record((at_ns - before_ns) / 1e9, stage=stage)
            for sink in self._sinks:
                with _going_on("request %s: its record was not stored by %s", record.request_id, type(sink).__name__):
                    sink.receive(record)

    def _flush(self, *, is_last: bool) -> None:
        for sink in self._sinks:
            with _going_on("%s could not write its buffered records", type(sink).__name__):
                sink.flush(is_last=is_last)


@contextmanager
def _going_on(problem: str, *names: str) -> Iterator[None]:
    """Log all errors, such as a full disk, and continue, because records would otherwise accumulate in memory."""
    try:
        yield
    except Exception:
        logger.exception(problem, *names)


class _PrivateFile(RotatingFileHandler):
    """Rotating log files with mode 0600, because they contain clients' names and addresses."""

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600))

    def write(self, line: str) -> None:
        """Write and flush a line, without a LogRecord. Raises OSError, unlike `emit`."""
        if self.stream is None or self.stream.tell() >= self.maxBytes:  # None after a failed rename
            self.doRollover()
        assert self.stream is not None
        self.stream.write(line)
        self.stream.flush()


class RequestLines:
    """Writes one JSON line per request, without the text, to a file for this replica next to Serve's logs."""

    def __init__(self, folder: Path, replica: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{LINES}{replica.replace('#', '_')}.jsonl"
        self._ingress = {"ingress": replica}
        self._file = _PrivateFile(file, maxBytes=_FILE_BYTES, backupCount=OLDER_FILES)

    def receive(self, record: RequestRecord) -> None:
        self._file.write(f"{json.dumps(story_of(record) | self._ingress)}\n")

    def flush(self, *, is_last: bool) -> None:
        """Close the file on shutdown. There is nothing to flush, because `receive` flushes each line."""
        if is_last:
            self._file.close()
