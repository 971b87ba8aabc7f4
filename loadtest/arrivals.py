"""When requests are due: drawn before the run, so that a slow server cannot slow down its own load."""

from enum import StrEnum

import numpy as np

from loadtest import corpus
from loadtest.traces import ScheduledRequest


class Arrivals(StrEnum):
    """How the gaps between requests are distributed."""

    POISSON = "poisson"  # independent callers: exponential gaps
    CONSTANT = "constant"  # equal gaps


def constant_times(rate: float, duration_s: float) -> list[float]:
    """Arrival times in seconds at `rate` per second, the first at 0, all before `duration_s`."""
    count = int(np.ceil(rate * duration_s))
    return [time for time in (index / rate for index in range(count)) if time < duration_s]


def poisson_times(rate: float, duration_s: float, *, seed: int) -> list[float]:
    """Arrival times in seconds of a Poisson process of `rate` per second on [0, `duration_s`). May be empty."""
    generator = np.random.default_rng(seed)
    times = []
    time = generator.exponential(1 / rate)
    while time < duration_s:
        times.append(time)
        time += generator.exponential(1 / rate)
    return times


def arrival_times(arrivals: Arrivals, rate: float, *, duration_s: float, seed: int) -> list[float]:
    """Planned times of all requests in ascending order, in seconds since the start of the run."""
    if arrivals is Arrivals.CONSTANT:
        return constant_times(rate, duration_s)
    return poisson_times(rate, duration_s, seed=seed)


def plan_requests(arrivals: Arrivals, rate: float, *, duration_s: float, seed: int) -> list[ScheduledRequest]:
    """The whole schedule of a run: times and texts, all of them settled by the arguments."""
    times_s = arrival_times(arrivals, rate, duration_s=duration_s, seed=seed)
    texts = corpus.choose(len(times_s), seed=seed)
    return [ScheduledRequest(index, *request) for index, request in enumerate(zip(times_s, texts, strict=True))]
