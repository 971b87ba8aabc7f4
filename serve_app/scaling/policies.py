"""Autoscaling policies of the talker pool and the codec pool.

`decide_talker` and `decide_codec` are pure functions. Their arguments are the replicas' records, the current counts,
the settings, the state that the last decision returned, and a clock. They return a decision and the next state. The
simulator calls the same functions. `TalkerPolicy` and `CodecPolicy` wrap them for Ray Serve's controller, which calls
them every 0.1 s. This module uses only the standard library and does not import Ray. Serve pickles the module by value
and runs it on a head node without torch, where it imports `deployments.autoscaling_records`.

Replicas are added immediately. If any request is waiting, or less than one replica's capacity is free, the number of
replicas follows the current streams. Otherwise it follows their mean over some seconds, because bursts end before a
replica has started. Replicas are removed slowly, one step at a time. A replica is removed only if it was not needed
during a full window and would not be needed under slightly more load. Replicas with streams in flight are never
removed. Serve lets a removed replica finish its streams.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from deployments.autoscaling_records import CodecRecord, TalkerRecord

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

_Record = TypeVar("_Record", TalkerRecord, CodecRecord)

_logger = logging.getLogger("ray.serve")  # the controller's own log

_TARGET_KV_USE = 0.85  # share of all replicas' KV blocks
_TARGET_BACKLOG_S = 0.5  # seconds of undecoded audio for each core
_STEP_DOWN = 0.1  # share of the replicas to remove per step; at least one
_TREND_WINDOW_S = 2.0  # window for the growth of the queue
# Over a shorter time span, a slope is only noise.
_MIN_TREND_S = 0.4
# Tolerance for rounding when the demand is an integral number of replicas.
_ROUNDING = 1e-6
# If there are no streams, a mean below this value counts as zero.
_NOBODY = 0.5


@dataclass(frozen=True, slots=True)
class Counts:
    """Size and load of a pool, as Serve reports them."""

    running: int  # replicas that accept requests
    wanted: int  # replicas requested from Serve; some may be starting, others draining
    queued: float = 0.0  # requests waiting at their callers because all replicas are full
    ongoing: float = 0.0  # requests running at replicas


@dataclass(frozen=True, slots=True)
class ScalingSettings:
    """Parameters that both policies share, partly set by `AppConfig`. Raises ValueError for invalid values."""

    smoothing_s: float = 10.0  # time constant of the mean, which is used while no request is waiting
    scale_down_margin: float = 0.1  # a replica is kept if this much additional load would require it
    min_replicas: int = 1  # 0: the pool stops while idle, and the next request waits for a start
    max_replicas: int = 4
    target_use: float = 0.75  # share of the sequences, or of the streams and cores, of all replicas
    scale_down_window_s: float = 120.0  # a replica is removed if it was not needed within this window
    scale_to_zero_after_s: float = 600.0  # time without requests after which the pool stops
    jobs: str = "hold"  # "neither": job segments do not keep a replica alive; for "wake", see jobs/deployment.py

    @property
    def scale_down_interval_s(self) -> float:
        return self.scale_down_window_s / 10

    def __post_init__(self) -> None:
        if not 0 <= self.min_replicas <= self.max_replicas or self.max_replicas < 1:
            raise ValueError("min_replicas must be 0 to max_replicas, and max_replicas at least 1")
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, str) and value < 0:
                raise ValueError(f"{field.name} must not be negative")


@dataclass(frozen=True, slots=True)
class TalkerScaling(ScalingSettings):
    """Parameters of the talker pool's policy."""

    sequences_per_replica: float = 8.0  # batch size of a replica: talker.max_num_seqs
    trend_horizon_s: float = 5.0  # expected duration of the queue's growth, about a replica's start time


@dataclass(frozen=True, slots=True)
class CodecScaling(ScalingSettings):
    """Parameters of the codec pool's policy."""

    streams_per_replica: float = 16.0  # streams that a replica decodes in real time
    # Streams that the talker pool can run at its maximum size. Requests beyond these do not need a codec replica yet.
    max_talker_streams: float = math.inf


@dataclass(frozen=True, slots=True)
class TimedValue:
    """Value and the time at which it was measured."""

    at_s: float
    value: float


@dataclass(frozen=True, slots=True)
class State:
    """State that each decision passes on to the next. The first decision gets `State()`."""

    line: tuple[TimedValue, ...] = ()  # waiting requests in the trend window
    mean: TimedValue | None = None  # mean of the current streams
    peaks: tuple[TimedValue, ...] = ()  # peak numbers of needed replicas in the scale-down window, in decreasing order
    busy_s: float = -math.inf  # when a request was last present
    removed_s: float = -math.inf  # when replicas were last removed


@dataclass(frozen=True, slots=True)
class Decision:
    """Number of replicas wanted now."""

    replicas: int
    state: State
    reason: str  # reason for this number, for a log line


def decide_talker(
    records: Sequence[TalkerRecord], counts: Counts, *, settings: TalkerScaling, state: State, now_s: float
) -> Decision:
    """Return the replicas needed for the running and waiting sequences, the KV blocks in use, and the growth of the
    queue.
    """
    running = sum(record.running for record in records)
    waiting = sum(record.waiting for record in records)
    background = sum(record.background for record in records)
    # New replicas have not recorded anything yet.
    demand = max(running + waiting, counts.ongoing - background) + counts.queued
    line = _recent(state.line, TimedValue(now_s, waiting + counts.queued), window_s=_TREND_WINDOW_S)
    growth = min(_growth(line) * settings.trend_horizon_s, demand)  # limited to the demand
    per_replica = settings.sequences_per_replica * settings.target_use
    mean = _smoothed(state.mean, TimedValue(now_s, demand), over_s=settings.smoothing_s)
    needs = {
        "sequences": (demand if line[-1].value else mean.value) / per_replica,
        "rows": demand / settings.sequences_per_replica,
        "growing queue": (demand + growth) / per_replica if growth else 0.0,
        "kv use": sum(record.kv_used_ratio for record in records) / _TARGET_KV_USE,
    }
    return _settle(
        needs,
        counts,
        settings=settings,
        state=replace(state, line=line, mean=mean),
        now_s=now_s,
        demand=demand,
        background=background,
        occupied=running / settings.sequences_per_replica,
    )


def decide_codec(
    records: Sequence[CodecRecord], counts: Counts, *, settings: CodecScaling, state: State, now_s: float
) -> Decision:
    """Return the replicas needed for the waiting audio, the busy cores, and the streams whose frames are still
    expected.

    Every request passes the codec before the talker. Streams that wait for a talker, and requests that wait for a codec
    replica, therefore predict the frames of a talker pool that is about to grow.
    """
    background = sum(record.background for record in records)
    streams = max(sum(record.streams for record in records), counts.ongoing - background) + counts.queued
    flowing = sum(record.streams - record.starting for record in records)
    cores = sum(record.cores for record in records)
    backlog_s = sum(record.backlog_s for record in records)
    replicas_behind = len(records) * backlog_s / (cores * _TARGET_BACKLOG_S) if cores else 0.0
    expected = max(flowing, min(streams, settings.max_talker_streams))
    mean = _smoothed(state.mean, TimedValue(now_s, expected), over_s=settings.smoothing_s)
    needs = {
        "streams": (expected if counts.queued else mean.value) / (settings.streams_per_replica * settings.target_use),
        "room": expected / settings.streams_per_replica,
        "busy cores": len(records) * sum(record.busy_cores for record in records) / (cores * settings.target_use)
        if cores
        else 0.0,
        # The backlog can at most double the number of replicas.
        "backlog": min(replicas_behind, 2.0 * len(records)) if replicas_behind > len(records) else 0.0,
    }
    return _settle(
        needs,
        counts,
        settings=settings,
        state=replace(state, mean=mean),
        now_s=now_s,
        demand=streams,
        background=background,
        occupied=flowing / settings.streams_per_replica,
    )


def _settle(
    needs: Mapping[str, float],
    counts: Counts,
    *,
    settings: ScalingSettings,
    state: State,
    now_s: float,
    demand: float,
    background: float,
    occupied: float,
) -> Decision:
    """Follow the greatest need: immediately if it exceeds the current size, slowly if it is lower. Job segments do not
    count as demand, and keep at most the last replica alive.
    """
    reason, need = max(needs.items(), key=lambda item: item[1])
    is_wanted = demand or (background and settings.jobs != "neither")
    needed = max(math.ceil(need - _ROUNDING), 1 if is_wanted else 0)
    is_first = state.busy_s == -math.inf  # the current replicas then count as needed
    peak = TimedValue(now_s, max(need, counts.wanted) if is_first else need)
    state = replace(state, peaks=_peaks(state.peaks, peak, window_s=settings.scale_down_window_s))
    if is_wanted or is_first or counts.running < counts.wanted:  # a starting replica was requested for a reason
        state = replace(state, busy_s=now_s)
    may_be_none = counts.wanted == 0 or now_s - state.busy_s >= settings.scale_to_zero_after_s
    lowest = max(settings.min_replicas, 0 if may_be_none else 1)  # the last replica is kept for a while
    needed = min(max(needed, lowest), settings.max_replicas)
    if needed > counts.wanted:
        return Decision(needed, state, reason)
    again = math.ceil(state.peaks[0].value * (1.0 + settings.scale_down_margin) - _ROUNDING)  # under slightly more load
    floor = max(lowest, again, math.ceil(occupied - _ROUNDING))
    if floor >= counts.wanted or now_s - state.removed_s < settings.scale_down_interval_s:
        return Decision(_within(counts.wanted, settings), state, "hold")
    step = max(1, int(counts.wanted * _STEP_DOWN))
    return Decision(_within(max(floor, counts.wanted - step), settings), replace(state, removed_s=now_s), "not needed")


def _smoothed(mean: TimedValue | None, new: TimedValue, *, over_s: float) -> TimedValue:
    """Return the moving mean at the time of the new sample. Return zero after a long time without streams."""
    if mean is None or not over_s:
        return new
    weight = -math.expm1(-max(0.0, new.at_s - mean.at_s) / over_s)
    value = mean.value + weight * (new.value - mean.value)
    return TimedValue(new.at_s, value if new.value or value > _NOBODY else 0.0)


def _within(replicas: int, settings: ScalingSettings) -> int:
    return min(max(replicas, settings.min_replicas), settings.max_replicas)


def _recent(samples: tuple[TimedValue, ...], new: TimedValue, *, window_s: float) -> tuple[TimedValue, ...]:
    return (*(sample for sample in samples if new.at_s - sample.at_s <= window_s), new)


def _peaks(peaks: tuple[TimedValue, ...], new: TimedValue, *, window_s: float) -> tuple[TimedValue, ...]:
    """Return the samples that no later sample exceeds. The list stays short, and its first element is the maximum."""
    return (*(peak for peak in peaks if new.at_s - peak.at_s <= window_s and peak.value > new.value), new)


def _growth(samples: tuple[TimedValue, ...]) -> float:
    """Return the steady growth per second, as the smaller of the slopes in the two halves of the window. Single bursts
    are ignored.
    """
    middle = samples[len(samples) // 2]
    return max(0.0, min(_slope(samples[0], middle), _slope(middle, samples[-1])))


def _slope(first: TimedValue, last: TimedValue) -> float:
    elapsed_s = last.at_s - first.at_s
    return (last.value - first.value) / elapsed_s if elapsed_s >= _MIN_TREND_S else 0.0


class _Policy:
    """Autoscaling policy that keeps state between decisions and logs those that change the number of replicas."""

    def __init__(self, kind: type[Any], decide: Callable[..., Decision], settings: ScalingSettings) -> None:
        """Create the policy. `decide` takes records of this `kind`."""
        self._kind = kind
        self._decide = decide
        self._settings = settings
        self._state = State()

    def __call__(self, context: "AutoscalingContext") -> tuple[int, dict[str, Any]]:
        settings = replace(
            self._settings,
            min_replicas=context.capacity_adjusted_min_replicas,
            max_replicas=max(1, context.capacity_adjusted_max_replicas),
        )
        records = recorded(context.raw_metrics, self._kind)
        now_s = context.current_time or 0.0
        decision = self._decide(records, _counts(context), settings=settings, state=self._state, now_s=now_s)
        self._state = decision.state
        before = context.target_num_replicas
        if decision.replicas != before:
            name = type(self).__name__
            _logger.info("%s: %d -> %d replicas (%s)", name, before, decision.replicas, decision.reason)
        return decision.replicas, {}


class TalkerPolicy(_Policy):
    """Ray Serve autoscaling policy that calls `decide_talker`. Takes the arguments of TalkerScaling except for the
    bounds, which the deployment sets.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(TalkerRecord, decide_talker, TalkerScaling(**settings))


class CodecPolicy(_Policy):
    """Ray Serve autoscaling policy that calls `decide_codec`. Takes CodecScaling's arguments except the bounds."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(CodecRecord, decide_codec, CodecScaling(**settings))


def recorded(metrics: Mapping[str, Mapping[Any, Sequence[Any]]] | None, kind: type[_Record]) -> list[_Record]:
    """Return the newest record of each replica that has recorded metrics."""
    replicas: dict[Any, dict[str, float]] = {}
    for field in fields(kind):
        for replica, samples in (metrics or {}).get(field.name, {}).items():
            if samples:
                replicas.setdefault(replica, {})[field.name] = samples[-1].value
    return [kind(**values) for values in replicas.values()]


def _counts(context: "AutoscalingContext") -> Counts:
    queued = max(0.0, context.total_queued_requests)
    return Counts(
        running=context.current_num_replicas,
        wanted=context.target_num_replicas,
        queued=queued,
        ongoing=max(0.0, context.total_num_requests - queued),
    )
