from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.arrivals import Phase
from loadtest.measure import measure
from loadtest.processes import ClientProcesses
from loadtest.runner import WarmupFailedError
from loadtest.settings import Settings
from loadtest.traces import Failure, TraceFolder
from tests.loadtest.test_runner import schedule, serving, speak_at_once, written

pytestmark = pytest.mark.anyio


async def test_processes_share_a_schedule_and_a_clock(tmp_path: Path) -> None:
    async with serving(speak_at_once) as target:
        url = target.url
        settings = Settings(url, (Phase("all", 40.0, 0.5),), options={"model": "m"}, warmup=2, processes=2)
        result, whole = await measure(settings, TraceFolder(tmp_path), show=lambda progress: None)
    assert whole
    assert [trace.failure for trace in result.traces] == [None] * result.planned
    assert sorted(trace.index for trace in written(tmp_path / "requests.jsonl")) == list(range(result.planned))
    assert len((tmp_path / "warmup.jsonl").read_text().splitlines()) == 2
    assert all(trace.sent_s >= trace.planned_s for trace in result.traces)


async def test_a_warm_up_that_fails_in_one_process_ends_all(tmp_path: Path) -> None:
    async with serving(speak_at_once) as target:
        pass
    processes = ClientProcesses(replace(target, processes=2), schedule("a", "b"), folder=TraceFolder(tmp_path))
    with pytest.raises(WarmupFailedError, match=str(Failure.CONNECTION)):
        await processes.run(warmup=schedule("c", "d"))
