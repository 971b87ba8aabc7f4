"""Simulate a day of a cluster in seconds, with replica pools, nodes that boot and fail, and the production policies.

Time advances in equal steps. Within a step, a replica's load determines the speed of its streams. Streams are rows
of arrays, so the cost of a step hardly depends on the number of streams.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deployments.autoscaling_records import CodecRecord, TalkerRecord
from loadtest.metrics import Limits
from loadtest.service_model import Floats, Ints, ServiceModel
from loadtest.tables import MS
from serve_app.scaling.policies import CodecScaling, Counts, State, TalkerScaling, decide_codec, decide_talker

FRAME_S = 0.08


@dataclass(frozen=True, slots=True)
class NodeKind:
    """Machine type of one pool. Each node runs one replica."""

    boot_s: float = 180.0  # from the request for a node until its replica can start
    start_s: float = 25.0  # for a replica to start: import, weights, graphs
    idle_s: float = 600.0  # time until an empty node is released
    price_per_hour: float = 0.0
    losses_per_hour: float = 0.0  # per node, as for reclaimed spot instances


@dataclass(frozen=True, slots=True)
class Cluster:
    """Configuration of the simulated cluster."""

    model: ServiceModel  # one talker replica with the codec that it needs
    talker_scaling: TalkerScaling
    codec_scaling: CodecScaling | None  # None: the codec shares the talker's node, as in the measured sweep
    talker_nodes: NodeKind = field(default_factory=NodeKind)
    codec_nodes: NodeKind = field(default_factory=NodeKind)
    codec_cores: float = 16.0  # per codec replica
    codec_cores_per_stream: float = 0.2  # core seconds per second of audio
    max_waiting_per_replica: int = 8  # queued requests on top of running ones; any further requests are refused
    metrics_lag_s: float = 1.0  # delay until the replicas' metrics reach the controller


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests in ascending order of arrival."""

    arrival_s: Floats
    frames: Ints


@dataclass(slots=True)
class Simulated:
    """Results of all requests, and pool sizes over time."""

    arrival_s: Floats
    ttfb_s: Floats  # NaN if refused
    rtf: Floats  # NaN if refused or not finished
    times_s: list[float] = field(default_factory=list)
    talkers: list[int] = field(default_factory=list)  # number of ready talkers
    talkers_wanted: list[int] = field(default_factory=list)
    codecs: list[int] = field(default_factory=list)
    streams: list[int] = field(default_factory=list)
    node_hours: float = 0.0
    cost: float = 0.0
    nodes_lost: int = 0
    streams_moved: int = 0

    @property
    def refused(self) -> int:
        """Number of requests that arrived when every replica and queue was full."""
        return int(np.isnan(self.ttfb_s).sum())

    def ttfb_percentile_s(self, percent: float) -> float | None:
        """Return a percentile of TTFB over the successful requests, or None if there are none."""
        spoken = self.ttfb_s[~np.isnan(self.ttfb_s)]
        return float(np.percentile(spoken, percent)) if len(spoken) else None


class SimulatedPool:
    """Replicas of one deployment on nodes of one kind. Array indices identify replicas."""

    def __init__(self, size: int, nodes: NodeKind, *, warm: int) -> None:
        self.nodes = nodes
        self.ready_s = np.full(size, np.inf)  # when the replica starts to accept requests; inf: not running
        self.ready_s[:warm] = 0.0
        self.draining = np.zeros(size, dtype=bool)
        self.idle_since_s = np.full(size, -np.inf)  # for nodes without a replica; -inf: no node
        self.up = np.zeros(size, dtype=bool)  # nodes being paid for
        self.up[:warm] = True
        self.node_hours = 0.0

    @property
    def wanted(self) -> int:
        """Number of replicas that are running or starting."""
        return int((np.isfinite(self.ready_s) & ~self.draining).sum())

    def usable(self, now_s: float) -> NDArray[np.bool_]:
        """Return a mask of the replicas that accept requests."""
        return (self.ready_s <= now_s) & ~self.draining

    def scale(self, replicas: int, now_s: float, load: Ints) -> None:
        """Add replicas, on idle nodes first, or drain the least loaded replicas."""
        missing = replicas - self.wanted
        if missing > 0:
            self._add(missing, now_s)
        elif missing < 0:
            present = np.flatnonzero(np.isfinite(self.ready_s) & ~self.draining)
            starting_first = np.lexsort((load[present], self.ready_s[present] <= now_s))
            self.draining[present[starting_first[:-missing]]] = True

    def _add(self, count: int, now_s: float) -> None:
        reusable = np.flatnonzero(self.draining)[:count]  # draining replicas become usable again immediately
        self.draining[reusable] = False
        absent = np.flatnonzero(~np.isfinite(self.ready_s))
        on_idle_nodes_first = absent[np.argsort(~self.up[absent], kind="stable")][: count - len(reusable)]
        boot_s = np.where(self.up[on_idle_nodes_first], 0.0, self.nodes.boot_s)
        self.ready_s[on_idle_nodes_first] = now_s + boot_s + self.nodes.start_s
        self.up[on_idle_nodes_first] = True

    def settle(self, now_s: float, load: Ints) -> None:
        """Remove drained replicas, and nodes that have been empty for `idle_s`."""
        drained = self.draining & ((load == 0) | (self.ready_s > now_s))
        self._remove(drained)
        self.idle_since_s[drained] = now_s
        empty = self.up & ~np.isfinite(self.ready_s)
        self.up[empty & (now_s - self.idle_since_s >= self.nodes.idle_s)] = False

    def lose_some(self, step_s: float, generator: np.random.Generator) -> NDArray[np.bool_]:
        """Remove random nodes, like reclaimed spot instances, and return the indices."""
        chance = -np.expm1(-self.nodes.losses_per_hour * step_s / 3600)
        lost = self.up & (generator.random(len(self.up)) < chance) if chance else np.zeros_like(self.up)
        self._remove(lost)
        self.up[lost] = False
        return lost

    def _remove(self, which: NDArray[np.bool_]) -> None:
        self.ready_s[which] = np.inf
        self.draining[which] = False


# One row per stream in flight.
STREAM = np.dtype(
    [
        ("request", np.int64),
        ("replica", np.int64),
        ("flows_from_s", np.float64),  # time up to which `work` is accounted for; initially the first byte
        ("work", np.float64),  # remaining frames, weighted by the stream's own factor
    ]
)


class Simulation:
    """One simulation of a cluster under given traffic."""

    def __init__(self, cluster: Cluster, traffic: Traffic, *, seed: int, warm: int, step_s: float) -> None:
        self.cluster = cluster
        self.traffic = traffic
        self.step_s = step_s
        self.generator = np.random.default_rng(seed)
        self.talkers = SimulatedPool(cluster.talker_scaling.max_replicas, cluster.talker_nodes, warm=warm)
        codec = cluster.codec_scaling
        self.codecs = SimulatedPool(
            codec.max_replicas if codec else 0, cluster.codec_nodes, warm=self._warm_codecs(warm)
        )
        self.streams = np.zeros(0, dtype=STREAM)
        self.waiting: deque[int] = deque()  # requests, oldest first
        self.load = np.zeros(cluster.talker_scaling.max_replicas, dtype=np.int64)
        self.codec_backlog_s = 0.0
        self.out = Simulated(
            traffic.arrival_s, np.full(len(traffic.frames), np.nan), np.full(len(traffic.frames), np.nan)
        )
        self._slots = int(cluster.talker_scaling.sequences_per_replica)
        self._frame_s = cluster.model.frame_s(np.arange(self._slots + 1, dtype=np.float64))  # by streams per replica
        self._states = {"talker": State(), "codec": State()}
        self._next_request = 0
        self._now_s = 0.0
        self._work = np.maximum(traffic.frames - 1, 0) * self.generator.choice(
            cluster.model.frame_factors, size=len(traffic.frames)
        )

    def run(self, advanced: Callable[[float], None]) -> Simulated:
        """Run until every stream has ended. `advanced` is called regularly with the simulated time."""
        step, every = 0, max(1, round(self.cluster.metrics_lag_s / self.step_s))
        while self._next_request < len(self.traffic.frames) or len(self.streams) or self.waiting:
            self._lose_nodes()
            self._progress()
            self._admit_waiting()
            self._arrive()
            self._decode()
            if step % every == 0:
                self._scale()
                self._note()
                advanced(self._now_s)
            for pool in (self.talkers, self.codecs):
                pool.node_hours += int(pool.up.sum()) * self.step_s / 3600
            step += 1
            self._now_s = step * self.step_s
        self.out.node_hours = self.talkers.node_hours + self.codecs.node_hours
        self.out.cost = sum(pool.node_hours * pool.nodes.price_per_hour for pool in (self.talkers, self.codecs))
        return self.out

    def _progress(self) -> None:
        """Advance every stream by one step and free the slots of finished streams."""
        streams = self.streams
        frame_s = self._frame_s[self.load][streams["replica"]]
        end_s = self._now_s + self.step_s
        elapsed_s = np.maximum(end_s - streams["flows_from_s"], 0.0)
        left = streams["work"] - elapsed_s / frame_s
        ended = left <= 0
        if ended.any():
            finished_s = end_s + left[ended] * frame_s[ended]
            request = streams["request"][ended]
            audio_s = np.maximum(self.traffic.frames[request], 1) * FRAME_S
            self.out.rtf[request] = (finished_s - self.traffic.arrival_s[request]) / audio_s
        streams["work"] = left
        streams["flows_from_s"] = np.maximum(streams["flows_from_s"], end_s)
        self._hold(streams[~ended])

    def _hold(self, streams: NDArray[np.void]) -> None:
        """Replace the streams in flight."""
        self.streams = streams
        self.load = np.bincount(streams["replica"], minlength=len(self.load))

    def _admit_waiting(self) -> None:
        room = int(np.maximum(self._slots - self.load[self.talkers.usable(self._now_s)], 0).sum())
        count = min(room, len(self.waiting))
        if count:
            requests = np.array([self.waiting.popleft() for _ in range(count)], dtype=np.int64)
            within_step_s = (np.arange(count) + 0.5) / count * self.step_s  # spread the ends of streams over the step
            self._start(requests, np.maximum(self._now_s + within_step_s, self.traffic.arrival_s[requests]))

    def _arrive(self) -> None:
        end = int(np.searchsorted(self.traffic.arrival_s, self._now_s + self.step_s))
        requests = np.arange(self._next_request, end)
        self._next_request = end
        usable = self.talkers.usable(self._now_s)
        room = 0 if self.waiting else int(np.maximum(self._slots - self.load[usable], 0).sum())
        admitted, others = requests[:room], requests[room:]
        if len(admitted):
            self._start(admitted, self.traffic.arrival_s[admitted])
        # If no replica is usable (scaled to zero, or all lost), requests wait for the first replica to start.
        line = self.cluster.max_waiting_per_replica * max(1, int(usable.sum()))
        self.waiting.extend(others[: max(0, line - len(self.waiting))].tolist())  # further requests are refused

    def _start(self, requests: Ints, admitted_s: Floats) -> None:
        """Assign requests to the least loaded replicas, which approximates a power-of-two-choices router."""
        replicas = self._route(len(requests))
        others = self.load[replicas]
        first_s = self.cluster.model.draw_ttfb(others, self.generator) + self._codec_wait_s()
        starts_s = admitted_s + first_s
        is_new = np.isnan(self.out.ttfb_s[requests])  # streams that moved have already produced audio
        self.out.ttfb_s[requests[is_new]] = (starts_s - self.traffic.arrival_s[requests])[is_new]
        started = np.rec.fromarrays((requests, replicas, starts_s, self._work[requests]), dtype=STREAM)
        self._hold(np.concatenate([self.streams, started]))

    def _route(self, count: int) -> Ints:
        usable = np.flatnonzero(self.talkers.usable(self._now_s))
        room = np.maximum(self._slots - self.load[usable], 0)
        shared = np.minimum(room, 4 + 4 * count // max(1, len(usable)))  # limit each replica's share of a step
        room = shared if shared.sum() >= count else room
        levels = self.load[usable] + self.generator.random(len(usable))  # random tie-breaking
        seats = np.repeat(usable, room)
        nth = np.arange(len(seats)) - np.repeat(np.cumsum(room) - room, room)  # index of the seat on its replica
        order = np.argsort(np.repeat(levels, room) + nth, kind="stable")
        return np.asarray(seats[order[:count]], dtype=np.int64)

    def _codec_demand(self) -> float:
        """Return how many core seconds per second it takes to decode the talkers' frames."""
        frames_per_s = float((self.load / self._frame_s[self.load]).sum())
        return frames_per_s * FRAME_S * self.cluster.codec_cores_per_stream

    def _decode(self) -> None:
        """Add frames that exceed the codec's capacity to the backlog, in seconds of audio."""
        if self.cluster.codec_scaling is not None:
            cores = float(self.codecs.usable(self._now_s).sum()) * self.cluster.codec_cores
            surplus_s = (self._codec_demand() - cores) / self.cluster.codec_cores_per_stream * self.step_s
            self.codec_backlog_s = max(0.0, self.codec_backlog_s + surplus_s)

    def _codec_wait_s(self) -> float:
        cores = float(self.codecs.usable(self._now_s).sum()) * self.cluster.codec_cores
        return self.codec_backlog_s * self.cluster.codec_cores_per_stream / cores if cores else 0.0

    def _lose_nodes(self) -> None:
        lost = self.talkers.lose_some(self.step_s, self.generator)
        self.codecs.lose_some(self.step_s, self.generator)
        if not lost.any():
            return
        self.out.nodes_lost += int(lost.sum())
        is_moved = lost[self.streams["replica"]]
        moved = self.streams[is_moved]
        self.out.streams_moved += len(moved)
        self._work[moved["request"]] = moved["work"]  # codes are kept; only the rest is generated
        self.waiting.extendleft(moved["request"].tolist())
        self._hold(self.streams[~is_moved])

    def _scale(self) -> None:
        cluster, now_s = self.cluster, self._now_s
        waiting, streams = float(len(self.waiting)), float(len(self.streams))
        self.talkers.settle(now_s, self.load)
        talkers = [TalkerRecord(running=float(load)) for load in self.load[self.talkers.usable(now_s)]]
        counts = Counts(len(talkers), self.talkers.wanted, waiting, streams)
        state = self._states["talker"]
        decision = decide_talker(talkers, counts, settings=cluster.talker_scaling, state=state, now_s=now_s)
        self._states["talker"] = decision.state
        self.talkers.scale(decision.replicas, now_s, self.load)
        if cluster.codec_scaling is None:
            return
        idle = np.zeros(len(self.codecs.ready_s), dtype=np.int64)
        self.codecs.settle(now_s, idle)
        count = int(self.codecs.usable(now_s).sum())
        share = 1 / max(1, count)
        record = CodecRecord(
            streams=(streams + waiting) * share,
            starting=waiting * share,
            backlog_s=self.codec_backlog_s * share,
            busy_cores=min(cluster.codec_cores, self._codec_demand() * share),
            cores=cluster.codec_cores,
        )
        counts = Counts(count, self.codecs.wanted, 0.0, streams + waiting)
        state = self._states["codec"]
        decision = decide_codec([record] * count, counts, settings=cluster.codec_scaling, state=state, now_s=now_s)
        self._states["codec"] = decision.state
        self.codecs.scale(decision.replicas, now_s, idle)

    def _note(self) -> None:
        self.out.times_s.append(self._now_s)
        self.out.talkers.append(int(self.talkers.usable(self._now_s).sum()))
        self.out.talkers_wanted.append(self.talkers.wanted)
        self.out.codecs.append(int(self.codecs.usable(self._now_s).sum()))
        self.out.streams.append(len(self.streams))

    def _warm_codecs(self, talkers: int) -> int:
        codec = self.cluster.codec_scaling
        if codec is None:
            return 0
        streams = talkers * self.cluster.talker_scaling.sequences_per_replica * self.cluster.talker_scaling.target_use
        needed = int(np.ceil(streams / (codec.streams_per_replica * codec.target_use)))
        return min(max(1, needed, codec.min_replicas), codec.max_replicas)


def simulation_facts(done: Simulated, limits: Limits) -> dict[str, str]:
    """Return the results of a simulated cluster as text."""
    total = len(done.ttfb_s)
    good = int((done.ttfb_s <= limits.ttfb_s).sum())  # NaN (refused) compares as false
    percentiles = (done.ttfb_percentile_s(percent) for percent in (50, 95, 99))
    return {
        "Requests": f"{total}, {done.refused} refused ({done.refused / max(1, total):.2%})",
        "TTFB p50, p95, p99": ", ".join("-" if value is None else f"{value * MS:.0f} ms" for value in percentiles),
        "Good": f"{good / max(1, total):.2%} with TTFB at most {limits.ttfb_s * MS:g} ms",
        "Slower than playback": f"{np.mean(done.rtf > 1):.2%} of the requests",
        "Talker replicas": f"{min(done.talkers)} to {max(done.talkers)}, mean {np.mean(done.talkers):.1f}",
        "Codec replicas": f"{min(done.codecs)} to {max(done.codecs)}, mean {np.mean(done.codecs):.1f}",
        "Node hours": f"{done.node_hours:.1f}, cost {done.cost:.2f}",
        "Nodes lost": f"{done.nodes_lost}, {done.streams_moved} streams moved",
    }


def simulation_record(done: Simulated) -> dict[str, object]:
    """Return the content of simulation.json: percentiles, and pool sizes over time."""
    percentiles = {f"p{percent}": done.ttfb_percentile_s(percent) for percent in (50, 90, 95, 99)}
    totals = ("refused", "node_hours", "cost", "nodes_lost", "streams_moved")
    over_time = ("times_s", "talkers", "talkers_wanted", "codecs", "streams")
    kept = {name: getattr(done, name) for name in (*totals, *over_time)}
    return {"requests": len(done.ttfb_s), "ttfb_s": percentiles} | kept
