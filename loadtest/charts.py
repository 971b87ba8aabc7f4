"""The charts of a report, each as a PNG and as SVG whose colours a page decides. Needs matplotlib."""

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, ScalarFormatter
from numpy.typing import NDArray

from loadtest.measure import Result
from loadtest.metrics import Distribution, Summary
from loadtest.sweep import Step, Sweep
from loadtest.timeline import Timeline, timeline
from loadtest.traces import Trace

MS = 1000.0
PERCENT = 100.0
WIDTH_IN, HEIGHT_IN = 5.4, 3.3  # 390 points: about one to one on a phone
PNG_DPI = 160
MIN_WINDOW_S = 1.0
MAX_WINDOWS = 150


@dataclass(frozen=True, slots=True)
class Palette:
    """Colours by their role."""

    ink: str
    muted: str
    grid: str
    paper: str
    good: str
    late: str
    refused: str
    failed: str
    series: tuple[str, ...]


LIGHT = Palette(
    ink="#1f2328",
    muted="#636c76",
    grid="#d8dee4",
    paper="#ffffff",
    good="#2f7d6b",
    late="#d9a441",
    refused="#7a6bb8",
    failed="#c4473a",
    series=("#1f6feb", "#c4473a", "#2f7d6b", "#8250df", "#b4690e"),
)
DARK = Palette(
    ink="#e6edf3",
    muted="#9198a1",
    grid="#30363d",
    paper="#151b23",
    good="#4fb39c",
    late="#e3b765",
    refused="#a89ae0",
    failed="#ef7b6f",
    series=("#6ca9ff", "#ef7b6f", "#4fb39c", "#bf9bff", "#e0a25a"),
)


def named_colours(palette: Palette) -> dict[str, str]:
    """Every colour under the name that the page's style sheet has for it."""
    roles = ("ink", "muted", "grid", "paper", "good", "late", "refused", "failed")
    colours = {role: getattr(palette, role) for role in roles}
    return colours | {f"series-{index}": colour for index, colour in enumerate(palette.series)}


def placeholder_palette() -> tuple[Palette, dict[str, str]]:
    """A palette of colours that stand for names, and what each is to be replaced with in SVG."""
    names = list(named_colours(LIGHT))
    codes = {name: f"#fe{index:02x}fd" for index, name in enumerate(names)}
    series = tuple(code for name, code in codes.items() if name.startswith("series-"))
    roles = {name: code for name, code in codes.items() if not name.startswith("series-")}
    return Palette(**roles, series=series), {code: f"var(--{name})" for name, code in codes.items()}


Draw = Callable[[Figure, Palette], None]


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart: what it shows, how to read it, and how it is drawn."""

    name: str  # of its file
    title: str
    caption: str
    draw: Draw
    height_in: float = HEIGHT_IN

    def png(self) -> bytes:
        """The picture on white paper."""
        figure = self._figure(LIGHT)
        figure.suptitle(self.title, fontsize=10, color=LIGHT.ink)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=PNG_DPI)
        return buffer.getvalue()

    def svg(self) -> str:
        """An <svg> element for a page that defines the custom properties of `named_colours`."""
        palette, replacements = placeholder_palette()
        with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": self.name}):
            buffer = io.StringIO()
            self._figure(palette).savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
        text = buffer.getvalue()
        text = text[text.index("<svg") :]
        for code, variable in replacements.items():
            text = text.replace(code, variable)
        text = re.sub(r' id="[A-Za-z0-9]+_\d+"', "", text)  # of groups: the same in every chart of a page
        return re.sub(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', self._svg_tag, text, count=1)

    def _svg_tag(self, match: re.Match[str]) -> str:
        namespaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
        return f'<svg {namespaces} viewBox="{match[1]}" role="img" aria-label="{self.title}">'

    def _figure(self, palette: Palette) -> Figure:
        with styled(palette):
            figure = Figure(figsize=(WIDTH_IN, self.height_in), layout="constrained")
            FigureCanvasAgg(figure)
            self.draw(figure, palette)
        return figure


@contextmanager
def styled(palette: Palette) -> Iterator[None]:
    """Matplotlib in this palette."""
    settings: dict[Any, Any] = {  # matplotlib types its keys as one large literal
        "font.size": 9,
        "font.family": "sans-serif",
        "text.color": palette.ink,
        "axes.labelcolor": palette.muted,
        "axes.edgecolor": palette.muted,
        "axes.facecolor": "none",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "figure.facecolor": palette.paper,
        "grid.color": palette.grid,
        "grid.linewidth": 0.6,
        "xtick.color": palette.muted,
        "ytick.color": palette.muted,
        "legend.handlelength": 3.2,  # enough to tell dashes from dots
        "legend.facecolor": palette.paper,
        "legend.edgecolor": "none",
        "legend.fontsize": 8,
        "lines.linewidth": 1.8,
        "lines.markersize": 4,
    }
    with mpl.rc_context(settings):
        yield


def plain_log(axis: Axes, which: str) -> None:
    """A logarithmic axis with plain numbers at 1, 2, 3 and 5."""
    if which == "y":
        axis.set_yscale("log", subs=(2, 3, 5))
        ticks: Axis = axis.yaxis
    else:
        axis.set_xscale("log", subs=(2, 3, 5))
        ticks = axis.xaxis
    for formatter in (ticks.set_major_formatter, ticks.set_minor_formatter):
        formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.grid(visible=True, which="minor", linewidth=0.3)


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


def limit_line(axis: Axes, palette: Palette, height: float) -> None:
    """What good requests keep."""
    axis.axhline(height, color=palette.muted, linewidth=1, linestyle=(0, (2, 2)))
    axis.annotate(
        "limit", (1, height), xycoords=("axes fraction", "data"), ha="right", va="bottom", color=palette.muted
    )


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
