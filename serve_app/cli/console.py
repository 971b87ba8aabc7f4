"""What a person sees of a command that takes time, and of the requests that a server answers."""

import contextlib
import json
import time
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console

from serve_app.api import request_log


def print_json(entry: request_log.Entry) -> None:
    print(json.dumps(entry), flush=True)


def print_line(entry: request_log.Entry) -> None:
    print(request_log.line(entry), flush=True)


class ProgressLine:
    """One changing line with a spinner on a terminal, one line per stage elsewhere."""

    def __init__(self, file: TextIO) -> None:
        self._console = Console(file=file, highlight=False)
        self._status = self._console.status("starting")
        self._started_s = time.monotonic()

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status.stop()

    def report(self, stage: str) -> None:
        """Show what is going on now."""
        if self._console.is_terminal:
            self._status.update(stage)
            self._status.start()
        else:
            with contextlib.suppress(OSError):  # a full disk under its output does not end a server
                self._console.print(f"[{self._elapsed()}] {stage}", markup=False, soft_wrap=True)

    def done(self, message: str) -> None:
        self._status.stop()
        self._console.print(f"{message} (after {self._elapsed()})", markup=False, soft_wrap=True)

    def _elapsed(self) -> str:
        return f"{time.monotonic() - self._started_s:.1f} s"
