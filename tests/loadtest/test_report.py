import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from loadtest.arrivals import Phase, place
from loadtest.charts import MAX_POINTS
from loadtest.measure import Result
from loadtest.metrics import Limits
from loadtest.replicas import ReplicaCount, ReplicaSample
from loadtest.report import Report, distinct, marked_options, write_report
from loadtest.sweep import Sweep
from loadtest.traces import Failure, Trace
from tests.loadtest.servers import paced_server
from tests.loadtest.test_metrics import SPOKEN, failed
from tests.loadtest.test_sweep import PLAN, step

ABOUT = {"started_at": "2026-01-02", "command": "python -m loadtest run --voice '<b>'", "machine": {}, "versions": {}}


def run(title: str, *, samples: bool = False) -> Result:
    late = replace(SPOKEN, planned_s=12.0, sent_s=12.0, first_byte_s=13.0)
    refused = replace(failed(Failure.REFUSED, 429), planned_s=15.0, retry_after_s=1.0)
    phases = place([Phase("calm", 1.0, 10.0), Phase("storm", 5.0, 10.0)])
    counts = [ReplicaSample(float(second), {"Talker": ReplicaCount(1 + second // 10, 2)}) for second in range(20)]
    return Result(title, ABOUT, phases, Limits(), [SPOKEN, late, refused], counts if samples else [], 3)


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.labels: list[str] = []  # of the charts
        self.specs: list[dict[str, Any]] = []  # what the library is told of each
        self.verdicts: list[str] = []
        self.headings: list[str] = []
        self.cells: list[str] = []
        self._inside: list[tuple[str, str]] = []
        self.feed(text)
        self.charts = dict(zip((label.split(":")[0] for label in self.labels), self.specs, strict=True))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.links += [values[name] for name in ("src", "href") if name in values]
        if tag == "canvas":
            assert values["role"] == "img"
            self.labels.append(values["aria-label"])
        self._inside.append((tag, values.get("type") or values.get("class", "")))

    def handle_data(self, data: str) -> None:
        match self._inside[-1] if self._inside else None:
            case ("script", "application/json"):
                self.specs.append(json.loads(data))
            case ("p", "verdict"):
                self.verdicts.append(data)
            case ("h2", _):
                self.headings.append(data)
            case ("td", _):
                self.cells.append(data)

    def handle_endtag(self, tag: str) -> None:
        while self._inside and self._inside.pop()[0] != tag:
            pass


def page_of(report: Report, folder: Path) -> Page:
    return Page(write_report(report, folder).read_text(encoding="utf-8"))


def points(spec: dict[str, Any], label: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = next(each["data"] for each in spec["data"]["datasets"] if each["label"] == label)
    return found


@pytest.fixture
def pages(tmp_path: Path) -> dict[str, Page]:
    steps = (step(1.0, 1.0), step(2.0, 1.0), step(4.0, 0.2))
    sweeps = (Sweep("old", PLAN, steps), Sweep("new", PLAN, steps))
    return {
        "run": page_of(Report((), (run("one", samples=True),)), tmp_path),
        "runs": page_of(Report((), (run("one"), run("two"))), tmp_path),
        "sweep": page_of(Report(sweeps[:1], ()), tmp_path),
        "sweeps": page_of(Report(sweeps, ()), tmp_path),
    }


def test_the_page_needs_nothing_from_elsewhere_and_is_small(pages: dict[str, Page], tmp_path: Path) -> None:
    assert not [link for page in pages.values() for link in page.links]
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|sourceMappingURL", text)
    assert len(text) < 400_000
    assert "MIT License" in text  # of the library: its licence goes with it


def test_every_chart_has_a_description_for_those_who_cannot_see_it(pages: dict[str, Page]) -> None:
    assert [len(page.labels) for page in pages.values()] == [4, 7, 5, 5]
    assert all(re.fullmatch(r"[A-Z][\w\s,-]+: [A-Z].{30,}", label) for page in pages.values() for label in page.labels)


def test_a_rate_that_is_all_good_stands_on_the_diagonal(tmp_path: Path) -> None:
    all_good = step(0.2, 1.0)  # ten requests in ten seconds: the rate that chance drew does not matter
    page = page_of(Report((Sweep("slow", PLAN, (all_good, step(0.4, 0.5))),), ()), tmp_path)
    goodput = points(page.charts["Goodput against offered rate"], "good")
    assert [(point["x"], point["y"]) for point in goodput] == [(0.2, 0.2), (0.4, 0.2)]
    assert points(page.charts["Goodput against offered rate"], "all good")[0] == {"x": 0.2, "y": 0.2}


def test_percentiles_have_their_own_colours_marks_and_sample_sizes(pages: dict[str, Page]) -> None:
    series = pages["sweep"].charts["Time to first byte against offered rate"]["data"]["datasets"]
    assert [each["label"] for each in series] == ["p50", "p95", "p99"]
    assert len({each["colour"] for each in series}) == len({each["pointStyle"] for each in series}) == 3
    assert {point["n"] for each in series for point in each["data"]} == {10}


def test_the_palette_has_every_colour_that_a_chart_names(pages: dict[str, Page], tmp_path: Path) -> None:
    named = {
        each["colour"] for page in pages.values() for spec in page.charts.values() for each in spec["data"]["datasets"]
    }
    style = (tmp_path / "report.html").read_text(encoding="utf-8").split("</style>")[0]
    light, dark = style.split("prefers-color-scheme: dark")
    assert all(f"--{name}: #" in scheme for name in named for scheme in (light, dark))


def test_one_verdict_stands_on_top_for_each_result(pages: dict[str, Page]) -> None:
    (verdict,) = pages["sweep"].verdicts
    assert "Holds 2 requests/s, TTFB p50/p95/p99 100 / 100 / 100 ms: at least 95% of the requests good" in verdict
    assert verdict.endswith("; at 4 only 20.0% were.")
    assert len(pages["runs"].verdicts) == 2
    assert pages["run"].verdicts[0].startswith("33.3% of 3 requests were good")
    assert "Had not recovered by the end of “storm”." in pages["run"].verdicts[0]


def test_options_are_marked_and_all_else_is_text() -> None:
    shown = marked_options("p95 < 1 s & --max-ttfb, --out")
    assert shown == 'p95 &lt; 1 s &amp; <code class="option">--max-ttfb</code>, <code class="option">--out</code>'


def test_a_verdict_that_a_higher_rate_contradicts_says_so(tmp_path: Path) -> None:
    steps = (step(1.0, 1.0), step(2.0, 0.8), step(4.0, 1.0))
    (verdict,) = page_of(Report((Sweep("shaken", PLAN, steps),), ()), tmp_path).verdicts
    assert verdict.startswith("Holds 1 requests/s")
    assert verdict.endswith("But 4 was sustained, so the measurement was disturbed. Repeat the sweep.")


def test_so_few_answers_are_warned_of(tmp_path: Path) -> None:
    def warned(title: str, count: int) -> bool:
        many = replace(run(title), traces=[SPOKEN] * count, planned=count)
        write_report(Report((), (many,)), tmp_path)
        return f"Fewer than 20 answers in {title} ({count})" in (tmp_path / "report.html").read_text(encoding="utf-8")

    assert warned("nineteen", 19)
    assert not warned("twenty", 20)


def test_a_run_shows_its_phases_its_refusals_and_its_replicas(pages: dict[str, Page], tmp_path: Path) -> None:
    page = page_of(Report((), (run("one", samples=True),)), tmp_path)
    assert page.cells[page.cells.index("storm") + 1] == "5"
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "1 refused (1 with a retry time)" in page.verdicts[0]
    assert "&lt;b&gt;" in text
    replicas = page.charts["Replicas over time"]
    assert [(point["x"], point["y"]) for point in points(replicas, "Talker")] == [(0, 1), (10, 2), (19, 2)]
    assert [mark["name"] for mark in replicas["options"]["marks"]] == ["calm", "storm"]
    assert "Replicas over time" not in pages["runs"].charts


def test_windows_count_requests_where_they_were_due(tmp_path: Path) -> None:
    def due(planned_s: float, ttfb_s: float = 0.1) -> Trace:
        return replace(SPOKEN, planned_s=planned_s, sent_s=planned_s, first_byte_s=planned_s + ttfb_s)

    traces = [due(0.0), due(1.9), due(2.0, 0.9), replace(failed(Failure.REFUSED, 429), planned_s=2.5)]
    phases = place([Phase("all", 2.0, 40.0)])
    page = page_of(Report((), (replace(run("one"), traces=traces, phases=phases),)), tmp_path)
    counted = page.charts["Requests by outcome"]  # in windows of 2 s
    assert [points(counted, name)[0]["y"] for name in ("good", "late", "refused")] == [1.0, 0.0, 0.0]
    assert [points(counted, name)[1]["y"] for name in ("good", "late", "refused")] == [0.0, 0.5, 0.5]
    p95 = points(page.charts["Time to first byte over time"], "p95")
    assert [point["y"] for point in p95[:3]] == [100, 900, None]


def test_two_runs_are_compared(pages: dict[str, Page]) -> None:
    assert "Compared" in pages["runs"].headings
    curves = pages["runs"].charts["Time to first byte, distribution by run"]["data"]["datasets"]
    assert [each["label"] for each in curves] == ["one (n = 2)", "two (n = 2)"]
    assert [(point["x"], point["y"]) for point in curves[0]["data"]] == [(100, 50), (1000, 100)]


def test_sweeps_share_their_charts(pages: dict[str, Page]) -> None:
    series = pages["sweeps"].charts["Time to first byte against offered rate"]["data"]["datasets"]
    assert {each["label"] for each in series} >= {"old p95", "new p95"}
    assert series[0]["borderDash"] != series[1]["borderDash"]


def test_a_page_of_many_requests_stays_small(tmp_path: Path) -> None:
    traces = [replace(SPOKEN, planned_s=index / 1000, first_byte_s=index / 1000 + 0.1) for index in range(20_000)]
    page = page_of(Report((), (replace(run("long"), traces=traces),)), tmp_path)
    drawn = points(page.charts["Time to first byte over time"], "answers")
    assert MAX_POINTS / 2 < len(drawn) <= MAX_POINTS
    assert (tmp_path / "report.html").stat().st_size < 1_000_000


def test_repeated_names_are_numbered() -> None:
    assert distinct(["run", "other", "run"]) == ["run (1)", "other", "run (2)"]


def loadtest(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "loadtest", *arguments], capture_output=True, text=True, check=True)
    return " ".join(done.stdout.split())


def test_a_server_that_misses_the_first_rate_gets_a_verdict_and_a_page(tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    with paced_server(gap_s=0.6) as url:  # holds 1.7 requests a second, of equal gaps
        said = loadtest(
            *("sweep", "--url", url, "--out", str(out), "--from", "4", "--duration", "2.5", "--settle", "0"),
            *("--arrivals", "constant", "--min-requests", "0", "--refine", "0", "--max-ttfb", "5000"),
        )
    swept = json.loads((out / "sweep.json").read_text(encoding="utf-8"))
    rates = [each["rate"] for each in swept["steps"]]
    assert rates[-3:] == [1.0, 2.0, 4.0]
    held = swept["capacity_per_s"]
    assert held == rates[0]  # 1.0, and less on a busy machine: it is looked for downwards until one is held
    assert f"Holds {held:g} requests/s, TTFB" in said
    assert "at least 95% of the requests good" in said
    assert re.search(r"Fewer than 20 answers in 02-rate-1 \(3\)", said)
    loadtest("report", str(out))
    page = Page((out / "report" / "report.html").read_text(encoding="utf-8"))
    assert page.verdicts[0].startswith(f"Holds {held:g} requests/s")
    lowest = points(page.charts["Goodput against offered rate"], "good")[0]
    assert lowest["x"] == lowest["y"] == held


def test_goodput_is_the_offered_rate_times_the_share_that_was_good(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with paced_server(gap_s=0.0) as url:  # chance draws two or four requests, rarely three
        loadtest("run", "--url", url, "--out", str(out), "--rate", "2", "--duration", "1.5", "--max-ttfb", "5000")
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert summary["sent"] != 3
    assert (summary["good_share"], summary["good_per_s"]) == (1.0, 2.0)
