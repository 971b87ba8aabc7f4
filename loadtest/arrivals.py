"""When requests are due: drawn before the run, so that a slow server cannot slow down its own load."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

import numpy as np

from loadtest import corpus
from loadtest.lengths import SpeechLengths
from loadtest.traces import ScheduledRequest

NIGHT_SHARE = 0.2  # of the peak rate, at the quietest time of a day


class Arrivals(StrEnum):
    """How the gaps between requests are distributed."""

    POISSON = "poisson"  # independent callers: exponential gaps
    CONSTANT = "constant"  # equal gaps


class Shape(StrEnum):
    """How the offered rate changes."""

    STEADY = "steady"
    DAY = "day"  # a sine from NIGHT_SHARE at four in the morning to the full rate twelve hours later


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of the run with one offered rate."""

    name: str
    rate: float  # requests per second
    duration_s: float
    measured: bool = True  # False: the server settles in; sent and traced, but not in the statistics


@dataclass(frozen=True, slots=True)
class PlacedPhase:
    """A phase and when it begins, in seconds since the start of the run."""

    phase: Phase
    start_s: float

    @property
    def end_s(self) -> float:
        """When the next one begins."""
        return self.start_s + self.phase.duration_s

    def holds(self, planned_s: float) -> bool:
        """Whether a request that is due then belongs here."""
        return self.start_s <= planned_s < self.end_s


def place(phases: Sequence[Phase]) -> list[PlacedPhase]:
    """The phases one after the other from 0 on."""
    starts_s = accumulate((phase.duration_s for phase in phases), initial=0.0)
    return [PlacedPhase(phase, start_s) for phase, start_s in zip(phases, starts_s, strict=False)]


def constant_times(rate: float, duration_s: float) -> list[float]:
    """Arrival times in seconds at `rate` per second, the first at 0, all before `duration_s`."""
    count = int(np.ceil(rate * duration_s))
    return [time for time in (index / rate for index in range(count)) if time < duration_s]


def poisson_times(rate: float, duration_s: float, *, seed: int | Sequence[int]) -> list[float]:
    """Arrival times in seconds of a Poisson process of `rate` per second on [0, `duration_s`). May be empty."""
    generator = np.random.default_rng(seed)
    times = []
    time = generator.exponential(1 / rate)
    while time < duration_s:
        times.append(time)
        time += generator.exponential(1 / rate)
    return times


def arrival_times(arrivals: Arrivals, phases: Sequence[Phase], *, seed: int) -> list[float]:
    """Planned times of all requests in ascending order, in seconds since the start of the run."""
    times_s: list[float] = []
    for index, placed in enumerate(place(phases)):
        phase = placed.phase
        if arrivals is Arrivals.CONSTANT:
            inside_s = constant_times(phase.rate, phase.duration_s)
        else:
            inside_s = poisson_times(phase.rate, phase.duration_s, seed=(seed, index))
        times_s.extend(placed.start_s + time_s for time_s in inside_s)
    return times_s


def plan_requests(
    arrivals: Arrivals,
    phases: Sequence[Phase],
    *,
    seed: int,
    lengths: SpeechLengths | None = None,
    texts: Sequence[str] = corpus.SENTENCES,
) -> list[ScheduledRequest]:
    """The whole schedule of a run: times, texts and lengths, all of them settled by the arguments."""
    times_s = arrival_times(arrivals, phases, seed=seed)
    said = corpus.choose(len(times_s), seed=seed, texts=texts)
    frames = lengths.draw(len(times_s), seed=seed) if lengths else [None] * len(times_s)
    return [ScheduledRequest(index, *request) for index, request in enumerate(zip(times_s, said, frames, strict=True))]
