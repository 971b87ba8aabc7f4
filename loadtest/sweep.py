"""Rising rates until the server no longer keeps up: where is its capacity?"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from loadtest.arrivals import Phase
from loadtest.measure import Result, Show, flat, measure, read_result
from loadtest.metrics import Limits
from loadtest.runner import Settings
from loadtest.traces import NoRunError, RunFolder


@dataclass(frozen=True, slots=True)
class Plan:
    """Which rates are tried, and when it is over."""

    first_rate: float
    max_rate: float
    factor: float  # from one rate to the next
    duration_s: float  # measured, for each rate
    settle_s: float  # before it, at the same rate, not measured
    held_share: float = 0.95  # of requests are good: the server holds the rate
    collapsed_share: float = 0.5  # of requests are good, or fewer: the sweep ends
    refinements: int = 2  # rates tried between the last that was held and the first that was not

    def phases(self, rate: float) -> tuple[Phase, ...]:
        """The load of one rate."""
        settle = (Phase("settling in", rate, self.settle_s, measured=False),) if self.settle_s else ()
        return (*settle, Phase("measured", rate, self.duration_s))

    def held(self, step: "Step") -> bool:
        """Whether the server kept up with the rate."""
        return step.good_share >= self.held_share


@dataclass(frozen=True, slots=True)
class Step:
    """One rate that was tried."""

    rate: float
    result: Result

    @property
    def good_share(self) -> float:
        """Share of the requests that met every limit."""
        return self.result.summary.good_share or 0.0


@dataclass(frozen=True, slots=True)
class Sweep:
    """All rates that were tried, in ascending order."""

    title: str
    plan: Plan
    steps: tuple[Step, ...]

    @property
    def capacity_per_s(self) -> float | None:
        """The highest rate below the first one that was not held; None if even the lowest was not."""
        return capacity(self.steps, self.plan)


# What shows the run at a rate, after the steps before it.
ShowStep = Callable[[Sequence[Step], float], Show]


def capacity(steps: Sequence[Step], plan: Plan) -> float | None:
    """See `Sweep.capacity_per_s`."""
    highest = None
    for step in sorted(steps, key=lambda step: step.rate):
        if not plan.held(step):
            return highest
        highest = step.rate
    return highest


def next_rate(steps: Sequence[Step], plan: Plan) -> float | None:
    """What to try after `steps` (in the order in which they were tried), None if nothing.

    First up by `plan.factor` until goodput collapses, then between the last rate that was held and the first that was
    not.
    """
    if not steps:
        return plan.first_rate
    highest = max(steps, key=lambda step: step.rate)
    rising = highest.good_share > plan.collapsed_share and highest.rate < plan.max_rate
    climbed = steps[-1].rate == highest.rate
    if rising and climbed:
        return min(highest.rate * plan.factor, plan.max_rate)
    return _between(steps, plan)


def _between(steps: Sequence[Step], plan: Plan) -> float | None:
    lower = capacity(steps, plan)
    upper = min((step.rate for step in steps if not plan.held(step)), default=None)
    rates = [step.rate for step in steps]
    climbed = sum(rate == highest for rate, highest in zip(rates, accumulate(rates, max), strict=True))
    if lower is None or upper is None or len(steps) - climbed >= plan.refinements:
        return None
    return math.sqrt(lower * upper)


async def sweep(settings: Settings, plan: Plan, *, folder: RunFolder, show: ShowStep) -> tuple[Sweep, bool]:
    """Measure rate after rate, each in a folder of its own. False with the sweep if Ctrl-C ended it early."""
    folder.check_unused()
    steps: list[Step] = []
    whole = True
    while whole and (rate := next_rate(steps, plan)) is not None:
        step_folder = RunFolder(folder.path / f"{len(steps):02d}-rate-{rate:.2f}")
        step_settings = replace(settings, phases=plan.phases(rate), seed=settings.seed + len(steps))
        if steps:
            step_settings = replace(step_settings, warmup=0)
        result, whole = await measure(step_settings, step_folder, show=show(steps, rate))
        steps.append(Step(rate, result))
    done = Sweep(folder.path.name, plan, tuple(sorted(steps, key=lambda step: step.rate)))
    folder.write_json("sweep.json", sweep_record(done))
    return done, whole


def sweep_record(done: Sweep) -> dict[str, Any]:
    """What sweep.json says."""
    return {
        "plan": {name: getattr(done.plan, name) for name in Plan.__slots__},
        "capacity_per_s": done.capacity_per_s,
        "steps": [{"rate": step.rate, "folder": step.result.title, **flat(step.result.summary)} for step in done.steps],
    }


def read_sweep(folder: RunFolder, *, limits: Limits | None = None) -> Sweep:
    """The sweep in a folder. Raises NoRunError."""
    record = folder.read_json("sweep.json")
    try:
        steps = [
            Step(step["rate"], read_result(RunFolder(folder.path / step["folder"]), limits=limits))
            for step in record["steps"]
        ]
        return Sweep(folder.path.name, Plan(**record["plan"]), tuple(steps))
    except (KeyError, TypeError) as error:
        raise NoRunError(f"{folder.path / 'sweep.json'} was written by another version: {error!r}") from error
