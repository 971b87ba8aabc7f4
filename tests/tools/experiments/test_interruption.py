"""Here, since everything in tests/faults needs a cluster, and this is pure."""

from dataclasses import replace

import pytest

from loadtest.traces import Trace
from tests.loadtest.test_metrics import RATE, SPOKEN
from tools.experiments.gpu.several import interruption


def heard(*arrivals_s: float) -> Trace:
    """A stream of 0.1 s of audio at each of these times."""
    chunks = tuple((at_s, 2 * RATE // 10 * number) for number, at_s in enumerate(arrivals_s, start=1))
    return replace(SPOKEN, chunks=chunks)


def test_the_longest_time_without_audio_counts_from_the_moment() -> None:
    found = interruption(heard(1.0, 1.05, 1.1, 1.15, 1.55, 1.6), 1.2)
    assert found is not None
    assert (found.delivered_s, found.buffered_s) == pytest.approx((0.4, 0.2))
    assert found.gap_s == found.next_s == pytest.approx(0.35 - 0.05)
    assert found.heard_s == pytest.approx(0.15)


def test_audio_that_was_on_its_way_hides_no_gap() -> None:
    found = interruption(heard(1.0, 1.05, 1.1, 1.15, 1.2, 1.6, 1.65), 1.16)
    assert found is not None
    assert found.gap_s == pytest.approx(0.4 - 0.05)
    assert found.next_s == 0


def test_what_was_ahead_of_its_listener_is_not_heard() -> None:
    found = interruption(heard(1.0, 1.01, 1.02, 1.03, 1.04, 1.3, 1.31), 1.05)
    assert found is not None
    assert found.heard_s == 0


@pytest.mark.parametrize("moment_s", [0.9, 1.7])
def test_streams_that_had_not_begun_or_were_complete_are_left_out(moment_s: float) -> None:
    assert interruption(heard(1.0, 1.6), moment_s) is None
