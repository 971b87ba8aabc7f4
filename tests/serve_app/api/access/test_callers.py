import pytest

from deployments.errors import Overloaded
from serve_app.api.access import callers
from tests.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(callers, "time", clock)
    return clock


def test_requests_come_back_steadily_and_not_beyond_a_minute(clock: Clock) -> None:
    meter = callers.Meter("key", "This API key")
    meter.requests_per_minute = 3
    for _ in range(3):
        meter.count_request()
    with pytest.raises(Overloaded, match="This API key may make 3 requests per minute") as refused:
        meter.count_request()
    assert refused.value.retry_after_s == pytest.approx(20)
    for after_s, requests in ((20, 1), (3600, 3)):
        clock.now_s += after_s
        for _ in range(requests):
            meter.count_request()
        with pytest.raises(Overloaded):
            meter.count_request()


@pytest.mark.usefixtures("clock")
def test_less_than_one_request_a_minute() -> None:
    meter = callers.Meter("client", "This client")
    meter.requests_per_minute = 0.5
    meter.count_request()
    with pytest.raises(Overloaded, match=r"0\.5 requests") as refused:
        meter.count_request()
    assert refused.value.retry_after_s == pytest.approx(120)


def test_streams_at_once_of_a_meter() -> None:
    meter = callers.Meter("key", "This API key")
    meter.max_streams = 2
    with meter.stream(), meter.stream(), pytest.raises(Overloaded, match="2 streams open at once"), meter.stream():
        pass
    with pytest.raises(ValueError), meter.stream():  # noqa: PT011
        raise ValueError
    with meter.stream(), meter.stream():
        pass


def test_limits_change_and_what_was_counted_stays() -> None:
    meters = callers.Meters("key", "This API key")
    with meters.of("ada", None, max_streams=1).stream():
        with pytest.raises(Overloaded), meters.of("ada", None, max_streams=1).stream():
            pass
        with meters.of("bob", None, max_streams=1).stream():
            pass
        with meters.of("ada", None, max_streams=2).stream():
            pass


def test_no_number_of_addresses_takes_all_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "_MOST_METERS", 2)
    meters = callers.Meters("client", "This client")
    first = meters.of("first", None, max_streams=1)
    with first.stream():
        second = meters.of("second", None, max_streams=1)
        meters.of("third", None, max_streams=1)
        assert meters.of("first", None, max_streams=1) is first  # who has a stream stays
        assert meters.of("second", None, max_streams=1) is not second
