import pytest

from deployments.limits import Rate, StreamLimit


def test_events_per_second_over_the_window() -> None:
    rate = Rate()
    for tick in range(40):  # two a second
        rate.count(tick * 0.5)
    assert rate.per_second(19.5) == pytest.approx(2.0, rel=0.1)
    assert rate.per_second(29.5) == pytest.approx(1.0, rel=0.15)  # of 20 s
    assert rate.per_second(100) == 0.0


def test_a_burst_at_the_start_is_no_enormous_rate() -> None:
    rate = Rate()
    for _ in range(5):
        rate.count(7.0)
    assert rate.per_second(7.0) == 5.0


def test_a_client_is_told_how_long_the_line_takes() -> None:
    rate = Rate()
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


class Pools:
    """Speak `streams` streams, five chunks a second each, of which a share is late."""

    def __init__(self, *, least: int = 4) -> None:
        self.limit = StreamLimit(least=least)
        self.now_s = 0.0

    def speak(self, streams: int, *, late_share: float, seconds: int) -> None:
        for number in range(5 * streams * seconds):
            late = (number * 0.618) % 1.0 < late_share
            self.limit.delivered(late=late, streams=streams, now_s=self.now_s)
            self.now_s += 1 / (5 * streams)


def test_there_is_no_limit_while_nothing_is_late() -> None:
    pools = Pools()
    pools.speak(200, late_share=0.05, seconds=20)
    assert pools.limit.streams is None
    assert pools.limit.has_room(10_000)


def test_streams_that_stay_late_lower_it() -> None:
    pools = Pools()
    pools.speak(100, late_share=0.15, seconds=4)
    assert pools.limit.streams == 90
    assert (pools.limit.has_room(89), pools.limit.has_room(90)) == (True, False)


def test_the_more_is_late_the_lower_it_falls() -> None:
    pools = Pools()
    pools.speak(100, late_share=1.0, seconds=4)
    assert pools.limit.streams == 50


def test_a_change_is_given_time_to_show() -> None:
    pools = Pools()
    pools.speak(100, late_share=0.15, seconds=30)  # all of them are still there
    assert pools.limit.streams == 90
    pools.speak(90, late_share=0.15, seconds=1)
    assert pools.limit.streams == 81


def test_a_single_bad_moment_lowers_nothing() -> None:
    pools = Pools()
    pools.speak(100, late_share=0.0, seconds=5)
    pools.speak(100, late_share=1.0, seconds=1)  # a replica has died
    pools.speak(100, late_share=0.0, seconds=5)
    assert pools.limit.streams is None


def test_it_rises_while_it_is_reached_and_nothing_is_late() -> None:
    pools = Pools()
    pools.limit.streams = 100.0
    pools.speak(80, late_share=0.0, seconds=10)  # nobody was refused
    assert pools.limit.streams == 100
    for _ in range(10):
        assert not pools.limit.has_room(int(pools.limit.streams))
        pools.speak(100, late_share=0.0, seconds=1)
    assert 140 < pools.limit.streams < 165


def test_it_holds_where_some_streams_are_late() -> None:
    pools = Pools()
    pools.limit.streams = 20.0
    for _ in range(10):
        pools.limit.has_room(20)
        pools.speak(20, late_share=0.08, seconds=1)
    assert pools.limit.streams == 20


def test_it_has_a_floor() -> None:
    pools = Pools(least=4)
    for _ in range(20):
        pools.speak(4, late_share=1.0, seconds=2)
    assert pools.limit.streams == 4
    assert (pools.limit.has_room(3), pools.limit.has_room(4)) == (True, False)
