"""One chart, as a PNG and as SVG whose colours a page decides. Needs matplotlib."""

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

MS = 1000.0
PERCENT = 100.0
WIDTH_IN, HEIGHT_IN = 5.4, 3.3  # 390 points: about one to one on a phone
PNG_DPI = 160


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


def limit_line(axis: Axes, palette: Palette, height: float) -> None:
    """What good requests keep."""
    axis.axhline(height, color=palette.muted, linewidth=1, linestyle=(0, (2, 2)))
    axis.annotate(
        "limit", (1, height), xycoords=("axes fraction", "data"), ha="right", va="bottom", color=palette.muted
    )
