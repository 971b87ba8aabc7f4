"""What a person sees while something takes a while."""

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console


class Progress:
    """One changing line with a spinner on a terminal, one line per stage elsewhere."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stdout, highlight=False)
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
            self._console.print(f"[{self._elapsed()}] {stage}", markup=False)

    def done(self, message: str) -> None:
        """Show a result that stays."""
        self._status.stop()
        self._console.print(f"{message} (after {self._elapsed()})", markup=False)

    def _elapsed(self) -> str:
        return f"{time.monotonic() - self._started_s:.1f} s"
