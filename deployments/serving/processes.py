"""Processes that serve streams: garbage collection, and detection of hung threads. On a busy machine, a thread may wait
seconds for a processor without being hung.
"""

import contextlib
import gc
import threading
import time
from pathlib import Path

_RUNNABLE = "R"


def freeze_loaded() -> None:
    """Exclude all existing objects from future garbage collections, which would otherwise pause audio for 0.1 s.

    Forked processes also continue to share these objects' memory.
    """
    gc.collect()
    gc.freeze()


def is_runnable(process: int | str, thread: int) -> bool:
    """Return whether a thread is running or waiting for a processor; False if it has ended. `process` may be "self"."""
    with contextlib.suppress(OSError):
        return _state(Path(f"/proc/{process}/task/{thread}/stat")) == _RUNNABLE
    return False


def any_runnable(process: int) -> bool:
    with contextlib.suppress(OSError):
        return any(is_runnable(process, int(task.name)) for task in Path(f"/proc/{process}/task").iterdir())
    return False


class ThreadWork:
    """Activity monitor for the constructing thread, or for the only thread of `process`. Called by other threads."""

    def __init__(self, process: int | None = None) -> None:
        self._process, self._thread = process or "self", process or threading.get_native_id()
        own_clock = time.pthread_getcpuclockid(threading.get_ident())
        self._clock = own_clock if process is None else ~process << 3 | 2  # computed as in clock_getcpuclockid(3)
        self._worked_s = -1.0
        self._seen_working_s = time.monotonic()

    def idle_s(self, now_s: float) -> float:
        """Return the seconds since a call to this method last saw the thread using or waiting for a processor.

        Raises OSError if the thread has ended.
        """
        worked_s = time.clock_gettime(self._clock)
        if worked_s != self._worked_s or is_runnable(self._process, self._thread):
            self._worked_s = worked_s
            self._seen_working_s = now_s
        return now_s - self._seen_working_s


def _state(stat: Path) -> str:
    return stat.read_text().rpartition(")")[2].split()[0]  # the parenthesized name may contain any character
