import pytest

from deployments.rate import Rate


def test_events_per_second_over_the_window() -> None:
    rate = Rate(window_s=10)
    for tick in range(40):  # two a second
        rate.count(tick * 0.5)
    assert rate.per_second(19.5) == pytest.approx(2.0, rel=0.1)
    assert rate.per_second(24.5) == pytest.approx(1.0, rel=0.15)
    assert rate.per_second(100) == 0.0


def test_a_burst_at_the_start_is_no_enormous_rate() -> None:
    rate = Rate()
    for _ in range(5):
        rate.count(7.0)
    assert rate.per_second(7.0) == 5.0


def test_a_client_is_told_how_long_the_line_takes() -> None:
    rate = Rate(window_s=10)
    for tick in range(20):
        rate.count(tick * 0.5)
    assert rate.retry_after_s(7, 9.5) == pytest.approx(4.0, rel=0.1)


def test_what_a_client_is_told_has_bounds() -> None:
    slow, fast = Rate(), Rate()
    slow.count(0.0)
    for _ in range(100):
        fast.count(0.0)
    assert slow.retry_after_s(1000, 20.0) == 30.0
    assert fast.retry_after_s(0, 1.0) == 0.5
    assert Rate().retry_after_s(50, 0.0) == 1.0  # nothing is known
