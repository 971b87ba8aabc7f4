import json
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.arrivals import Phase, place
from loadtest.lengths import SpeechLengths
from loadtest.measure import Result
from loadtest.metrics import Limits
from loadtest.rates import Rates, Row, header, line, summarize, try_rates
from loadtest.runner import Settings
from loadtest.traces import Failure, RunFolder, Trace
from tests.loadtest.test_metrics import SPOKEN, failed
from tests.loadtest.test_runner import serving, speak_at_once


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def result(*traces: Trace) -> Result:
    phases = tuple(place([Phase("measured", 1.0, 10.0)]))
    return Result("run", {}, phases, Limits(), list(traces), [], len(traces))


def test_a_low_rate_is_measured_for_longer() -> None:
    plan = Rates((1.0, 20.0), duration_s=10.0, min_requests=30)
    assert [plan.phases(rate)[0].duration_s for rate in plan.rates] == [30.0, 10.0]


def test_a_rate_that_does_not_fit_into_the_budget_is_left_out() -> None:
    plan = Rates((1.0,), duration_s=10.0, budget_s=20.0)
    assert plan.fits(1.0, elapsed_s=6.0)
    assert not plan.fits(1.0, elapsed_s=6.1)


def test_audio_counts_as_in_time_by_its_planned_length() -> None:
    smooth = replace(SPOKEN, chunks=((1.1, 2000),))
    late, broken = replace(SPOKEN, index=1), replace(failed(Failure.TIMEOUT, None), index=2)
    row = summarize(1.0, result(smooth, late, broken), frames=[25, 50, 25])
    assert (row.spoken, row.with_underrun, row.failed) == (2, 1, 1)
    assert row.planned_audio_s == 8.0
    assert row.in_time_share == 0.25


@pytest.mark.anyio
async def test_each_rate_has_a_folder_and_a_row(tmp_path: Path) -> None:
    rows: list[Row] = []
    async with serving(speak_at_once) as target:
        settings = Settings(target.base_url, (), lengths=SpeechLengths(1.0, 0.1), one_sentence=True)
        plan = Rates((20.0, 40.0), duration_s=0.2)
        whole = await try_rates(
            settings, plan, folder=RunFolder(tmp_path), show=lambda progress: None, done=rows.append
        )
    assert whole
    assert [row.rate for row in rows] == [20.0, 40.0]
    assert [row["requests"] for row in json.loads((tmp_path / "rates.json").read_text())["rows"]] == [
        row.spoken for row in rows
    ]
    assert (tmp_path / "01-rate-40" / "summary.json").exists()
    assert [text.split()[0] for text in (header(), line(rows[0]))] == ["r/s", "20"]
