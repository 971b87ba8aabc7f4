import numpy as np
import pytest

from loadtest.arrivals import Phase, place
from loadtest.measure import Result
from loadtest.measured import MeasuredRate, learn_rows, row
from loadtest.metrics import Limits
from loadtest.service_model import QUANTILES
from loadtest.traces import Failure, NoRunError
from tests.loadtest.test_metrics import SPOKEN, failed

FIRST = {50: 20.0, 95: 40.0}


def rate(streams: float, *, frame_ms: float, scale: float = 1.0, is_held_out: bool = False) -> MeasuredRate:
    first = {percent: ms * scale for percent, ms in FIRST.items()}
    return MeasuredRate(1.0, 100, 6.0, first, streams, frame_ms, 1.0, is_held_out=is_held_out)


def test_between_two_rates_frames_grow_evenly_and_the_first_audio_by_the_same_factor() -> None:
    model = learn_rows([rate(1.0, frame_ms=3.0), rate(21.0, frame_ms=5.0, scale=4.0)])
    assert model.frame_s(np.array([11.0])) == pytest.approx([0.004])
    at_95 = round(0.95 * QUANTILES - 0.5)
    assert model.ttfb_s[[0, 10, 20], at_95] == pytest.approx([0.04, 0.08, 0.16], rel=0.02)


def test_a_row_that_is_held_out_teaches_nothing() -> None:
    rows = [rate(1.0, frame_ms=3.0), rate(9.0, frame_ms=5.0)]
    held = rate(5.0, frame_ms=90.0, scale=50.0, is_held_out=True)
    assert (learn_rows([*rows, held]).ttfb_s == learn_rows(rows).ttfb_s).all()
    with pytest.raises(NoRunError):
        learn_rows([held])


@pytest.mark.parametrize(("in_time", "refused", "carried"), [(1.0, 0, True), (0.97, 0, False), (1.0, 1, False)])
def test_a_rate_is_carried_in_time_and_without_a_refusal(in_time: float, refused: int, carried: bool) -> None:
    assert MeasuredRate(1.0, 100, 6.0, FIRST, 1.0, 3.0, in_time, refused).is_carried is carried


def test_a_row_is_what_a_run_showed_and_survives_json() -> None:
    run = Result("a", {}, place([Phase("load", 2.0, 10.0)]), Limits(), [SPOKEN] * 3, [], 3)
    made = row(run)
    assert (made.rate, made.requests) == (2.0, 3)
    assert SPOKEN.ttfa_s is not None
    assert made.first_audio_ms[95] == pytest.approx(SPOKEN.ttfa_s * 1000, abs=0.1)
    record = {"first_audio_ms": {str(percent): ms for percent, ms in made.first_audio_ms.items()}}
    fields = {name: getattr(made, name) for name in made.__slots__}
    assert MeasuredRate.from_json(fields | record) == made


def test_a_run_without_an_answer_is_no_row() -> None:
    run = Result("a", {}, place([Phase("load", 2.0, 10.0)]), Limits(), [failed(Failure.REFUSED, 429)], [], 1)
    with pytest.raises(NoRunError, match="cannot be used for plans"):
        row(run)
