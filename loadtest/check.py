"""Check the simulator: fit it to some rates of a measured run, and predict the others.

Learning and predicting turns alternate within the run, so any drift in the machine's speed affects both.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadtest.arrivals import Phase
from loadtest.measure import Result
from loadtest.scenario import planned_traffic
from loadtest.service_model import Floats, ServiceModel, observe
from loadtest.simulate import Cluster, Simulation
from loadtest.tables import MS, Table
from serve_app.scaling.policies import TalkerScaling

LEARN, CHECK = "learn", "check"
TURNS = ((LEARN, 0.25), (CHECK, 0.3), (LEARN, 0.5), (CHECK, 0.6), (LEARN, 0.75), (CHECK, 0.9), (LEARN, 1.0))
TOLERANCE = 0.2
SEEDS = 20
STEP_S = 0.01


@dataclass(frozen=True, slots=True)
class Comparison:
    """Measured and predicted p95 TTFB, counted from the planned arrival, at one share of the capacity."""

    share: float
    requests: int
    measured_s: float
    measured_low_s: float  # 90 % confidence interval of the measured percentile, by resampling requests
    measured_high_s: float
    simulated_s: float  # mean over SEEDS

    @property
    def error(self) -> float:
        """Error of the simulated value relative to the measured value."""
        return self.simulated_s / self.measured_s - 1

    @property
    def holds(self) -> bool:
        """Whether the prediction's error is within the limit."""
        return abs(self.error) <= TOLERANCE


def check_phases(capacity: float, *, requests: int, rounds: int) -> tuple[Phase, ...]:
    """Return turns of about `requests` arrivals each, repeated `rounds` times."""
    return tuple(
        Phase(phase_name(kind, share), share * capacity, requests / (share * capacity))
        for _ in range(rounds)
        for kind, share in TURNS
    )


def phase_name(kind: str, share: float) -> str:
    return f"{kind} {share:.0%}"


def compare(result: Result, *, slots: int) -> list[Comparison]:
    """Fit the model to the learning turns, simulate the complete run with its own arrivals, and compare the rest.

    `slots` is the maximum batch size of the server's talker. Raises `NoRunError` if there is too little data.
    """
    phase_of = [next(p.name for p in result.phases if p.holds(trace.planned_s)) for trace in result.traces]
    teaches = [
        name.startswith(LEARN) for name, trace in zip(phase_of, result.traces, strict=True) if trace.ttfb_s is not None
    ]
    model = ServiceModel.learn([one for one, use in zip(observe(result.traces), teaches, strict=True) if use])
    cluster = Cluster(model, TalkerScaling(min_replicas=1, max_replicas=1, sequences_per_replica=slots), None)
    traffic = planned_traffic(result)
    simulated = [
        Simulation(cluster, traffic, seed=seed, warm=1, step_s=STEP_S).run(lambda _: None).ttfb_s
        for seed in range(SEEDS)
    ]
    inside = {share: np.array(phase_of) == phase_name(kind, share) for kind, share in TURNS if kind == CHECK}
    return [comparison(share, result, simulated, mask) for share, mask in inside.items()]


def comparison(share: float, result: Result, simulated: Sequence[Floats], mask: NDArray[np.bool_]) -> Comparison:
    picked = [trace.ttfb_s for trace, inside in zip(result.traces, mask, strict=True) if inside]
    measured = np.array([ttfb_s for ttfb_s in picked if ttfb_s is not None])
    resampled = np.random.default_rng(0).choice(measured, size=(1000, len(measured)))
    low, high = np.percentile(np.percentile(resampled, 95, axis=1), (5, 95))
    predicted = [np.nanpercentile(ttfb_s[mask], 95) for ttfb_s in simulated]
    real = float(np.percentile(measured, 95))
    return Comparison(share, len(measured), real, float(low), float(high), float(np.mean(predicted)))


def comparison_table(rows: Sequence[Comparison]) -> Table:
    titles = ("of capacity", "requests", "TTFB p95 measured, ms", "90 % interval", "simulated", "error", "within 20 %")
    cells = []
    for row in rows:
        times_s = (row.measured_s, row.measured_low_s, row.measured_high_s, row.simulated_s)
        real, low, high, simulated = (f"{MS * time_s:.0f}" for time_s in times_s)
        judged = (f"{row.error:+.0%}", "yes" if row.holds else "no")
        cells.append([f"{row.share:.0%}", str(row.requests), real, f"{low} to {high}", simulated, *judged])
    return Table(titles, cells)
