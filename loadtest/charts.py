"""Charts of runs, sweeps and simulations as Chart.js data. The page template provides the library and the colours."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from loadtest.measure import Result
from loadtest.metrics import OUTCOMES, Limits, Summary, outcome
from loadtest.sweep import Sweep
from loadtest.tables import MS, percentile
from loadtest.traces import Trace

if TYPE_CHECKING:
    from loadtest.simulate import Simulated  # imports the server's policies, which reports do not need

PERCENT = 100.0
MIN_WINDOW_S, MAX_WINDOWS = 1.0, 150
MAX_POINTS = 2000  # per series, to limit the page size
# Names from the page's Okabe-Ito palette, which is safe for colour-blind readers.
P50, P95, P99 = "blue", "orange", "purple"
COLOURS = ("blue", "orange", "green", "purple", "sky", "red")
OUTCOME_COLOURS = dict(zip(OUTCOMES, ("green", "yellow", "sky", "red"), strict=True))
DASHES: tuple[list[int], ...] = ([], [6, 4], [2, 3], [10, 3, 2, 3])  # one dash pattern for each sweep or meaning
OFFERED, TTFB, SECONDS = "offered rate, requests/s", "TTFB, ms", "seconds since the start of the run"

Series = dict[str, Any]  # a Chart.js data set; `colour` is a name in the palette
Point = tuple[float, float | None]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart: title, caption and Chart.js data."""

    title: str
    caption: str
    config: Mapping[str, Any]


def chart(title: str, caption: str, series: Sequence[Series], *, x: Mapping[str, Any], y: Mapping[str, Any]) -> Chart:
    """Build a chart of several series. Axes can have `marks`: labelled lines at given values."""
    marks = [{"axis": name, **mark} for name, axis in (("x", x), ("y", y)) for mark in axis.get("marks", ())]
    data, scales = {"datasets": series}, {"x": dict(x), "y": dict(y)}
    return Chart(title, caption, {"type": "line", "data": data, "options": {"scales": scales, "marks": marks}})


def axis(label: str, *, log: bool = False, **more: Any) -> dict[str, Any]:
    return {"type": "logarithmic" if log else "linear", "title": {"display": True, "text": label}, **more}


def series(label: str, points: Iterable[Point], colour: str, **more: Any) -> Series:
    """Build a line through points, with a gap at each None."""
    return {"label": label, "data": [{"x": _short(x), "y": _short(y)} for x, y in points], "colour": colour, **more}


def sweep_charts(sweeps: Sequence[Sweep]) -> list[Chart]:
    """Return charts of results by rate, with a colour per statistic and a dash pattern per sweep."""
    rates = [step.rate for sweep in sweeps for step in sweep.steps] or [1.0]
    x = axis(OFFERED, log=max(rates) > 20 * min(rates))
    limits = sweeps[0].steps[0].limits if sweeps[0].steps else Limits()
    capacities = [{"at": sweep.capacity_per_s, "name": "capacity"} for sweep in sweeps if sweep.capacity_per_s]

    def lines(label: str, colour: str, value: Callable[[Summary], float | None], **more: Any) -> list[Series]:
        drawn = []
        for sweep, dash in zip(sweeps, DASHES, strict=False):
            name = label if len(sweeps) == 1 else f"{sweep.title} {label}"
            points = [(step.rate, value(step.summary)) for step in sweep.steps]
            line = series(name, points, colour, borderDash=dash, pointRadius=4, **more)
            for point, step in zip(line["data"], sweep.steps, strict=True):
                point["n"] = step.summary.succeeded
            drawn.append(line)
        return drawn

    def ttfb(name: str) -> Callable[[Summary], float | None]:
        return lambda summary: percentile(summary.ttfb_s, name, MS)

    def ttfa(name: str) -> Callable[[Summary], float | None]:
        return lambda summary: percentile(summary.ttfa_s, name, MS)

    audible_limit = [] if limits.ttfa_s is None else [{"at": limits.ttfa_s * MS, "name": "limit"}]
    diagonal = series("all good", [(rate, rate) for rate in sorted({*rates})], "muted", pointRadius=0, borderWidth=1)
    refused = lines("refused", "sky", lambda s: (s.offered_per_s or 0) * s.refused / max(1, s.sent), pointStyle="rect")
    any_refused = any(step.summary.refused for sweep in sweeps for step in sweep.steps)
    return [
        chart(
            "Time to first byte against offered rate",
            "From planned arrival to first audio byte. It rises steeply beyond capacity. Hollow: under 20 responses.",
            lines("p50", P50, ttfb("p50"), pointStyle="circle")
            + lines("p95", P95, ttfb("p95"), pointStyle="triangle")
            + lines("p99", P99, ttfb("p99"), pointStyle="rect"),
            x=x,
            y=_ttfb_axis(limits),
        ),
        chart(
            "Time to first audible sample against offered rate",
            "From planned arrival to the first 10 ms above -50 dBFS, as played without a buffer.",
            lines("p50", P50, ttfa("p50"), pointStyle="circle")
            + lines("p95", P95, ttfa("p95"), pointStyle="triangle")
            + lines("p99", P99, ttfa("p99"), pointStyle="rect"),
            x=x,
            y=axis("TTFA, ms", log=True, marks=audible_limit),
        ),
        chart(
            "Goodput against offered rate",
            "Offered rate times the share of requests that met every limit. The thin diagonal marks 100 %.",
            [*lines("good", "green", lambda s: s.good_per_s), *(refused if any_refused else []), diagonal],
            x=axis(OFFERED, min=0, marks=capacities),  # linear, because a logarithmic axis would bend the diagonal
            y=axis("requests/s", beginAtZero=True),
        ),
        chart(
            "Streaming viability against offered rate",
            "Share of responses and of chunks that arrived in time for a player without a buffer.",
            lines("answers", "blue", lambda s: s.request_viability and s.request_viability * PERCENT)
            + lines("chunks", "orange", lambda s: s.chunk_viability and s.chunk_viability * PERCENT, pointStyle="rect"),
            x=x,
            y=axis("in time, %", min=0, max=100),
        ),
        chart(
            "Real-time factor against offered rate",
            "Time from send to the end of the audio, divided by the audio's duration. Above 1, playback stalls.",
            lines("p50", P50, lambda s: percentile(s.rtf, "p50"))
            + lines("p95", P95, lambda s: percentile(s.rtf, "p95"), pointStyle="triangle"),
            x=x,
            y=axis("RTF", beginAtZero=True, marks=[{"at": 1.0, "name": "as it plays"}]),
        ),
    ]


def run_charts(result: Result) -> list[Chart]:
    several = len(result.phases) > 1
    phases = [{"at": phase.start_s, "name": phase.name} for phase in result.phases] if several else []
    x = axis(SECONDS, min=0, max=result.end_s, marks=phases)
    groups = {each.title: each.traces for each in result.by_phase}
    replicas = [_replicas(result, x)] if result.samples else []
    return [_outcomes(result, x), _latencies(result, x), *replicas, distribution_chart("phase", groups)]


def windows(result: Result) -> Floats:
    """Return the edges of at most MAX_WINDOWS equal windows that each contain several requests."""
    lowest_rate = min((phase.rate for phase in result.phases), default=1.0)
    wanted = max(MIN_WINDOW_S, result.end_s / MAX_WINDOWS, 4 / lowest_rate)
    width_s = np.ceil(min(wanted, max(MIN_WINDOW_S, result.end_s / 20)))
    return np.asarray(np.arange(max(1, int(np.ceil(result.end_s / width_s))) + 1) * width_s, dtype=np.float64)


def _outcomes(result: Result, x: Mapping[str, Any]) -> Chart:
    edges = windows(result)
    bars = []
    for name, colour in OUTCOME_COLOURS.items():
        due_s = [trace.planned_s for trace in result.traces if outcome(trace, result.limits) == name]
        if due_s or name == "good":
            bars.append(series(name, _over(_middles(edges), _rates(due_s, edges)), colour, type="bar"))
    return chart(
        "Requests by outcome",
        f"By due time, in windows of {edges[1]:g} s. Late: succeeded, but missed a limit.",
        bars,
        x={**x, "stacked": True, "offset": False},
        y=axis("requests/s", beginAtZero=True, stacked=True),
    )


def _latencies(result: Result, x: Mapping[str, Any]) -> Chart:
    edges = windows(result)
    spoken = [(trace.planned_s, trace.ttfb_s * MS) for trace in result.traces if trace.ttfb_s is not None]
    p95 = _over(_middles(edges), _percentiles(*zip(*spoken, strict=True), edges=edges, percent=95)) if spoken else []
    every = math.ceil(len(spoken) / MAX_POINTS) or 1
    shown = "each response" if every == 1 else f"one response in {every}"
    return chart(
        "Time to first byte over time",
        f"A point for {shown}, and the 95th percentile of each window of {edges[1]:g} s.",
        [
            series("p95", p95, P95, pointRadius=0, spanGaps=True),
            series("answers", spoken[::every], P50, showLine=False, pointRadius=2),
        ],
        x=x,
        y=_ttfb_axis(result.limits),
    )


def _replicas(result: Result, x: Mapping[str, Any]) -> Chart:
    steps = []
    for name, colour in zip(sorted({n for s in result.samples for n in s.deployments}), COLOURS, strict=False):
        counts = [(sample.time_s, sample.deployments.get(name)) for sample in result.samples]
        running = [(time_s, float(count.running) if count else 0.0) for time_s, count in counts]
        wanted = [(time_s, None if count is None else count.target) for time_s, count in counts]
        more: Series = {"stepped": True, "pointRadius": 0}
        steps.append(series(name, _changes(running), colour, **more))
        if any(count is not None for _, count in wanted):
            steps.append(series(f"{name}, wanted", _changes(wanted), colour, borderDash=DASHES[1], **more))
    y = axis("replicas", beginAtZero=True, grace="20%", ticks={"precision": 0})
    return chart("Replicas over time", "Running replicas (solid) and target replicas (dashed).", steps, x=x, y=y)


def distribution_chart(kind: str, groups: Mapping[str, Sequence[Trace]], *, audible: bool = False) -> Chart:
    """Chart the distribution of TTFB or TTFA for several phases or runs."""
    curves, short, what = [], "TTFA" if audible else "TTFB", "audible sample" if audible else "byte"
    for index, (name, traces) in enumerate(groups.items()):
        taken_s = [trace.ttfa_s if audible else trace.ttfb_s for trace in traces]
        times_ms = sorted(time_s * MS for time_s in taken_s if time_s is not None)
        points = [(value, PERCENT * rank / len(times_ms)) for rank, value in enumerate(times_ms, start=1)]
        every = math.ceil(len(points) / MAX_POINTS) or 1
        look: Series = {"borderDash": DASHES[index % len(DASHES)], "pointRadius": 0, "stepped": True}
        label = f"{name} (n = {len(points)})"
        curves.append(series(label, points[::-1][::every][::-1], COLOURS[index % len(COLOURS)], **look))
    return chart(
        f"Time to first {what}, distribution by {kind}",
        f"Share of the responses of each {kind} that began within a given time.",
        curves,
        x=axis(f"{short} from planned arrival, ms", log=True),
        y=axis("answers, %", min=0, max=100),
    )


def simulation_charts(done: "Simulated") -> list[Chart]:
    end_s = max(done.times_s[-1], 1.0)
    unit_s, unit = (3600.0, "hours") if end_s > 2 * 3600 else (1.0, "seconds")
    edges = np.linspace(0.0, end_s, MAX_WINDOWS + 1)
    x, look, middles = axis(unit, min=0), {"pointRadius": 0}, _middles(edges) / unit_s
    spoken = ~np.isnan(done.ttfb_s)

    def ttfb(percent: int) -> list[Point]:
        heights = _percentiles(done.arrival_s[spoken], done.ttfb_s[spoken] * MS, edges=edges, percent=percent)
        return _over(middles, heights)

    def pool(label: str, counts: Sequence[int], colour: str, dash: int = 0) -> Series:
        points = _changes([(time_s / unit_s, count) for time_s, count in zip(done.times_s, counts, strict=True)])
        return series(label, points, colour, stepped=True, borderDash=DASHES[dash], **look)

    load = {"offered": (done.arrival_s, "green"), "refused": (done.arrival_s[~spoken], "sky")}
    loads = [series(n, _over(middles, _rates(due_s, edges)), colour, **look) for n, (due_s, colour) in load.items()]
    latencies = [series("p50", ttfb(50), P50, **look), series("p95", ttfb(95), P95, **look)]
    pools = [pool("talker", done.talkers, "blue"), pool("talker, wanted", done.talkers_wanted, "blue", 1)]
    codecs = [pool("codec", done.codecs, "green")] if any(done.codecs) else []
    replicas = axis("replicas", beginAtZero=True, ticks={"precision": 0})
    requests = axis("requests/s", beginAtZero=True)
    return [
        chart("Simulated load", "Arrived requests and refused requests.", loads, x=x, y=requests),
        chart("Simulated time to first byte", "Percentiles of each window.", latencies, x=x, y=axis(TTFB, log=True)),
        chart("Simulated replicas", "Running (solid) and target (dashed) replicas.", pools + codecs, x=x, y=replicas),
    ]


def _ttfb_axis(limits: Limits) -> dict[str, Any]:
    limit_ms = limits.ttfb_s * MS
    return axis(TTFB, log=True, marks=[{"at": limit_ms, "name": "limit"}], suggestedMin=limit_ms, suggestedMax=limit_ms)


def _middles(edges: Floats) -> Floats:
    return (edges[:-1] + edges[1:]) / 2


def _rates(times_s: Sequence[float] | Floats, edges: Floats) -> Floats:
    """Return the number of events per second in each window."""
    return np.asarray(np.histogram(times_s, edges)[0] / np.diff(edges), dtype=np.float64)


def _percentiles(
    times: Sequence[float] | Floats, values: Sequence[float] | Floats, *, edges: Floats, percent: int
) -> list[float]:
    """Return a percentile of the values in each time window, NaN for empty windows. `times` must be sorted."""
    groups = np.split(np.asarray(values), np.searchsorted(times, edges))[1:-1]
    return [float(np.percentile(group, percent)) if len(group) else math.nan for group in groups]


def _over(times: Iterable[float], values: Iterable[float]) -> list[Point]:
    return [(time, None if math.isnan(value) else value) for time, value in zip(times, values, strict=True)]


def _changes(points: Sequence[tuple[float, float | None]]) -> list[Point]:
    """Drop points that repeat the previous value, except for the last point."""
    kept = [
        point for before, point in zip((None, *points), points, strict=False) if not before or before[1] != point[1]
    ]
    return [*kept, points[-1]]


def _short(value: float | None) -> float | None:
    """Round to four significant digits, the most that a chart can show, to keep the page small."""
    return None if value is None else float(f"{value:.5g}")
