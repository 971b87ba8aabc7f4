"""Statistics of a run, as pure functions of its traces.

Latencies, RTF and playback cover successful responses. Latencies are measured from the planned arrival, or from the
first word of live text, as callers experience them.
"""

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.arrivals import FRAMES_PER_S
from loadtest.traces import Failure, Trace

RECOVERED_SHARE = 0.95  # minimum share of good requests in a good window
OUTCOMES = ("good", "late", "refused", "failed")  # late: succeeded, but missed a limit
FEW_ANSWERS = 20  # with fewer responses, p95 is close to the slowest response
MAX_CLIENT_LAG_S = 0.050  # if the p99 lag exceeds this, the client limited the load


@dataclass(frozen=True, slots=True)
class Distribution:
    """Count, mean and percentiles of measurements. Percentiles are interpolated linearly."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits for a good request. Latencies are measured from the planned arrival, as callers experience them."""

    ttfb_s: float = 0.5
    stall_s: float = 0.1  # total underrun of a zero-buffer player
    ttfa_s: float | None = None  # to the first audible sample; None: no limit

    def met_by(self, trace: Trace) -> bool:
        """Return whether the request succeeded within every limit."""
        if trace.is_file:
            return trace.failure is None
        if trace.ttfb_s is None or trace.playback is None:
            return False
        if self.ttfa_s is not None and (trace.ttfa_s is None or trace.ttfa_s > self.ttfa_s):
            return False
        return trace.ttfb_s <= self.ttfb_s and trace.playback.stall_s <= self.stall_s

    def __str__(self) -> str:
        audible = "" if self.ttfa_s is None else f"TTFA at most {self.ttfa_s * 1000:g} ms, "
        return f"TTFB at most {self.ttfb_s * 1000:g} ms, {audible}stalls at most {self.stall_s * 1000:g} ms"


@dataclass(frozen=True, slots=True)
class Summary:
    """Aggregated results of a run."""

    planned: int
    sent: int
    succeeded: int
    refused: int
    refused_with_advice: int  # refusals with a retry time
    good: int  # successes within every limit
    failed: int
    interrupted: int
    left: int  # successes whose client left early, as planned
    refusals: dict[str, int]  # the messages of refused requests, minus any bracketed text
    causes: dict[str, int]  # causes of all failures and refusals
    offered_per_s: float | None  # requested rate
    planned_per_s: float | None  # rate of the planned arrivals, which vary randomly around the offered rate
    achieved_per_s: float | None  # rate of the actual sends
    audio_s: float
    audio_s_per_s: float | None
    planned_audio_s: float  # for all requests; received audio if no lengths were planned
    audio_in_time_share: float | None  # share of the planned audio that played without an underrun
    silent_answers: int  # without an audible sample
    underruns: int  # total over all responses, for a zero-buffer player
    with_underrun: int  # responses with an underrun
    c50: float | None  # share of responses with at most 50 ms of total underrun
    c100: float | None
    c200: float | None
    ttfb_s: Distribution | None  # from the planned arrival, or the first word of live text
    ttfp_s: Distribution | None
    ttfa_s: Distribution | None
    end_to_end_s: Distribution | None  # from the same start to the last byte
    rtf: Distribution | None  # time from send to end, divided by audio time
    silence_s: Distribution | None  # from an interruption to the last received audio
    stall_s: Distribution | None  # per response; 0 without a stall
    chunk_viability: float | None  # share of chunks that arrived before they were due
    scheduling_lag_s: Distribution | None

    @property
    def good_share(self) -> float | None:
        """Share of the sent requests that met every limit, or None if no request was sent."""
        return self.good / self.sent if self.sent else None

    @property
    def good_per_s(self) -> float | None:
        """Goodput: the offered rate times the share of good requests."""
        return None if self.offered_per_s is None or not self.sent else self.offered_per_s * self.good / self.sent

    @property
    def request_viability(self) -> float | None:
        """Share of responses without an underrun."""
        return 1 - self.with_underrun / self.succeeded if self.succeeded else None

    @property
    def too_few(self) -> bool:
        """Whether there are too few responses for percentiles to be meaningful."""
        return self.succeeded < FEW_ANSWERS

    @property
    def client_was_slow(self) -> bool:
        """Whether the client sent so late that the results reflect the client instead of the server."""
        return self.scheduling_lag_s is not None and self.scheduling_lag_s.p99 > MAX_CLIENT_LAG_S


def distribution(values: Sequence[float]) -> Distribution | None:
    """Return the mean and percentiles of `values`, or None if `values` is empty."""
    if not values:
        return None
    p50, p90, p95, p99 = (float(value) for value in np.percentile(values, (50, 90, 95, 99)))
    return Distribution(len(values), float(np.mean(values)), p50, p90, p95, p99, max(values))


def rate_per_s(times_s: Sequence[float]) -> float | None:
    """Return the mean rate of events at these times, or None if there are fewer than two distinct times."""
    span_s = max(times_s) - min(times_s) if times_s else 0.0
    return (len(times_s) - 1) / span_s if span_s else None


def summarize(
    traces: Sequence[Trace], *, planned: int, offered_per_s: float | None = None, limits: Limits = Limits()
) -> Summary:
    """Summarize the traces of `planned` requests. If `offered_per_s` is None, use the planned arrival rate."""
    succeeded = [trace for trace in traces if trace.failure is None]
    planned_s = [trace.planned_s for trace in traces]
    audio_s = sum(trace.audio_s for trace in succeeded)
    span_s = max(trace.finished_s for trace in traces) - min(planned_s) if traces else 0.0
    planned_audio_s = sum(map(_planned_audio_s, traces))
    played = [(trace, trace.playback) for trace in succeeded if trace.playback]
    smooth = [trace for trace, playback in played if not playback.underruns]
    underruns, chunks = sum(playback.underruns for _, playback in played), sum(each.num_chunks for _, each in played)
    stalls_s = [playback.stall_s for _, playback in played]
    streamed = [trace for trace in succeeded if not trace.is_file]
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
        left=sum(trace.left_s is not None for trace in traces),
        refusals=dict(Counter(_said(trace) for trace in traces if trace.failure is Failure.REFUSED).most_common()),
        causes=dict(Counter(trace.cause for trace in traces if trace.cause).most_common()),
        offered_per_s=rate_per_s(planned_s) if offered_per_s is None else offered_per_s,
        planned_per_s=rate_per_s(planned_s),
        achieved_per_s=rate_per_s([trace.sent_s for trace in traces]),
        audio_s=audio_s,
        audio_s_per_s=audio_s / span_s if span_s else None,
        planned_audio_s=planned_audio_s,
        audio_in_time_share=sum(map(_planned_audio_s, smooth)) / planned_audio_s if planned_audio_s else None,
        silent_answers=sum(trace.audible_sample is None for trace in succeeded),
        underruns=underruns,
        with_underrun=len(played) - len(smooth),
        c50=_continuous_share(stalls_s, 0.05),
        c100=_continuous_share(stalls_s, 0.1),
        c200=_continuous_share(stalls_s, 0.2),
        ttfb_s=_from_plan(streamed, [trace.first_byte_s for trace in streamed]),
        ttfp_s=_from_plan(streamed, [trace.first_playable_s for trace in streamed]),
        ttfa_s=_from_plan(streamed, [trace.first_audible_s for trace in streamed]),
        end_to_end_s=_from_plan(succeeded, [trace.finished_s for trace in succeeded]),
        rtf=distribution([(trace.finished_s - trace.sent_s) / trace.audio_s for trace in succeeded if trace.audio_s]),
        silence_s=distribution([trace.silence_s for trace in succeeded if trace.silence_s is not None]),
        stall_s=distribution(stalls_s),
        chunk_viability=1 - underruns / chunks if chunks else None,
        scheduling_lag_s=distribution([trace.sent_s - trace.planned_s for trace in traces]),
    )


def _from_plan(traces: Sequence[Trace], ends_s: Sequence[float | None]) -> Distribution | None:
    """Return the durations from the caller's request to `ends_s`. Skips traces that have no end."""
    pairs = zip(traces, ends_s, strict=True)
    return distribution([end_s - trace.asked_s for trace, end_s in pairs if end_s is not None])


def _continuous_share(stalls_s: Sequence[float], most_s: float) -> float | None:
    return sum(stall_s <= most_s for stall_s in stalls_s) / len(stalls_s) if stalls_s else None


def _said(trace: Trace) -> str:
    return re.sub(r" *\([^)]*\)", "", trace.error or "nothing")


def _planned_audio_s(trace: Trace) -> float:
    return trace.audio_s if trace.frames is None or trace.left_s is not None else trace.frames / FRAMES_PER_S


def outcome(trace: Trace, limits: Limits) -> str:
    """Return the outcome of a request, one of OUTCOMES."""
    if trace.failure is not None:
        return "refused" if trace.failure is Failure.REFUSED else "failed"
    return "good" if limits.met_by(trace) else "late"


def time_to_recover(
    traces: Sequence[Trace], start_s: float, *, end_s: float, window_s: float, limits: Limits
) -> float | None:
    """Return the seconds from `start_s` until all windows up to `end_s` are good, or None if the last one is not.

    All windows are equally long, and at least `window_s`. A window is good if it is empty, or if RECOVERED_SHARE of
    its requests met the limits.
    """
    edges = np.linspace(start_s, end_s, max(1, int((end_s - start_s) / window_s)) + 1)
    recovered_s = start_s
    for begin_s, stop_s in itertools.pairwise(edges.tolist()):
        inside = [trace for trace in traces if begin_s <= trace.planned_s < stop_s]
        if sum(limits.met_by(trace) for trace in inside) < RECOVERED_SHARE * len(inside):
            recovered_s = stop_s
    return None if recovered_s == edges[-1] else recovered_s - start_s
