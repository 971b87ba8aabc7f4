"""Is the simulator right? One measured run teaches it at some rates and examines it at others.

Rates to learn from and rates to predict take turns within the run: a machine that gets slower or faster in between
does so for both.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.arrivals import Phase
from loadtest.measure import Result
from loadtest.scenario import planned_traffic
from loadtest.service_model import Floats, ServiceModel, observe
from loadtest.simulate import Cluster, Simulation
from serve_app.autoscaling import TalkerScaling

LEARN, CHECK = "learn", "check"
TURNS = ((LEARN, 0.25), (CHECK, 0.3), (LEARN, 0.5), (CHECK, 0.6), (LEARN, 0.75), (CHECK, 0.9), (LEARN, 1.0))
TOLERANCE = 0.2
SEEDS = 20
STEP_S = 0.01


@dataclass(frozen=True, slots=True)
class Comparison:
    """One share of capacity: p95 of TTFB from the planned arrival, measured and predicted."""

    share: float
    requests: int
    measured_s: float
    measured_low_s: float  # 90 % interval of the measured percentile, by resampling the requests
    measured_high_s: float
    simulated_s: float  # mean over SEEDS

    @property
    def error(self) -> float:
        """Of the simulated value, as a share of the measured one."""
        return self.simulated_s / self.measured_s - 1

    @property
    def holds(self) -> bool:
        """Whether the prediction is as good as was promised."""
        return abs(self.error) <= TOLERANCE


def check_phases(capacity: float, *, requests: int, rounds: int) -> tuple[Phase, ...]:
    """Each turn as long as about `requests` arrivals take, all turns `rounds` times."""
    return tuple(
        Phase(phase_name(kind, share), share * capacity, requests / (share * capacity))
        for _ in range(rounds)
        for kind, share in TURNS
    )


def phase_name(kind: str, share: float) -> str:
    """How a turn is called in the results."""
    return f"{kind} {share:.0%}"


def compare(result: Result, *, slots: int) -> list[Comparison]:
    """Learn from the turns to learn from, simulate the whole run with its own arrivals, compare the other turns.

    `slots`: sequences that the server's talker batches. Raises NoRunError if there is too little to learn from.
    """
    learned_from = {phase_name(kind, share) for kind, share in TURNS if kind == LEARN}
    observed = observe(result.traces)
    teaches = [
        phase_of(result, trace.planned_s) in learned_from
        for trace in result.traces
        if trace.failure is None and trace.first_byte_s is not None
    ]
    model = ServiceModel.learn([one for one, useful in zip(observed, teaches, strict=True) if useful])
    simulated = [simulate_ttfb(model, result, slots=slots, seed=seed) for seed in range(SEEDS)]
    return [comparison(result, simulated, share) for kind, share in TURNS if kind == CHECK]


def phase_of(result: Result, planned_s: float) -> str:
    """The phase in which a request was due."""
    return next(placed.phase.name for placed in result.phases if placed.holds(planned_s))


def simulate_ttfb(model: ServiceModel, result: Result, *, slots: int, seed: int) -> Floats:
    """TTFB of every request of the run, as the simulator has it."""
    settings = TalkerScaling(min_replicas=1, max_replicas=1, sequences_per_replica=slots)
    cluster = Cluster(model, settings, None)
    simulation = Simulation(cluster, planned_traffic(result), seed=seed, warm=1, step_s=STEP_S)
    return simulation.run(lambda _: None).ttfb_s


def comparison(result: Result, simulated: Sequence[Floats], share: float) -> Comparison:
    """One row."""
    name = phase_name(CHECK, share)
    mask = np.array([phase_of(result, trace.planned_s) == name for trace in result.traces])
    measured = np.array(
        [
            trace.first_byte_s - trace.planned_s
            for trace, inside in zip(result.traces, mask, strict=True)
            if inside and trace.failure is None and trace.first_byte_s is not None
        ]
    )
    generator = np.random.default_rng(0)
    resampled = np.percentile(generator.choice(measured, size=(1000, len(measured))), 95, axis=1)
    low, high = np.percentile(resampled, (5, 95))
    return Comparison(
        share=share,
        requests=len(measured),
        measured_s=float(np.percentile(measured, 95)),
        measured_low_s=float(low),
        measured_high_s=float(high),
        simulated_s=float(np.mean([np.nanpercentile(ttfb_s[mask], 95) for ttfb_s in simulated])),
    )
