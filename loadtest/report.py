"""One page of one or more runs and sweeps: self-contained HTML, and a PNG of each chart beside it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from loadtest.chart import DARK, LIGHT, Chart, named_colours
from loadtest.measure import PhaseResult, Result, read_result
from loadtest.metrics import MAX_CLIENT_LAG_S, Limits, Summary
from loadtest.run_charts import comparison_charts, run_charts
from loadtest.sweep import Sweep, read_sweep
from loadtest.sweep_charts import percentile, sweep_charts
from loadtest.traces import RunFolder

MS = 1000.0
PAGE = "report.html"

STYLE = """
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 1.2rem 1rem 4rem; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p { margin: .3rem 0; } .muted, figcaption { color: var(--muted); }
code { font: .85em ui-monospace, monospace; overflow-wrap: anywhere; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: .7rem; margin: 1rem 0; }
.card { background: var(--paper); border: 1px solid var(--grid); border-radius: 8px; padding: .6rem .8rem; }
.card b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 1rem; }
.scroll + .charts { margin-top: 1rem; }
figure { margin: 0; background: var(--paper); border: 1px solid var(--grid); border-radius: 8px; padding: .7rem .8rem; }
figure h3 { margin: 0 0 .3rem; font-size: 1rem; } figure svg { width: 100%; height: auto; display: block; }
figcaption { font-size: .85rem; margin-top: .3rem; }
.scroll { overflow-x: auto; background: var(--paper); border: 1px solid var(--grid); border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--grid); }
th:first-child, td:first-child { text-align: left; } tr:last-child td { border-bottom: 0; }
th { color: var(--muted); font-weight: 600; }
.warning { border-left: 4px solid var(--failed); padding: .3rem .8rem; background: var(--paper); margin: .6rem 0; }
""".strip()

WORDS = {
    "TTFB": "planned arrival of a request to the first byte of its audio.",
    "good": "spoken, and within every stated limit. <b>Goodput</b>: good requests per second.",
    "late": "spoken, but beyond a limit.",
    "in time": "share of answers all of whose chunks arrived before a player without a buffer ran dry.",
    "RTF": "time from send to the end of the audio over its duration; below 1 it comes faster than it plays.",
    "recovered": "from the beginning of the phase until windows (5 s, or 20 requests) had 95 % good ones, to its end.",
    "lag": "how much later than planned the client itself sent, 99th percentile.",
}


@dataclass(frozen=True, slots=True)
class Report:
    """What a page is about."""

    sweeps: tuple[Sweep, ...]
    runs: tuple[Result, ...]

    @property
    def results(self) -> list[Result]:
        """Every run, those of sweeps included."""
        return [step.result for sweep in self.sweeps for step in sweep.steps] + list(self.runs)

    def charts(self) -> list[Chart]:
        """All charts of the page."""
        drawn = sweep_charts(self.sweeps) if self.sweeps else []
        drawn += comparison_charts(self.runs) if len(self.runs) > 1 else []
        return drawn + [chart for run in self.runs for chart in run_charts(run)]


def read_report(folders: Sequence[Path], *, limits: Limits | None = None) -> Report:
    """The results in `folders`, each a run or a sweep. Raises NoRunError."""
    sweeps, runs = [], []
    for path in folders:
        if (path / "sweep.json").exists():
            sweeps.append(read_sweep(RunFolder(path), limits=limits))
        else:
            runs.append(read_result(RunFolder(path), limits=limits))
    titles = distinct([sweep.title for sweep in sweeps] + [run.title for run in runs])
    return Report(
        tuple(replace(sweep, title=title) for sweep, title in zip(sweeps, titles, strict=False)),
        tuple(replace(run, title=title) for run, title in zip(runs, titles[len(sweeps) :], strict=True)),
    )


def distinct(names: Sequence[str]) -> list[str]:
    """The names, numbered where they repeat."""
    return [
        f"{name} ({names[: index + 1].count(name)})" if names.count(name) > 1 else name
        for index, name in enumerate(names)
    ]


def write_report(report: Report, out: Path, *, drawn: Callable[[], None]) -> Path:
    """Write the page and its pictures into `out`; `drawn` is called after each chart. Returns the page's path.

    A report follows from the results: it is written anew whenever it is asked for.
    """
    out.mkdir(parents=True, exist_ok=True)
    figures = {}
    for chart in report.charts():
        (out / f"{chart.name}.png").write_bytes(chart.png())
        figures[chart.name] = figure(chart)
        drawn()
    page = out / PAGE
    page.write_text(html(report, figures), encoding="utf-8")
    return page


def figure(chart: Chart) -> str:
    """One chart with its title and caption."""
    return (
        f"<figure><h3>{escape(chart.title)}</h3>{chart.svg()}<figcaption>{escape(chart.caption)}</figcaption></figure>"
    )


def html(report: Report, figures: dict[str, str]) -> str:
    """The page."""
    titles = [sweep.title for sweep in report.sweeps] + [run.title for run in report.runs]
    title = " and ".join(titles)
    sections = [warnings(report), *(sweep_section(sweep) for sweep in report.sweeps)]
    if report.sweeps:
        sections.append(charts_of(sweep_charts(report.sweeps), figures))
    if len(report.runs) > 1:
        sections += [comparison_section(report.runs), charts_of(comparison_charts(report.runs), figures)]
    for run in report.runs:
        sections += [run_section(run), charts_of(run_charts(run), figures)]
    sections += [f"<h2>Words</h2>{words()}", f"<h2>How it was measured</h2>{provenance(report)}"]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Load test: {escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{colours()}{STYLE}</style></head>'
        f"<body><main><h1>Load test: {escape(title)}</h1>{''.join(sections)}</main></body></html>\n"
    )


def colours() -> str:
    """The custom properties of both themes."""
    light, dark = (
        "".join(f"--{name}: {colour};" for name, colour in named_colours(palette).items()) for palette in (LIGHT, DARK)
    )
    return (
        f":root {{ color-scheme: light dark; --page: #f4f6f8; {light} }}"
        f"@media (prefers-color-scheme: dark) {{ :root {{ --page: #0d1117; {dark} }} }}"
    )


def charts_of(charts: Sequence[Chart], figures: Mapping[str, str]) -> str:
    """Charts side by side, or one below the other on a phone."""
    return f'<div class="charts">{"".join(figures[chart.name] for chart in charts)}</div>'


def warnings(report: Report) -> str:
    """What to know before believing the numbers."""
    slow = [result.title for result in report.results if result.summary.client_was_slow]
    if not slow:
        return ""
    return (
        f'<p class="warning">The client was too slow in {escape(", ".join(slow))}: it sent more than '
        f"{MAX_CLIENT_LAG_S * MS:.0f} ms late (99th percentile). These numbers say more of it than of the server.</p>"
    )


def cards(facts: dict[str, str]) -> str:
    """A few numbers to see first."""
    inside = "".join(f'<div class="card"><b>{escape(value)}</b>{escape(name)}</div>' for name, value in facts.items())
    return f'<div class="cards">{inside}</div>'


def sweep_section(sweep: Sweep) -> str:
    """Capacity and the table of a sweep."""
    at_capacity = [step for step in sweep.steps if step.rate == sweep.capacity_per_s]
    summary = at_capacity[0].result.summary if at_capacity else None
    best = max((step.result.summary.good_per_s or 0.0 for step in sweep.steps), default=0.0)
    facts = {
        "capacity, requests/s": number(sweep.capacity_per_s, 2),
        "TTFB p50 there, ms": milliseconds(summary, "p50"),
        "TTFB p95 there, ms": milliseconds(summary, "p95"),
        "best goodput, requests/s": number(best, 2),
    }
    limits = f"; {sweep.steps[0].result.limits}" if sweep.steps else ""
    about = f"Capacity: the highest rate at which {sweep.plan.held_share:.0%} of the requests were good{limits}."
    rows = [[f"{step.rate:.2f}", *outcomes(step.result.summary)] for step in sweep.steps]
    heading = f"<h2>Rising rates: {escape(sweep.title)}</h2>{cards(facts)}<p class='muted'>{escape(about)}</p>"
    return heading + table(["offered/s", *OUTCOMES], rows)


def comparison_section(runs: Sequence[Result]) -> str:
    """One line a run."""
    return f"<h2>Compared</h2>{table(['run', *OUTCOMES], [[run.title, *outcomes(run.summary)] for run in runs])}"


def run_section(run: Result) -> str:
    """Phases and percentiles of one run."""
    summary = run.summary
    facts = {
        "requests sent": str(summary.sent),
        "good": percent(summary.good_share),
        "refused": str(summary.refused),
        "failed": str(summary.failed),
        "TTFB p95, ms": milliseconds(summary, "p95"),
    }
    if summary.refused:
        facts["of the refusals said when to retry"] = percent(summary.refused_with_advice / summary.refused)
    phases = run.phase_results
    rows = [phase_row(phase, phases[0]) for phase in phases]
    heading = (
        f"<h2>Over time: {escape(run.title)}</h2>{cards(facts)}<p class='muted'>Good: {escape(str(run.limits))}.</p>"
    )
    return heading + table(["phase", "offered/s", *AGAINST_FIRST, *OUTCOMES], rows)


AGAINST_FIRST = ("recovered", "goodput to first phase", "TTFB p95 to first")


def phase_row(phase: PhaseResult, first: PhaseResult) -> list[str]:
    """One line of the table of phases; `first` is what the others are held against."""
    name, rate = phase.name, f"{phase.placed.phase.rate:.2f}"
    if phase.placed == first.placed:
        return [name, rate, "-", "-", "-", *outcomes(phase.summary)]
    recovered = "no" if phase.recovered_after_s is None else f"after {phase.recovered_after_s:.0f} s"
    goodput = ratio(phase.summary.good_per_s, first.summary.good_per_s)
    ttfb = [percentile(each.summary.from_planned.ttfb_s, "p95") for each in (phase, first)]
    return [name, rate, recovered, goodput, ratio(*ttfb), *outcomes(phase.summary)]


def ratio(value: float | None, reference: float | None) -> str:
    """How many times the reference, or a dash."""
    return "-" if value is None or not reference else f"{value / reference:.2f} x"


OUTCOMES = (
    "sent",
    "good/s",
    "good",
    "refused",
    "failed",
    "TTFB p50, ms",
    "p95",
    "p99",
    "TTFA p95",
    "RTF p50",
    "in time",
    "stall p95, ms",
    "audio s/s",
    "lag, ms",
)


def outcomes(summary: Summary) -> list[str]:
    """The columns OUTCOMES of one rate or phase."""
    playback = summary.continuity
    return [
        str(summary.sent),
        number(summary.good_per_s, 2),
        percent(summary.good_share),
        str(summary.refused),
        str(summary.failed),
        *(milliseconds(summary, name) for name in ("p50", "p95", "p99")),
        number(percentile(summary.from_planned.ttfa_s, "p95", MS), 0),
        number(percentile(summary.rtf, "p50"), 2),
        percent(playback.request_viability if playback else None),
        number(percentile(playback.stall_s if playback else None, "p95", MS), 0),
        number(summary.audio_s_per_s, 1),
        number(percentile(summary.scheduling_lag_s, "p99", MS), 0),
    ]


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that scrolls sideways where it is too wide."""
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def words() -> str:
    """What the words mean."""
    return "".join(f"<p><b>{name}</b>: {meaning}</p>" for name, meaning in WORDS.items())


def provenance(report: Report) -> str:
    """Commands, versions and machines."""
    tests = [(sweep.title, sweep.steps[0].result.about) for sweep in report.sweeps if sweep.steps]
    tests += [(run.title, run.about) for run in report.runs]
    return "".join(one_provenance(title, about) for title, about in tests)


def one_provenance(title: str, about: dict[str, Any]) -> str:
    """How one run came about."""
    machine, versions = about.get("machine", {}), about.get("versions", {})
    facts = [
        f"{about.get('started_at')} from {machine.get('platform')}, {machine.get('cpus')} cores",
        ", ".join(f"{name} {number}" for name, number in versions.items()),
    ]
    lines = "".join(f"<br>{escape(fact)}" for fact in facts)
    return f"<p><b>{escape(title)}</b>: <code>{escape(str(about.get('command')))}</code>{lines}</p>"


def milliseconds(summary: Summary | None, name: str) -> str:
    """A percentile of TTFB from the planned arrival."""
    return number(percentile(summary.from_planned.ttfb_s if summary else None, name, MS), 0)


def number(value: float | None, digits: int) -> str:
    """The value, or a dash where nothing was measured."""
    return "-" if value is None else f"{value:.{digits}f}"


def percent(share: float | None) -> str:
    """A share, or a dash where nothing was measured."""
    return "-" if share is None else f"{share:.1%}"
