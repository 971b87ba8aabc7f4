"""Statistics of a run: pure functions of its traces.

Latencies, RTF and playback are of answers that succeeded. Seen from the planned arrival they are what callers met; seen
from the send they leave out what the client itself was late.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.traces import Failure, Trace

MAX_CLIENT_LAG_S = 0.050  # p99 above it: the client, not the server, shaped the load


@dataclass(frozen=True, slots=True)
class Distribution:
    """A sample of measurements, percentiles interpolated linearly."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Latencies:
    """To the first byte, the first playable and the first audible sample. None where nothing was measured."""

    ttfb_s: Distribution | None
    ttfp_s: Distribution | None
    ttfa_s: Distribution | None


@dataclass(frozen=True, slots=True)
class Continuity:
    """How a zero-buffer player fared."""

    underruns: int
    underrun_share: float  # of requests: those with at least one
    chunk_viability: float  # share of chunks that arrived before they were due
    request_viability: float  # share of requests all of whose chunks did
    stall_s: Distribution  # per request, 0 where nothing stalled


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request must keep to count as good: counted from its planned arrival, as its caller met it."""

    ttfb_s: float = 0.5
    stall_s: float = 0.1  # of a zero-buffer player, all underruns together

    def met_by(self, trace: Trace) -> bool:
        """Whether the request was spoken within every limit."""
        if trace.failure is not None or trace.first_byte_s is None or trace.playback is None:
            return False
        return trace.first_byte_s - trace.planned_s <= self.ttfb_s and trace.playback.stall_s <= self.stall_s

    def __str__(self) -> str:
        return f"TTFB at most {self.ttfb_s * 1000:g} ms, stalls at most {self.stall_s * 1000:g} ms"


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run showed."""

    planned: int
    sent: int
    succeeded: int
    refused: int
    refused_with_advice: int  # of them, those that said when to try again
    good: int  # of the successes, those within every limit
    failed: int
    interrupted: int
    causes: dict[str, int]  # of everything that did not succeed
    offered_per_s: float | None  # rate of the plan, as far as it was sent
    achieved_per_s: float | None  # rate of the sends
    completed_per_s: float | None  # successes over the whole run, its last answer included
    good_per_s: float | None  # goodput: good requests over the time in which they were due
    audio_s: float
    audio_s_per_s: float | None
    silent_answers: int  # without any audible sample
    from_planned: Latencies
    from_send: Latencies
    leading_silence_s: Distribution | None
    rtf: Distribution | None  # time from send to end over audio time
    continuity: Continuity | None
    scheduling_lag_s: Distribution | None

    @property
    def good_share(self) -> float | None:
        """Share of the sent requests that met every limit, None if nothing was sent."""
        return self.good / self.sent if self.sent else None

    @property
    def client_was_slow(self) -> bool:
        """True if the client sent so late that the numbers say more of it than of the server."""
        return self.scheduling_lag_s is not None and self.scheduling_lag_s.p99 > MAX_CLIENT_LAG_S


def distribution(values: Sequence[float]) -> Distribution | None:
    """Mean and percentiles of `values`, None if there are none."""
    if not values:
        return None
    p50, p90, p95, p99 = (float(value) for value in np.percentile(values, (50, 90, 95, 99)))
    return Distribution(len(values), float(np.mean(values)), p50, p90, p95, p99, max(values))


def since(starts_s: Sequence[float], ends_s: Sequence[float | None]) -> Distribution | None:
    """Durations between pairs of times; pairs without an end are left out."""
    return distribution([end - start for start, end in zip(starts_s, ends_s, strict=True) if end is not None])


def latencies(starts_s: Sequence[float], traces: Sequence[Trace]) -> Latencies:
    """Latencies of `traces`, each counted from its value of `starts_s`."""
    return Latencies(
        ttfb_s=since(starts_s, [trace.first_byte_s for trace in traces]),
        ttfp_s=since(starts_s, [trace.first_playable_s for trace in traces]),
        ttfa_s=since(starts_s, [trace.first_audible_s for trace in traces]),
    )


def rate_per_s(times_s: Sequence[float]) -> float | None:
    """Mean rate of events at these times, None for fewer than two or if all are one."""
    span_s = max(times_s) - min(times_s) if times_s else 0.0
    return (len(times_s) - 1) / span_s if span_s else None


def continuity(traces: Sequence[Trace]) -> Continuity | None:
    """Underruns and viability of all streams with audio, None without any."""
    playbacks = [playback for playback in (trace.playback for trace in traces) if playback]
    stalls = distribution([playback.stall_s for playback in playbacks])
    if stalls is None:
        return None
    underruns = sum(playback.underruns for playback in playbacks)
    broken = sum(playback.underruns > 0 for playback in playbacks) / len(playbacks)
    return Continuity(
        underruns=underruns,
        underrun_share=broken,
        chunk_viability=1 - underruns / sum(playback.num_chunks for playback in playbacks),
        request_viability=1 - broken,
        stall_s=stalls,
    )


def leading_silences(traces: Sequence[Trace]) -> list[float]:
    """Seconds of audio before the first audible sample, of traces that have one."""
    return [
        trace.audible_sample / trace.layout.sample_rate
        for trace in traces
        if trace.layout and trace.audible_sample is not None
    ]


def summarize(
    traces: Sequence[Trace], *, planned: int, duration_s: float | None = None, limits: Limits = Limits()
) -> Summary:
    """The whole picture of `planned` requests, due within `duration_s`, that left `traces`.

    Without `duration_s` the time from the first planned arrival to the last counts.
    """
    succeeded = [trace for trace in traces if trace.failure is None]
    audio_s = sum(trace.audio_s for trace in succeeded)
    span_s = max(trace.finished_s for trace in traces) - min(trace.planned_s for trace in traces) if traces else 0.0
    due_s = duration_s or planned_span_s(traces)
    counts = Counter(trace.failure for trace in traces)
    good = sum(limits.met_by(trace) for trace in succeeded)
    return Summary(
        planned=planned,
        sent=len(traces),
        succeeded=len(succeeded),
        refused=counts[Failure.REFUSED],
        refused_with_advice=sum(t.failure is Failure.REFUSED and t.retry_after_s is not None for t in traces),
        good=good,
        failed=len(traces) - len(succeeded) - counts[Failure.REFUSED] - counts[Failure.INTERRUPTED],
        interrupted=counts[Failure.INTERRUPTED],
        causes=dict(Counter(trace.cause for trace in traces if trace.cause).most_common()),
        offered_per_s=rate_per_s([trace.planned_s for trace in traces]),
        achieved_per_s=rate_per_s([trace.sent_s for trace in traces]),
        completed_per_s=len(succeeded) / span_s if span_s else None,
        good_per_s=good / due_s if due_s else None,
        audio_s=audio_s,
        audio_s_per_s=audio_s / span_s if span_s else None,
        silent_answers=sum(trace.audible_sample is None for trace in succeeded),
        from_planned=latencies([trace.planned_s for trace in succeeded], succeeded),
        from_send=latencies([trace.sent_s for trace in succeeded], succeeded),
        leading_silence_s=distribution(leading_silences(succeeded)),
        rtf=distribution([(trace.finished_s - trace.sent_s) / trace.audio_s for trace in succeeded]),
        continuity=continuity(succeeded),
        scheduling_lag_s=distribution([trace.sent_s - trace.planned_s for trace in traces]),
    )


def planned_span_s(traces: Sequence[Trace]) -> float:
    """From the first planned arrival to the last."""
    return max(trace.planned_s for trace in traces) - min(trace.planned_s for trace in traces) if traces else 0.0
