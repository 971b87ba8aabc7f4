import json
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.arrivals import ScheduledRequest
from loadtest.traces import Failure, RunExistsError, Trace, TraceFolder
from tests.loadtest.test_metrics import SPOKEN, failed


@pytest.mark.parametrize("trace", [SPOKEN, replace(SPOKEN, audible_sample=None), failed(Failure.HTTP, 500)])
def test_a_trace_survives_its_json(trace: Trace) -> None:
    assert Trace.from_json(json.loads(json.dumps(trace.to_json()))) == trace


def test_the_json_holds_the_derived_times() -> None:
    record = SPOKEN.to_json()
    assert (record["first_playable_s"], record["first_audible_s"]) == (1.1, 1.12)


def test_traces_are_appended(tmp_path: Path) -> None:
    folder = TraceFolder(tmp_path)
    for index in range(2):
        folder.append_trace(replace(SPOKEN, index=index))
    lines = (tmp_path / "requests.jsonl").read_text().splitlines()
    assert [Trace.from_json(json.loads(line)).index for line in lines] == [0, 1]


def test_a_run_is_never_overwritten(tmp_path: Path) -> None:
    folder = TraceFolder(tmp_path / "deep" / "run")
    folder.check_unused()
    folder.write_schedule([ScheduledRequest(0, 0.5, "Hello.")])
    run = {"started_at": "2026-01-02T03:04:05+00:00", "url": "http://h:1", "settings": {"rate": 3.0}}
    folder.write_json("run.json", run)
    with pytest.raises(RunExistsError, match=r"deep/run already contains a run \(2026-01-02T03.*http://h:1.*--out"):
        folder.check_unused()
    with pytest.raises(FileExistsError):
        folder.write_json("run.json", run)
    assert json.loads((folder.path / "run.json").read_text()) == run
