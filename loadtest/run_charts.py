"""The charts of a run: what happened over its time, and how runs compare."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, ScalarFormatter

from loadtest.chart import MS, PERCENT, Chart, Palette, limit_line, plain_log
from loadtest.measure import Result
from loadtest.timeline import Timeline, timeline
from loadtest.traces import Trace

MIN_WINDOW_S = 1.0
MAX_WINDOWS = 150


def run_charts(result: Result) -> list[Chart]:
    """What happened over the time of one run."""
    windows = timeline(result.traces, end_s=result.end_s, width_s=window_s(result), limits=result.limits)
    panels = 3 if result.samples else 2
    replicas = " Last: replicas that run (solid) and are wanted (dashed)." if result.samples else ""
    return [
        Chart(
            f"{result.title}-over-time",
            f"Load and answers over time: {result.title}",
            f"Requests per second by the time they were due, in windows of {windows.width_s:g} s: good, late (spoken, "
            f"but beyond a limit), refused, failed. Under it: TTFB of every answer, and the 95th percentile of each "
            f"window.{replicas}",
            lambda figure, palette: draw_over_time(figure, palette, result, windows),
            height_in=1.75 * panels,
        ),
        Chart(
            f"{result.title}-ttfb",
            f"Time to first byte, distribution: {result.title}",
            "Share of the answers that began within a time, for each phase of the run.",
            lambda figure, palette: draw_distribution(figure, palette, result),
        ),
    ]


def comparison_charts(results: Sequence[Result]) -> list[Chart]:
    """Runs side by side."""
    return [
        Chart(
            "ttfb-compared",
            "Time to first byte, compared",
            "Share of the answers of each run that began within a time.",
            lambda figure, palette: draw_compared(figure, palette, results),
        )
    ]


def window_s(result: Result) -> float:
    """Of a width at which a run has no more than MAX_WINDOWS, and a window some requests."""
    lowest_rate = min((placed.phase.rate for placed in result.phases), default=1.0)
    wanted = max(MIN_WINDOW_S, result.end_s / MAX_WINDOWS, 4 / lowest_rate)
    return float(np.ceil(min(wanted, max(MIN_WINDOW_S, result.end_s / 20))))


def draw_over_time(figure: Figure, palette: Palette, result: Result, windows: Timeline) -> None:
    """See `run_charts`."""
    panels = figure.subplots(3 if result.samples else 2, sharex=True, squeeze=False)[:, 0]
    draw_outcomes(panels[0], palette, windows)
    draw_latencies(panels[1], palette, result, windows)
    if result.samples:
        draw_replicas(panels[2], palette, result)
    for placed in result.phases[1:]:
        for panel in panels:
            panel.axvline(placed.start_s, color=palette.muted, linewidth=0.8, linestyle=(0, (3, 2)))
    if len(result.phases) > 1:
        for placed in result.phases:
            panels[0].annotate(
                placed.phase.name,
                ((placed.start_s + placed.end_s) / 2, 1.02),
                xycoords=("data", "axes fraction"),
                ha="center",
                va="bottom",
                fontsize=7,
                color=palette.muted,
            )
    panels[-1].set_xlabel("seconds since the start of the run")


def draw_outcomes(axis: Axes, palette: Palette, windows: Timeline) -> None:
    """What became of the requests."""
    late = windows.offered_per_s - windows.good_per_s - windows.refused_per_s - windows.failed_per_s
    outcomes = {
        "good": (windows.good_per_s, palette.good),
        "late": (late, palette.late),
        "refused": (windows.refused_per_s, palette.refused),
        "failed": (windows.failed_per_s, palette.failed),
    }
    below = np.zeros_like(late)
    for name, (heights, colour) in outcomes.items():
        if heights.any() or name == "good":
            axis.bar(
                windows.starts_s,
                heights,
                windows.width_s,
                bottom=below,
                align="edge",
                color=colour,
                label=name,
                linewidth=0,
            )
        below = below + heights
    axis.set_ylabel("requests/s")
    axis.legend(ncols=4, loc="upper left", borderaxespad=0.1, handlelength=1)
    axis.set_ylim(0, max(1.0, float(windows.offered_per_s.max()) * 1.3))


def draw_latencies(axis: Axes, palette: Palette, result: Result, windows: Timeline) -> None:
    """TTFB of every answer."""
    spoken = [t for t in result.traces if t.failure is None and t.first_byte_s is not None]
    ttfb_ms = [((t.first_byte_s or 0.0) - t.planned_s) * MS for t in spoken]
    axis.scatter([t.planned_s for t in spoken], ttfb_ms, s=6, color=palette.series[0], alpha=0.5, linewidths=0)
    middles = windows.starts_s + windows.width_s / 2
    axis.plot(middles, windows.ttfb_p95_s * MS, color=palette.series[1], linewidth=1.2, label="p95")
    plain_log(axis, "y")
    limit_line(axis, palette, result.limits.ttfb_s * MS)
    axis.set_ylabel("TTFB, ms")
    axis.legend(loc="upper left", borderaxespad=0.1)


def draw_replicas(axis: Axes, palette: Palette, result: Result) -> None:
    """Replicas of each deployment whose number is not always the same, or of all if none changed."""
    names = sorted({name for sample in result.samples for name in sample.deployments})
    times = [sample.time_s for sample in result.samples]
    for index, (name, colour) in enumerate(zip(names, palette.series, strict=False)):
        apart = 0.06 * (index - (len(names) - 1) / 2)  # equal counts would hide each other
        counts = [sample.deployments.get(name) for sample in result.samples]
        running = [(count.running if count else 0) + apart for count in counts]
        wanted = [np.nan if count is None or count.target is None else count.target + apart for count in counts]
        axis.step(times, running, where="post", color=colour, label=name)
        axis.step(times, wanted, where="post", color=colour, linestyle="--", linewidth=1)
    axis.set_ylabel("replicas")
    highest = max((count.running for sample in result.samples for count in sample.deployments.values()), default=1)
    axis.set_ylim(0, highest * 1.5)
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    axis.yaxis.set_major_formatter(ScalarFormatter())
    axis.legend(ncols=3, loc="upper left", borderaxespad=0.1)


def draw_distribution(figure: Figure, palette: Palette, result: Result) -> None:
    """See `run_charts`."""
    measured = [placed for placed in result.phases if placed.phase.measured]
    draw_shares(
        figure,
        palette,
        {placed.phase.name: [trace for trace in result.traces if placed.holds(trace.planned_s)] for placed in measured},
    )


def draw_compared(figure: Figure, palette: Palette, results: Sequence[Result]) -> None:
    """See `comparison_charts`."""
    draw_shares(figure, palette, {result.title: result.measured for result in results})


def draw_shares(figure: Figure, palette: Palette, groups: Mapping[str, Sequence[Trace]]) -> None:
    """Share of the spoken answers of each group that began within a time."""
    axis: Axes = figure.add_subplot()
    for (name, traces), colour in zip(groups.items(), palette.series, strict=False):
        spoken = [trace for trace in traces if trace.failure is None]
        ttfb_ms = sorted((t.first_byte_s - t.planned_s) * MS for t in spoken if t.first_byte_s is not None)
        shares = (np.arange(len(ttfb_ms)) + 1) / max(1, len(ttfb_ms)) * PERCENT
        axis.step(ttfb_ms, shares, where="post", color=colour, label=name)
    plain_log(axis, "x")
    axis.set_xlabel("TTFB from planned arrival, ms")
    axis.set_ylabel("answers, %")
    axis.set_ylim(0, 102)
    axis.legend(loc="lower right")
