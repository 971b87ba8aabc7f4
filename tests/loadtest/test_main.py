import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from loadtest import terminal
from loadtest.__main__ import app
from loadtest.arrivals import Arrivals, Phase, place
from loadtest.measure import Result, measure, read_result
from loadtest.metrics import Limits
from loadtest.settings import Settings
from loadtest.terminal import show_result
from loadtest.traces import Failure, Trace, TraceFolder
from tests.loadtest.test_metrics import SPOKEN, failed
from tests.loadtest.test_runner import serving, speak_at_once


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["run", *arguments])
    return result.exit_code, " ".join(result.output.split())


def options(out: Path, **changes: str) -> list[str]:
    values = {"url": "http://127.0.0.1:9", "rate": "1", "duration": "9", "out": str(out)} | changes
    return [item for name, value in values.items() for item in (f"--{name}", value)]


OWN = "sets texts and transport itself"


@pytest.mark.parametrize(("changes", "status", "complaint"), [
    ({"rate": "0"}, 2, "number above 0"), ({"duration": "nan"}, 2, "number above 0"),
    ({"url": "127.0.0.1:8000"}, 2, "is not a URL"), ({"header": "X-Key: a\nb"}, 2, "is not a header"),
    ({"extra": "[1]"}, 2, "must be a JSON object"), ({"extra": "{"}, 2, "not valid JSON"),
    ({"extra": '{"input": "x"}'}, 2, "remove the field"), ({"rate": "0.000001"}, 2, "the plan contains no requests"),
    ({"traffic": "mixed", "transport": "websocket"}, 2, OWN), ({"traffic": "mixed", "texts": "paragraphs"}, 2, OWN),
    ({"recordings": "2"}, 2, "requires --recording-s"),
    ({"recording-s": "2", "transport": "live"}, 2, "requires --dialect talkray"),
    ({"recording-s": "2", "dialect": "openai"}, 2, "requires --dialect talkray"),
    ({"recording-s": "2", "extra": '{"ref_text": "x"}'}, 2, "sets ref_audio and ref_text"),
    ({}, 1, "No server responds at http://127.0.0.1:9"), ({}, 1, "Start the server"),
])  # fmt: skip
def test_wrong_use_is_explained(tmp_path: Path, changes: dict[str, str], status: int, complaint: str) -> None:
    exit_code, output = invoke(*options(tmp_path / "run", **changes))
    assert exit_code == status
    assert complaint in output
    assert not (tmp_path / "run").exists()


def test_results_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"mine": 1}))
    exit_code, output = invoke(*options(tmp_path))
    assert exit_code == 2
    assert "already contains a run" in output
    assert json.loads((tmp_path / "run.json").read_text()) == {"mine": 1}


@pytest.mark.anyio
async def test_a_run_leaves_its_plan_its_traces_and_its_summary(tmp_path: Path) -> None:
    async with serving(speak_at_once) as target:
        phases = (Phase("settling in", 50, 0.1, measured=False), Phase("measured", 50, 0.1))
        settings = Settings(
            target.url, phases, arrivals=Arrivals.CONSTANT, warmup=1, headers={"Authorization": "Bearer hush"}
        )
        result, whole = await measure(settings, TraceFolder(tmp_path / "run"), show=lambda _: None)
    assert whole
    summary = result.summary
    assert (summary.planned, summary.sent, summary.succeeded) == (5, 5, 5)
    files = {path.name: path.read_text() for path in (tmp_path / "run").iterdir()}
    assert files.keys() == {"run.json", "schedule.jsonl", "warmup.jsonl", "requests.jsonl", "summary.json"}
    assert len(files["schedule.jsonl"].splitlines()) == len(files["requests.jsonl"].splitlines()) == 10
    assert json.loads(files["run.json"])["settings"]["phases"][1]["rate"] == 50
    assert "hush" not in files["run.json"]
    assert read_result(TraceFolder(tmp_path / "run")).summary == summary
    assert json.loads(files["summary.json"])["ttfa_s"]["count"] == 5


def shown(*traces: Trace, planned: int = 2) -> str:
    console = Console(width=120, record=True)
    result = Result("run", {}, place([Phase("measured", 1.0, 9.0)]), Limits(), list(traces), [], planned)
    show_result(result, console)
    return " ".join(console.export_text().split())


def test_the_table_says_what_happened() -> None:
    text = shown(SPOKEN, failed(Failure.REFUSED, 429))
    assert "2 of 2 sent: 1 spoken, 1 refused, 0 failed" in text
    assert "HTTP 429: 1" in text
    assert "TTFA, ms │ 1 │ 120.0 │" in text
    assert "too slow" not in text


def test_the_table_of_nothing_is_empty() -> None:
    text = shown(planned=3)
    assert "0 of 3 sent, then interrupted: 0 spoken" in text
    assert "RTF │ 0 │ - │" in text


def test_a_slow_client_is_said_plainly() -> None:
    assert "This client was too slow in run: its p99 lag behind the plan is 60 ms" in shown(
        replace(SPOKEN, sent_s=1.06)
    )


def test_a_simulation_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "PLAIN_PERIOD_S", 0.0)
    console = Console(file=io.StringIO(), record=True, force_terminal=False)
    with terminal.simulated_time("simulating 9 requests", 60.0, console) as show:
        show(30.0)
        show(61.0)
    first, second = console.export_text().splitlines()
    assert first == "simulating 9 requests: 50%"
    assert second == "simulating 9 requests: the last streams are ending"
