from dataclasses import replace

import numpy as np
import pytest

from loadtest.metrics import Limits
from loadtest.timeline import in_flight, time_to_recover, timeline
from loadtest.traces import Failure, Trace
from tests.loadtest.test_metrics import SPOKEN, failed

LIMITS = Limits(ttfb_s=0.5, stall_s=1.0)


def due(planned_s: float, ttfb_s: float = 0.1) -> Trace:
    return replace(SPOKEN, planned_s=planned_s, sent_s=planned_s, first_byte_s=planned_s + ttfb_s)


def test_windows_count_requests_where_they_were_due() -> None:
    refused = replace(failed(Failure.REFUSED, 429), planned_s=2.5)
    broken = replace(failed(Failure.HTTP, 500), planned_s=3.0)
    windows = timeline([due(0.0), due(1.9), due(2.0, 0.9), refused, broken], end_s=4.0, width_s=2.0, limits=LIMITS)
    assert windows.starts_s.tolist() == [0.0, 2.0]
    assert windows.offered_per_s.tolist() == [1.0, 1.5]
    assert windows.good_per_s.tolist() == [1.0, 0.0]
    assert windows.refused_per_s.tolist() == [0.0, 0.5]
    assert windows.failed_per_s.tolist() == [0.0, 0.5]
    assert windows.ttfb_p95_s == pytest.approx([0.1, 0.9])


def test_a_window_without_answers_has_no_percentile() -> None:
    windows = timeline([due(3.0)], end_s=4.0, width_s=2.0, limits=LIMITS)
    assert np.isnan(windows.ttfb_p95_s).tolist() == [True, False]


@pytest.mark.parametrize(
    ("late", "recovered_s"),
    [([], 0.0), ([11], 5.0), ([11, 17], 10.0), ([29], None)],
)
def test_recovery_is_the_end_of_the_last_bad_window(late: list[int], recovered_s: float | None) -> None:
    traces = [due(float(second), 0.9 if second in late else 0.1) for second in range(10, 30)]
    assert time_to_recover(traces, 10.0, end_s=30.0, window_s=5.0, limits=LIMITS) == recovered_s


def test_bad_to_the_end_is_no_recovery_whatever_the_windows() -> None:
    traces = [due(10.0 + index / 7, 0.9) for index in range(420)]
    assert time_to_recover(traces, 10.0, end_s=70.0, window_s=20 / 3, limits=LIMITS) is None


def test_a_time_without_requests_is_not_bad() -> None:
    assert time_to_recover([], 0.0, end_s=30.0, window_s=5.0, limits=LIMITS) == 0.0


def test_requests_are_in_flight_from_send_to_end() -> None:
    first = replace(SPOKEN, sent_s=0.0, finished_s=2.0)
    second = replace(SPOKEN, sent_s=1.0, finished_s=3.0)
    times, counts = in_flight([first, second])
    assert times.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert counts.tolist() == [1, 2, 1, 0]
