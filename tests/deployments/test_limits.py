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

    def __init__(self) -> None:
        self.limit = StreamLimit(least=4)
        self.now_s = 0.0

    def speak(self, streams: int, *, late_share: float, seconds: int) -> None:
        for number in range(5 * streams * seconds):
            late = (number * 0.618) % 1.0 < late_share
            self.limit.count_chunk(late=late, streams=streams, now_s=self.now_s)
            self.now_s += 1 / (5 * streams)


LATE = {
    "little is late": ([(200, 0.05, 20)], None),
    "streams stay late": ([(100, 0.15, 4)], 90),
    "all are late": ([(100, 1.0, 4)], 50),
    "a change is given time to show": ([(100, 0.15, 30)], 90),
    "its streams are late": ([(100, 0.15, 30), (90, 0.15, 1)], 81),
    "a replica has died": ([(100, 0.0, 5), (100, 1.0, 1), (100, 0.0, 5)], None),
    "one dies at once": ([(100, 1.0, 1), (100, 0.0, 5)], None),
    "it has a floor": ([(4, 1.0, 2)] * 20, 4),
}


@pytest.mark.parametrize(("phases", "streams"), LATE.values(), ids=LATE)
def test_streams_that_stay_late_lower_it(phases: list[tuple[int, float, int]], streams: int | None) -> None:
    """Streams, the share of late chunks, and seconds of each phase."""
    pools = Pools()
    for num_streams, late_share, seconds in phases:
        pools.speak(num_streams, late_share=late_share, seconds=seconds)
    assert pools.limit.streams == streams
    most = 10_000 if streams is None else streams
    assert (pools.limit.has_room(most - 1), pools.limit.has_room(most)) == (True, streams is None)


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
