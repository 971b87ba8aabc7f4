"""Measure several rates, each as a separate run: a given list of rates, or a search for the capacity."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate

from loadtest.arrivals import Phase, settled
from loadtest.measure import Result, Show, flat, measure, read_result
from loadtest.metrics import Limits
from loadtest.settings import Settings
from loadtest.traces import NoRunError, TraceFolder

LOWEST = 1 / 8  # lower limit of the search, relative to the first rate


@dataclass(frozen=True, slots=True)
class Plan:
    """Rates to try, durations, and stop conditions."""

    first_rate: float = 1.0
    max_rate: float = 100.0
    factor: float = 1.5  # ratio between consecutive rates
    duration_s: float = 30.0  # measured seconds per rate
    settle_s: float = 0.0  # seconds at the rate before measuring
    held_share: float = 0.95  # a rate is sustained if at least this share of requests is good
    collapsed_share: float = 0.5  # the sweep ends at or below this share of good requests
    refinements: int = 2  # rates tried between the last sustained and the first failed rate
    min_requests: int = 0  # minimum number of requests per rate, which can prolong the measurement
    rates: tuple[float, ...] = ()  # rates to try in order, instead of a search
    most_s: float | None = None  # limit on the total duration; rates that would exceed it are not tried

    def phases(self, rate: float) -> tuple[Phase, ...]:
        return settled(rate, max(self.duration_s, self.min_requests / rate), settle_s=self.settle_s)

    def held(self, step: Result) -> bool:
        """Return whether the server sustained the rate."""
        return step.good_share >= self.held_share


@dataclass(frozen=True, slots=True)
class Sweep:
    """All measured rates, in ascending order."""

    title: str
    plan: Plan
    steps: tuple[Result, ...]
    is_cut_short: bool = False  # whether `plan.most_s` ended the sweep

    @property
    def capacity_per_s(self) -> float | None:
        """Highest rate below the first failed rate, or None if the lowest rate failed."""
        return capacity(self.steps, self.plan)

    @property
    def missed(self) -> Result | None:
        """Lowest failed rate."""
        return next((step for step in self.steps if not self.plan.held(step)), None)


def capacity(steps: Sequence[Result], plan: Plan) -> float | None:
    highest = None
    for step in sorted(steps, key=lambda step: step.rate):
        if not plan.held(step):
            return highest
        highest = step.rate
    return highest


def next_rate(steps: Sequence[Result], plan: Plan) -> float | None:
    """Return the next rate after `steps` (in the order of measurement), or None if the sweep is over.

    The search multiplies by `plan.factor` until goodput collapses, or halves until a rate is sustained, down to LOWEST
    of the first rate. It then tries rates between the last sustained and the first failed rate.
    """
    if plan.rates:
        return plan.rates[len(steps)] if len(steps) < len(plan.rates) else None
    if not steps:
        return plan.first_rate
    rates = [step.rate for step in steps]
    held, missed = capacity(steps, plan), min((step.rate for step in steps if not plan.held(step)), default=None)
    if held is None:
        lower = min(rates) / 2
        return lower if lower >= plan.first_rate * LOWEST else None
    highest = max(steps, key=lambda step: step.rate)
    climbs = steps[-1] is highest and rates[0] == min(rates)
    if climbs and highest.good_share > plan.collapsed_share and highest.rate < plan.max_rate:
        return min(highest.rate * plan.factor, plan.max_rate)
    spans = zip(rates, accumulate(rates, min), accumulate(rates, max), strict=True)
    inside = sum(low < rate < high for rate, low, high in spans)
    return math.sqrt(held * missed) if missed is not None and inside < plan.refinements else None


async def sweep(
    settings: Settings, plan: Plan, *, folder: TraceFolder, show: Show, done: Callable[[Result], None]
) -> tuple[Sweep, bool]:
    """Measure each rate in its own folder and pass results to `done`. Return False if Ctrl-C ended the sweep early."""
    folder.check_unused()
    steps: list[Result] = []
    is_complete, is_cut_short, began_s = True, False, time.monotonic()
    while is_complete and (rate := next_rate(steps, plan)) is not None:
        ends_s = time.monotonic() - began_s + sum(phase.duration_s for phase in plan.phases(rate))
        if is_cut_short := bool(steps) and plan.most_s is not None and ends_s > plan.most_s:
            break
        warmup = 0 if steps else settings.warmup
        own = replace(settings, phases=plan.phases(rate), seed=settings.seed + len(steps), warmup=warmup)
        name = f"{len(steps):02d}-rate-{round(rate, 2):g}"
        result, is_complete = await measure(own, TraceFolder(folder.path / name), show=show)
        steps.append(result)
        done(steps[-1])
    swept = Sweep(folder.path.name, plan, tuple(sorted(steps, key=lambda step: step.rate)), is_cut_short)
    steps_record = [{"rate": step.rate, "folder": step.title, **flat(step.summary)} for step in swept.steps]
    record = {"plan": asdict(plan), "capacity_per_s": swept.capacity_per_s}
    folder.write_json("sweep.json", record | {"steps": steps_record})
    return swept, is_complete


def read_sweep(folder: TraceFolder, *, limits: Limits | None = None) -> Sweep:
    """Read the sweep in a folder. Raises `NoRunError`."""
    record = folder.read_json("sweep.json")
    try:
        steps = [read_result(TraceFolder(folder.path / step["folder"]), limits=limits) for step in record["steps"]]
        return Sweep(
            folder.path.name, Plan(**record["plan"] | {"rates": tuple(record["plan"].get("rates", ()))}), tuple(steps)
        )
    except (KeyError, TypeError) as error:
        raise NoRunError(f"{folder.path / 'sweep.json'} was written by a different version: {error!r}") from error
