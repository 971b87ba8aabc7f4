"""How long work takes the processor: what other processes take beside it is not counted."""

import gc
import math
import time
from collections.abc import Callable


def least_s(work: Callable[[], object], times: int = 5) -> float:
    """Of this thread, for the fastest of several runs."""
    return min(_seconds(work) for _ in range(times))


def times_as_long(work: Callable[[str], object], unit: str, *, short: int, long: int, limit: float) -> float:
    """How many times as long `long` characters of a repeated `unit` take as `short` ones: in proportion `long / short`.

    As many short texts as make one long text are worked on next to it, because a shared processor changes its speed.
    The least of several turns counts, until one is within the `limit`, because what disturbs a turn differs.
    """
    times, least = long // short, math.inf
    short_text, long_text = (unit * (1 + size // len(unit)) for size in (short, long))
    for _ in range(8):
        long_s = _seconds(lambda: work(long_text[:long]))
        short_s = _seconds(lambda: [work(short_text[:short]) for _ in range(times)])
        least = min(least, times * long_s / short_s)
        if least <= limit:
            break
    return least


def _seconds(work: Callable[[], object]) -> float:
    """Without the collector of garbage, which walks through what other tests have left."""
    gc.disable()
    try:
        begun_s = time.thread_time()
        work()
        return time.thread_time() - begun_s
    finally:
        gc.enable()
