"""A run second by second: what came in, what became of it, and when the server was itself again. Pure functions."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadtest.metrics import Limits
from loadtest.traces import Failure, Trace

RECOVERED_SHARE = 0.95  # of the requests of a window must be good


@dataclass(frozen=True, slots=True)
class Timeline:
    """Rates in windows of equal width. Every request counts where it was due."""

    starts_s: NDArray[np.float64]
    width_s: float
    offered_per_s: NDArray[np.float64]
    good_per_s: NDArray[np.float64]
    refused_per_s: NDArray[np.float64]
    failed_per_s: NDArray[np.float64]
    ttfb_p95_s: NDArray[np.float64]  # NaN where nothing was spoken


def timeline(traces: Sequence[Trace], *, end_s: float, width_s: float, limits: Limits) -> Timeline:
    """The windows from 0 to `end_s`."""
    count = max(1, int(np.ceil(end_s / width_s)))
    edges: NDArray[np.float64] = np.linspace(0.0, count * width_s, count + 1)
    spoken = [trace for trace in traces if trace.failure is None and trace.first_byte_s is not None]
    return Timeline(
        starts_s=edges[:-1],
        width_s=width_s,
        offered_per_s=_per_s(traces, edges),
        good_per_s=_per_s([trace for trace in spoken if limits.met_by(trace)], edges),
        refused_per_s=_per_s([trace for trace in traces if trace.failure is Failure.REFUSED], edges),
        failed_per_s=_per_s([trace for trace in traces if trace.failure not in (None, Failure.REFUSED)], edges),
        ttfb_p95_s=np.array([_p95_ttfb(spoken, start, start + width_s) for start in edges[:-1]]),
    )


def _per_s(traces: Sequence[Trace], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    counts, _ = np.histogram([trace.planned_s for trace in traces], edges)
    rates: NDArray[np.float64] = counts / np.diff(edges)
    return rates


def _p95_ttfb(spoken: Sequence[Trace], start_s: float, end_s: float) -> float:
    values = [
        trace.first_byte_s - trace.planned_s
        for trace in spoken
        if start_s <= trace.planned_s < end_s and trace.first_byte_s is not None
    ]
    return float(np.percentile(values, 95)) if values else float("nan")


def time_to_recover(
    traces: Sequence[Trace], start_s: float, *, end_s: float, window_s: float, limits: Limits
) -> float | None:
    """Seconds from `start_s` until windows are good and stay so until `end_s`; None if the last one is not.

    Windows are equally wide, at least `window_s`. One is good if RECOVERED_SHARE of its requests met the limits; one
    without requests is.
    """
    edges = np.linspace(start_s, end_s, max(1, int((end_s - start_s) / window_s)) + 1)
    recovered_s = start_s
    for begin_s, stop_s in itertools.pairwise(edges.tolist()):
        inside = [trace for trace in traces if begin_s <= trace.planned_s < stop_s]
        if sum(limits.met_by(trace) for trace in inside) < RECOVERED_SHARE * len(inside):
            recovered_s = stop_s
    return None if recovered_s == edges[-1] else recovered_s - start_s


def in_flight(traces: Sequence[Trace]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Times at which the number of requests under way changed, and that number from then on."""
    steps = sorted([(trace.sent_s, 1) for trace in traces] + [(trace.finished_s, -1) for trace in traces])
    times, changes = ([time for time, _ in steps], [change for _, change in steps])
    return np.array(times), np.cumsum(np.array(changes, dtype=np.int64))
