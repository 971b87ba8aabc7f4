"""Compute the replicas and nodes for a demand, with the load test's simulator and measurements of one replica."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from deployments.errors import InvalidRequest
from loadtest.arrivals import SpeechLengths
from loadtest.measured import HELD, learn_rows
from loadtest.scenario import DAY_S, draw_traffic, usual_step_s
from loadtest.service_model import ServiceModel
from loadtest.simulate import Cluster, NodeKind, Simulated, Simulation, Traffic
from serve_app.scaling.policies import TalkerScaling
from talkray_tools.plan.tables import Basis

_SIGMA = 0.35  # standard deviation of the log of a response's length
_REQUESTS, _SHORTEST_S, _LONGEST_S = 1000, 10.0, 300.0  # per simulated rate
_DAY_REQUESTS = 100_000  # in a shortened day
_SHORT_DAY_S = (600.0, 1440.0)
_REFUSED = 0.001  # maximum share of refused requests
HOURS_A_MONTH = 730


@dataclass(frozen=True, slots=True)
class Demand:
    """Peak load and latency target."""

    rate: float  # requests per second
    speech_s: float  # mean length of a response
    p95_ms: float  # from the request to the first audible sample

    @property
    def audio_per_s(self) -> float:
        return self.rate * self.speech_s

    @property
    def lengths(self) -> SpeechLengths:
        return SpeechLengths(self.speech_s / math.exp(_SIGMA**2 / 2), _SIGMA)


@dataclass(frozen=True, slots=True)
class Predicted:
    """Simulated results for a number of replicas and a load."""

    p95_ms: float
    refused: float  # share of all requests
    late: float  # share of requests whose audio arrived more slowly than it plays

    def holds(self, demand: Demand) -> bool:
        return self.p95_ms <= demand.p95_ms and self.refused <= _REFUSED and self.late <= 1 - HELD


@dataclass(frozen=True)  # without slots, because of cached properties
class Sizing:
    """Replicas and nodes for a demand."""

    demand: Demand
    basis: Basis
    gpus_per_node: int
    spare_nodes: int

    @cached_property
    def model(self) -> ServiceModel:
        learned = learn_rows(self.basis.table.rows)
        knots = learned.knots * np.array([1.0, self.basis.slower])
        return replace(learned, knots=knots, ttfb_s=learned.ttfb_s * self.basis.slower)

    @property
    def most_per_replica(self) -> float:
        """Highest measured requests per second for one replica, scaled down if the machine is slower."""
        return self.basis.table.highest.audio_per_s / self.basis.slower / self.demand.speech_s

    @cached_property
    def carried(self) -> float:
        """Requests per second that one replica serves within the target p95, with 2 % precision.

        Never exceeds the highest measured rate. Raises `InvalidRequest` if the lowest measured rate misses the target.
        """
        least = min(row.audio_per_s for row in self.basis.table.rows if not row.is_held_out)
        low, high = least / self.basis.slower / self.demand.speech_s, self.most_per_replica
        if self.outcome(1, high).holds(self.demand):
            return high
        lowest = self.outcome(1, low)
        if not lowest.holds(self.demand):
            raise InvalidRequest(
                f"--p95 {self.demand.p95_ms:g}: p95 is {lowest.p95_ms:.0f} ms even at {low:.2g} requests/s, "
                f"and {lowest.late:.0%} of the responses arrive more slowly than playback "
                f"({self.basis.source}). Raise --p95, or plan a faster machine."
            )
        while high - low > 0.02 * high:
            middle = (low + high) / 2
            low, high = (middle, high) if self.outcome(1, middle).holds(self.demand) else (low, middle)
        return low

    @cached_property
    def needed(self) -> int:
        """Replicas needed for the demand while all nodes are up."""
        return max(1, math.ceil(self.demand.rate / self.carried - 1e-9))

    @property
    def nodes(self) -> int:
        return math.ceil(self.needed / self.gpus_per_node) + self.spare_nodes

    @property
    def replicas(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def replicas_left(self) -> int:
        """Replicas that remain if one node fails."""
        return self.replicas - self.gpus_per_node

    def outcome(self, replicas: int, rate: float) -> Predicted:
        """Simulate a steady rate."""
        duration_s = min(_LONGEST_S, max(_SHORTEST_S, _REQUESTS / rate))
        traffic = draw_traffic("steady", rate, duration_s=duration_s, lengths=self.demand.lengths, seed=1)
        return _outcome(self._simulate(replicas, traffic=traffic, advanced=lambda _: None))

    def day(self, advanced: Callable[[float], None], *, day_s: float) -> Simulated:
        """Simulate the whole pool over a day, from night to peak load and back."""
        traffic = draw_traffic(
            "day", self.demand.rate, duration_s=day_s, lengths=self.demand.lengths, seed=2, day_s=day_s
        )
        return self._simulate(self.replicas, traffic=traffic, advanced=advanced)

    def short_day_s(self) -> float:
        """Length of a shortened day that passes through all rates and has enough requests for an hourly p95."""
        shortest, longest = _SHORT_DAY_S
        return min(DAY_S, longest, max(shortest, _DAY_REQUESTS / self.demand.rate))

    def _simulate(self, replicas: int, *, traffic: Traffic, advanced: Callable[[float], None]) -> Simulated:
        rows = self.basis.table.max_num_seqs
        scaling = TalkerScaling(min_replicas=replicas, max_replicas=replicas, sequences_per_replica=rows)
        cluster = Cluster(self.model, scaling, None, talker_nodes=NodeKind())
        step_s = usual_step_s(self.model, traffic)
        return Simulation(cluster, traffic, seed=3, warm=replicas, step_s=step_s).run(advanced)


def _outcome(done: Simulated) -> Predicted:
    p95_s = done.ttfb_percentile_s(95)
    requests = max(1, len(done.ttfb_s))
    p95_ms = math.inf if p95_s is None else 1000 * p95_s
    return Predicted(p95_ms, done.refused / requests, float((done.rtf > 1).sum()) / requests)
