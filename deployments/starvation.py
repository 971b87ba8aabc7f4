"""Telling a thread that hangs from one that has no processor to run on: on a busy machine that may take seconds."""

import contextlib
from pathlib import Path

_RUNNABLE = "R"


def is_runnable(process: int | str, thread: int) -> bool:
    """Whether a thread runs or would if a processor were free; `process` may be "self". False once it has ended."""
    with contextlib.suppress(OSError):
        return _state(Path(f"/proc/{process}/task/{thread}/stat")) == _RUNNABLE
    return False


def any_runnable(process: int) -> bool:
    """Whether any thread of a process does."""
    with contextlib.suppress(OSError):
        return any(is_runnable(process, int(task.name)) for task in Path(f"/proc/{process}/task").iterdir())
    return False


def _state(stat: Path) -> str:
    return stat.read_text().rpartition(")")[2].split()[0]  # the name in parentheses may hold anything
