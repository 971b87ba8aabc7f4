"""The charts of a sweep: what rising rates showed."""

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from loadtest.chart import MS, PERCENT, Chart, Palette, limit_line, plain_log
from loadtest.metrics import Distribution, Summary
from loadtest.sweep import Step, Sweep


def sweep_charts(sweeps: Sequence[Sweep]) -> list[Chart]:
    """What rising rates showed, one line a sweep."""
    return [
        Chart(
            "ttfb-against-rate",
            "Time to first byte against offered rate",
            "From planned arrival to first audio byte: median (solid), 95th percentile (dashed), 99th (dotted). The "
            "grey line is the limit that a good request keeps. A server is usable up to the bend.",
            lambda figure, palette: draw_ttfb(figure, palette, sweeps),
        ),
        Chart(
            "goodput-against-rate",
            "Goodput against offered rate",
            "Offered rate times the share of requests that met every limit; on the thin diagonal all of them do. "
            "Dashed: refusals. Dotted: the capacity.",
            lambda figure, palette: draw_goodput(figure, palette, sweeps),
        ),
        Chart(
            "viability-against-rate",
            "Streaming viability against offered rate",
            "Share of answers (solid) and of chunks (dashed) in time for a player without a buffer.",
            lambda figure, palette: draw_viability(figure, palette, sweeps),
        ),
        Chart(
            "rtf-against-rate",
            "Real-time factor against offered rate",
            "Time from send to the end of the audio over its duration: median (solid), 95th percentile (dashed). Above "
            "1 the audio comes slower than it plays.",
            lambda figure, palette: draw_rtf(figure, palette, sweeps),
        ),
    ]


def rates(steps: Sequence[Step]) -> list[float]:
    """The x axis of a sweep."""
    return [step.rate for step in steps]


def values(steps: Sequence[Step], pick: Callable[[Summary], float | None]) -> NDArray[np.float64]:
    """One number of every step, NaN where nothing was measured."""
    picked = [pick(step.result.summary) for step in steps]
    return np.array([np.nan if value is None else value for value in picked], dtype=np.float64)


def percentile(distribution: Distribution | None, name: str, scale: float = 1.0) -> float | None:
    """One percentile of a distribution that may not be there."""
    return None if distribution is None else getattr(distribution, name) * scale


def draw_ttfb(figure: Figure, palette: Palette, sweeps: Sequence[Sweep]) -> None:
    """See `sweep_charts`."""
    axis = rate_axis(figure, sweeps, "TTFB, ms")
    plain_log(axis, "y")
    for sweep, colour in zip(sweeps, palette.series, strict=False):
        for name, style in (("p50", "-"), ("p95", "--"), ("p99", ":")):
            heights = values(sweep.steps, lambda s, name=name: percentile(s.from_planned.ttfb_s, name, MS))  # type: ignore[misc]
            axis.plot(rates(sweep.steps), heights, style, marker="o", color=colour, label=f"{sweep.title} {name}")
    if sweeps[0].steps:
        limit_line(axis, palette, sweeps[0].steps[0].result.limits.ttfb_s * MS)
    axis.legend()


def draw_goodput(figure: Figure, palette: Palette, sweeps: Sequence[Sweep]) -> None:
    """See `sweep_charts`."""
    axis = rate_axis(figure, sweeps, "requests/s")
    top = max((step.rate for sweep in sweeps for step in sweep.steps), default=1.0)
    axis.plot([0, top], [0, top], color=palette.muted, linewidth=0.8)
    for sweep, colour in zip(sweeps, palette.series, strict=False):
        axis.plot(
            rates(sweep.steps), values(sweep.steps, lambda s: s.good_per_s), "o-", color=colour, label=sweep.title
        )
        refused = [step.result.summary.refused / max(1, step.result.summary.sent) * step.rate for step in sweep.steps]
        if any(refused):
            axis.plot(rates(sweep.steps), refused, "o--", color=colour, label=f"{sweep.title}, refused", alpha=0.7)
        if sweep.capacity_per_s is not None:
            axis.axvline(sweep.capacity_per_s, color=colour, linewidth=0.8, linestyle=(0, (1, 2)))
    axis.set_ylim(bottom=0)
    axis.legend()


def draw_viability(figure: Figure, palette: Palette, sweeps: Sequence[Sweep]) -> None:
    """See `sweep_charts`."""
    axis = rate_axis(figure, sweeps, "in time, %")
    for sweep, colour in zip(sweeps, palette.series, strict=False):
        answers = values(sweep.steps, lambda s: s.continuity.request_viability * PERCENT if s.continuity else None)
        chunks = values(sweep.steps, lambda s: s.continuity.chunk_viability * PERCENT if s.continuity else None)
        axis.plot(rates(sweep.steps), answers, "o-", color=colour, label=f"{sweep.title}, answers")
        axis.plot(rates(sweep.steps), chunks, "o--", color=colour, label=f"{sweep.title}, chunks")
    axis.set_ylim(0, 105)
    axis.legend(loc="lower left")


def draw_rtf(figure: Figure, palette: Palette, sweeps: Sequence[Sweep]) -> None:
    """See `sweep_charts`."""
    axis = rate_axis(figure, sweeps, "RTF")
    for sweep, colour in zip(sweeps, palette.series, strict=False):
        for name, style in (("p50", "-"), ("p95", "--")):
            heights = values(sweep.steps, lambda s, name=name: percentile(s.rtf, name))  # type: ignore[misc]
            axis.plot(rates(sweep.steps), heights, style, marker="o", color=colour, label=f"{sweep.title} {name}")
    axis.axhline(1.0, color=palette.muted, linewidth=1, linestyle=(0, (2, 2)))
    axis.set_ylim(bottom=0)
    axis.legend()


def rate_axis(figure: Figure, sweeps: Sequence[Sweep], label: str) -> Axes:
    """Axes over offered rates, logarithmic where these span more than a factor of 20."""
    axis: Axes = figure.add_subplot()
    every = [step.rate for sweep in sweeps for step in sweep.steps]
    if every and max(every) > 20 * min(every):
        plain_log(axis, "x")
    axis.set_xlabel("offered rate, requests/s")
    axis.set_ylabel(label)
    return axis
