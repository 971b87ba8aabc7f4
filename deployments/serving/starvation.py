"""Tells a thread that hangs from a thread that waits for a processor, for seconds on a busy machine."""

import contextlib
import threading
import time
from pathlib import Path

_RUNNABLE = "R"


def is_runnable(process: int | str, thread: int) -> bool:
    """Whether a thread runs or waits for a processor. `process` may be "self". False once the thread has ended."""
    with contextlib.suppress(OSError):
        return _state(Path(f"/proc/{process}/task/{thread}/stat")) == _RUNNABLE
    return False


def any_runnable(process: int) -> bool:
    with contextlib.suppress(OSError):
        return any(is_runnable(process, int(task.name)) for task in Path(f"/proc/{process}/task").iterdir())
    return False


class ThreadWork:
    """Lets other threads see whether a thread works: the one that constructs this, or the only one of `process`."""

    def __init__(self, process: int | None = None) -> None:
        self._process, self._thread = process or "self", process or threading.get_native_id()
        own_clock = time.pthread_getcpuclockid(threading.get_ident())
        self._clock = own_clock if process is None else ~process << 3 | 2  # as clock_getcpuclockid(3) computes it
        self._worked_s = -1.0
        self._seen_working_s = time.monotonic()

    def idle_s(self, now_s: float) -> float:
        """Seconds since a call of this method last saw it use a processor or wait for one.

        Raises OSError once the thread has ended.
        """
        worked_s = time.clock_gettime(self._clock)
        if worked_s != self._worked_s or is_runnable(self._process, self._thread):
            self._worked_s = worked_s
            self._seen_working_s = now_s
        return now_s - self._seen_working_s


def _state(stat: Path) -> str:
    return stat.read_text().rpartition(")")[2].split()[0]  # the name in parentheses may hold anything
