import re
from dataclasses import replace
from pathlib import Path

from loadtest.arrivals import Phase, place
from loadtest.chart import LIGHT, named_colours, placeholder_palette
from loadtest.measure import Result
from loadtest.metrics import Limits
from loadtest.replicas import ReplicaCount, Sample
from loadtest.report import Report, distinct, write_report
from loadtest.sweep import Sweep
from loadtest.traces import Failure
from tests.loadtest.test_metrics import SPOKEN, failed
from tests.loadtest.test_sweep import PLAN, step

ABOUT = {"started_at": "2026-01-02", "command": "python -m loadtest run --voice '<b>'", "machine": {}, "versions": {}}


def run(title: str, *, samples: bool = False) -> Result:
    late = replace(SPOKEN, planned_s=12.0, sent_s=12.0, first_byte_s=13.0)
    refused = replace(failed(Failure.REFUSED, 429), planned_s=15.0, retry_after_s=1.0)
    phases = tuple(place([Phase("calm", 1.0, 10.0), Phase("storm", 5.0, 10.0)]))
    counts = [Sample(float(second), {"Talker": ReplicaCount(1 + second // 10, 2)}) for second in range(20)]
    return Result(title, ABOUT, phases, Limits(), [SPOKEN, late, refused], counts if samples else [], 3)


def page_of(report: Report, folder: Path) -> str:
    drawn: list[None] = []
    page = write_report(report, folder, drawn=lambda: drawn.append(None))
    assert len(drawn) == len(report.charts()) == len(list(folder.glob("*.png")))
    return page.read_text(encoding="utf-8")


def test_the_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    page = page_of(Report((), (run("one", samples=True),)), tmp_path)
    links = re.findall(r'(?:src|href)\s*=\s*"([^"]*)"', page)
    assert all(link.startswith("#") for link in links)
    assert "url(http" not in page
    assert "@import" not in page


def test_charts_take_their_colours_from_the_page(tmp_path: Path) -> None:
    page = page_of(Report((), (run("one", samples=True),)), tmp_path)
    _, replacements = placeholder_palette()
    assert not [code for code in replacements if code in page]
    assert all(f"--{name}:" in page for name in named_colours(LIGHT))
    assert "prefers-color-scheme: dark" in page


def test_a_run_shows_its_phases_its_refusals_and_its_replicas(tmp_path: Path) -> None:
    page = page_of(Report((), (run("one", samples=True),)), tmp_path)
    assert "<td>storm</td><td>5.00</td>" in page
    assert "of the refusals said when to retry" in page
    assert ">replicas</text>" in page
    assert "&lt;b&gt;" in page
    assert ">replicas</text>" not in page_of(Report((), (run("one"),)), tmp_path)


def test_two_runs_are_compared(tmp_path: Path) -> None:
    page = page_of(Report((), (run("one"), run("two"))), tmp_path)
    assert "<h2>Compared</h2>" in page
    assert (tmp_path / "ttfb-compared.png").exists()


def test_sweeps_share_their_charts(tmp_path: Path) -> None:
    steps = (step(1.0, 1.0), step(2.0, 1.0), step(4.0, 0.2))
    page = page_of(Report((Sweep("old", PLAN, steps), Sweep("new", PLAN, steps)), ()), tmp_path)
    assert sorted(path.stem for path in tmp_path.glob("*.png")) == [
        "goodput-against-rate",
        "rtf-against-rate",
        "ttfb-against-rate",
        "viability-against-rate",
    ]
    assert "old p95" in page
    assert "new p95" in page


def test_repeated_names_are_numbered() -> None:
    assert distinct(["run", "other", "run"]) == ["run (1)", "other", "run (2)"]
