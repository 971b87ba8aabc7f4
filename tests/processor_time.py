"""How long work takes the processor: what other processes take beside it is not counted."""

import time
from collections.abc import Callable


def least_s(work: Callable[[], object], times: int = 5) -> float:
    """Of this thread, for the fastest of several runs."""
    taken_s = []
    for _ in range(times):
        begun_s = time.thread_time()
        work()
        taken_s.append(time.thread_time() - begun_s)
    return min(taken_s)
