"""Measure rate after rate, each as a separate run: given rates, or a search for where the server stops keeping up."""

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

LOWEST = 1 / 8  # of the first rate: lower rates are not tried


@dataclass(frozen=True, slots=True)
class Plan:
    """Which rates to try, for how long, and when to stop."""

    first_rate: float = 1.0
    max_rate: float = 100.0
    factor: float = 1.5  # from one rate to the next
    duration_s: float = 30.0  # measured, for each rate
    settle_s: float = 0.0  # before the measurement, at the same rate
    held_share: float = 0.95  # share of good requests from which the server holds the rate
    collapsed_share: float = 0.5  # share of good requests at or below which the sweep ends
    refinements: int = 2  # rates tried between the last held one and the first that was not
    min_requests: int = 0  # a rate is tried for longer if it would send fewer
    rates: tuple[float, ...] = ()  # try these in order instead of searching
    most_s: float | None = None  # for all rates: none begins that would end later than this

    def phases(self, rate: float) -> tuple[Phase, ...]:
        return settled(rate, max(self.duration_s, self.min_requests / rate), settle_s=self.settle_s)

    def held(self, step: Result) -> bool:
        """Whether the server kept up with the rate."""
        return step.good_share >= self.held_share


@dataclass(frozen=True, slots=True)
class Sweep:
    """All rates that were tried, in ascending order."""

    title: str
    plan: Plan
    steps: tuple[Result, ...]
    is_cut_short: bool = False  # by `plan.most_s`

    @property
    def capacity_per_s(self) -> float | None:
        """The highest rate below the first one that was not held; None if even the lowest was not."""
        return capacity(self.steps, self.plan)

    @property
    def missed(self) -> Result | None:
        """The lowest rate that was not held."""
        return next((step for step in self.steps if not self.plan.held(step)), None)


def capacity(steps: Sequence[Result], plan: Plan) -> float | None:
    highest = None
    for step in sorted(steps, key=lambda step: step.rate):
        if not plan.held(step):
            return highest
        highest = step.rate
    return highest


def next_rate(steps: Sequence[Result], plan: Plan) -> float | None:
    """The next rate after `steps` (in the order in which they were tried), None if the sweep is over.

    First multiplies by `plan.factor` until goodput collapses, or halves until a rate is held, but not below LOWEST of
    the first; then tries rates between the last that was held and the first that was not.
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
    """Measure rate after rate, each in a folder of its own, and give each to `done`; False if Ctrl-C ended it early."""
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
    """The sweep in a folder. Raises NoRunError."""
    record = folder.read_json("sweep.json")
    try:
        steps = [read_result(TraceFolder(folder.path / step["folder"]), limits=limits) for step in record["steps"]]
        return Sweep(
            folder.path.name, Plan(**record["plan"] | {"rates": tuple(record["plan"].get("rates", ()))}), tuple(steps)
        )
    except (KeyError, TypeError) as error:
        raise NoRunError(f"{folder.path / 'sweep.json'} was written by another version: {error!r}") from error
