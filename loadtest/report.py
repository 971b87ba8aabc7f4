"""Write a self-contained HTML page with charts for runs and sweeps, or for a simulation."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup, escape

from loadtest.charts import Chart, distribution_chart, run_charts, sweep_charts
from loadtest.measure import Result, read_result
from loadtest.metrics import Limits
from loadtest.sweep import Sweep, read_sweep
from loadtest.tables import (
    COLUMNS,
    Table,
    cells,
    kind_table,
    phase_table,
    rate_table,
    run_verdict,
    sweep_verdict,
    warnings,
)
from loadtest.traces import TraceFolder

PAGE = "report.html"
_OPTION = re.compile(r"--[a-z-]+")


@dataclass(frozen=True, slots=True)
class Section:
    """One section of the page."""

    heading: str
    table: Table
    charts: Sequence[Chart] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """Content of the page."""

    sweeps: tuple[Sweep, ...]
    runs: tuple[Result, ...]

    @property
    def verdicts(self) -> dict[str, str]:
        """One or two sentences on each run and sweep."""
        said = {sweep.title: sweep_verdict(sweep) for sweep in self.sweeps}
        return said | {run.title: run_verdict(run) for run in self.runs}

    @property
    def results(self) -> list[Result]:
        """All runs, including the runs of sweeps."""
        return [step for sweep in self.sweeps for step in sweep.steps] + list(self.runs)

    @property
    def sections(self) -> list[Section]:
        """Sections of the page. All sweeps share the charts, which appear in the last sweep's section."""
        sections = [Section(f"Results by rate: {sweep.title}", rate_table(sweep)) for sweep in self.sweeps]
        if sections:
            sections[-1] = replace(sections[-1], charts=sweep_charts(self.sweeps))
        if len(self.runs) > 1:
            runs = {run.title: run.measured for run in self.runs}
            table = Table(("run", *COLUMNS), [[run.title, *cells(run.summary)] for run in self.runs])
            sections.append(Section("Compared", table, [distribution_chart("run", runs)]))
        if (kinds := kind_table(self.results)).rows:
            sections.append(Section("Kinds of requests", kinds))
        return sections + [
            Section(f"Over time: {run.title}", phase_table(run.by_phase), run_charts(run)) for run in self.runs
        ]

    @property
    def provenance(self) -> dict[str, Any]:
        firsts = {sweep.title: sweep.steps[0].about for sweep in self.sweeps if sweep.steps}
        return firsts | {run.title: run.about for run in self.runs}


def read_report(folders: Sequence[Path], *, limits: Limits | None = None) -> Report:
    """Read the results in `folders`, each a run or a sweep. Raises `NoRunError`."""
    sweeps, runs = [], []
    for path in folders:
        if (path / "sweep.json").exists():
            sweeps.append(read_sweep(TraceFolder(path), limits=limits))
        else:
            runs.append(read_result(TraceFolder(path), limits=limits))
    titles = distinct([sweep.title for sweep in sweeps] + [run.title for run in runs])
    return Report(
        tuple(replace(sweep, title=title) for sweep, title in zip(sweeps, titles, strict=False)),
        tuple(replace(run, title=title) for run, title in zip(runs, titles[len(sweeps) :], strict=True)),
    )


def distinct(names: Sequence[str]) -> list[str]:
    """Append numbers to repeated names."""
    return [
        f"{name} ({names[: index + 1].count(name)})" if names.count(name) > 1 else name
        for index, name in enumerate(names)
    ]


def write_report(report: Report, out: Path) -> Path:
    """Write the page into `out`. Any earlier page is replaced, because pages can be regenerated."""
    return write_page(
        out,
        f"Load test: {' and '.join(report.verdicts)}",
        verdicts=report.verdicts,
        notes=warnings(report.results),
        sections=report.sections,
        provenance=report.provenance,
    )


def write_page(out: Path, title: str, **content: Any) -> Path:
    """Write a page with `verdicts` at the top, then `notes` and `sections`. Return its path."""
    out.mkdir(parents=True, exist_ok=True)
    package = files("loadtest")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["options"] = marked_options
    template = environment.from_string((package / PAGE).read_text(encoding="utf-8"))
    library = (package / "chartjs" / "chart.umd.min.js").read_text(encoding="utf-8")
    page = out / PAGE
    page.write_text(template.render(title=title, library=library, **content) + "\n", encoding="utf-8")
    return page


def marked_options(text: str) -> Markup:
    """Convert `text` to HTML with `--options` marked as code that does not wrap."""
    escaped = str(escape(text))  # escape first, because Markup would also escape the code tags
    return Markup(_OPTION.sub(r'<code class="option">\g<0></code>', escaped))
