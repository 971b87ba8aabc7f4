import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loadtest.__main__ import app
from loadtest.arrivals import Arrivals, Phase, SpeechLengths, Texts, place
from loadtest.measure import Result
from loadtest.metrics import Limits
from loadtest.settings import Settings
from loadtest.sweep import Plan, Sweep, capacity, next_rate, read_sweep, sweep
from loadtest.traces import NoRunError, TraceFolder
from tests.loadtest.test_metrics import SPOKEN
from tests.loadtest.test_runner import serving, speak_at_once

pytestmark = pytest.mark.anyio

PLAN = Plan(first_rate=1.0, max_rate=8.0, factor=2.0, duration_s=10.0, settle_s=0.0)


def step(rate: float, good_share: float) -> Result:
    """A rate of whose ten requests so many were good."""
    good = round(good_share * 10)
    traces = [SPOKEN] * good + [replace(SPOKEN, first_byte_s=9.0)] * (10 - good)
    phases = place([Phase("measured", rate, 10.0)])
    return Result("step", {}, phases, Limits(stall_s=1.0), traces, [], 10)


def rates_until_done(server: dict[float, float], plan: Plan) -> list[float]:
    steps: list[Result] = []
    while (rate := next_rate(steps, plan)) is not None:
        steps.append(step(rate, next(share for limit, share in server.items() if rate <= limit)))
    return [round(one.rate, 2) for one in steps]


@pytest.mark.parametrize(("server", "changes", "rates"), [
    ({3.0: 1.0, 99.0: 0.2}, {}, [1.0, 2.0, 4.0, 2.83, 3.36]),  # until goodput collapses, then refined
    ({3.0: 1.0, 5.0: 0.7, 99.0: 0.2}, {"refinements": 0}, [1.0, 2.0, 4.0, 8.0]),  # half good is not yet a collapse
    ({99.0: 1.0}, {"max_rate": 5.0}, [1.0, 2.0, 4.0, 5.0]),  # up to the highest that is allowed
    ({0.3: 1.0, 99.0: 0.2}, {}, [1.0, 0.5, 0.25, 0.35, 0.3]),  # the first is missed: down until one is held
    ({0.6: 1.0, 99.0: 0.9}, {"refinements": 0}, [1.0, 0.5]),  # missed narrowly: not given more
    ({99.0: 0.0}, {}, [1.0, 0.5, 0.25, 0.12]),  # who holds nothing is left alone in the end
])  # fmt: skip
def test_rates_follow_what_was_held(server: dict[float, float], changes: dict[str, Any], rates: list[float]) -> None:
    assert rates_until_done(server, replace(PLAN, **changes)) == rates


@pytest.mark.parametrize(
    ("shares", "expected"), [([1.0, 1.0, 0.5], 2.0), ([0.5, 1.0, 1.0], None), ([1.0, 0.5, 1.0], 1.0), ([], None)]
)
def test_capacity_is_the_last_rate_before_the_first_one_missed(shares: Sequence[float], expected: float | None) -> None:
    assert capacity([step(2.0**index, share) for index, share in enumerate(shares)], PLAN) == expected


async def swept(plan: Plan, folder: Path, **settings: Any) -> tuple[Sweep, bool, list[Result]]:
    """A sweep, whether it is whole, and its results as they came."""
    done: list[Result] = []
    async with serving(speak_at_once) as target:
        against = Settings(target.url, (), **settings)
        made, whole = await sweep(against, plan, folder=TraceFolder(folder), show=lambda _: None, done=done.append)
    return made, whole, done


SHORT = {"lengths": SpeechLengths(1.0, 0.1), "texts": Texts.ONE_SENTENCE}


async def test_a_sweep_is_read_back_as_it_was_measured(tmp_path: Path) -> None:
    plan = Plan(first_rate=20.0, max_rate=40.0, factor=2.0, duration_s=0.2, settle_s=0.1)
    limits = Limits(ttfb_s=5.0)
    done, whole, tried = await swept(plan, tmp_path / "sweep", arrivals=Arrivals.CONSTANT, limits=limits)
    assert [one.rate for one in tried] == [20.0, 40.0]
    assert whole
    assert [one.rate for one in done.steps] == [20.0, 40.0]
    assert [one.summary.sent for one in done.steps] == [4, 8]
    assert done.capacity_per_s == 40.0
    again = read_sweep(TraceFolder(tmp_path / "sweep"))
    assert [one.summary for one in again.steps] == [one.summary for one in done.steps]
    assert again.plan == plan


def test_a_folder_without_a_sweep_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoRunError, match=r"sweep\.json cannot be read"):
        read_sweep(TraceFolder(tmp_path))


def test_a_sweep_down_is_refused(tmp_path: Path) -> None:
    wrong = ["sweep", "--url", "http://127.0.0.1:9", "--from", "5", "--to", "2", "--out", str(tmp_path / "sweep")]
    result = CliRunner().invoke(app, wrong)
    assert result.exit_code == 2
    assert "--from 5 is above --to 2" in " ".join(result.output.split())
    assert not (tmp_path / "sweep").exists()


def test_a_low_rate_is_measured_for_longer() -> None:
    plan = Plan(rates=(1.0, 20.0), duration_s=10.0, min_requests=30)
    assert [plan.phases(rate)[0].duration_s for rate in plan.rates] == [30.0, 10.0]


@pytest.mark.parametrize(("most_s", "tried"), [(None, 3), (60.0, 3), (0.5, 1), (0.01, 1)])
async def test_a_sweep_ends_in_time_behind_its_first_rate(tmp_path: Path, most_s: float | None, tried: int) -> None:
    plan = Plan(rates=(20.0, 10.0, 5.0), duration_s=0.3, most_s=most_s)
    made, _, done = await swept(plan, tmp_path, **SHORT)
    assert (len(done), made.is_cut_short) == (tried, tried < 3)


async def test_each_rate_has_a_folder_and_a_row(tmp_path: Path) -> None:
    plan = Plan(rates=(40.0, 20.0), duration_s=0.2)
    made, whole, done = await swept(plan, tmp_path, **SHORT)
    assert whole
    assert [step.rate for step in done] == [40.0, 20.0]
    assert made.steps == tuple(reversed(done))
    assert [row["sent"] for row in json.loads((tmp_path / "sweep.json").read_text())["steps"]] == [
        step.summary.succeeded for step in made.steps
    ]
    assert (tmp_path / "00-rate-40" / "summary.json").exists()
    assert read_sweep(TraceFolder(tmp_path)).plan == plan
