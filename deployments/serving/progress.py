"""Stages of a start, for the command that waits for it.

A command that starts the application names a file in TALKRAY_PROGRESS, which replicas inherit; their reports are
appended there, a line each.
"""

import contextlib
import logging
import os
from pathlib import Path
from typing import Self

VARIABLE = "TALKRAY_PROGRESS"

logger = logging.getLogger(__name__)


def report_stage(stage: str) -> None:
    """Log a stage that begins now, and show it to the waiting command."""
    logger.info("%s", stage)
    named = os.environ.get(VARIABLE)
    if named:
        # The waiting command may be gone, and its file with it. Lines this short are written whole.
        with contextlib.suppress(OSError), Path(named).open("a", encoding="utf-8") as file:
            file.write(f"{stage}\n")


class StageLog:
    """Reports of replicas to this process, line by line as they come."""

    def __init__(self, file: Path) -> None:
        self._file, self._read = file, 0

    @classmethod
    def here(cls) -> Self:
        """Of the file that was named when replicas were started; of none where there was none."""
        return cls(Path(os.environ.get(VARIABLE, os.devnull)))

    def new_lines(self) -> list[str]:
        """Whole lines since the last call."""
        if not self._file.is_file():
            return []
        text = self._file.read_text(encoding="utf-8")
        fresh = text[self._read : text.rfind("\n") + 1]
        self._read += len(fresh)
        return fresh.splitlines()
