"""Reading `Server-Timing`."""

import pytest

from loadtest.recording import TO_CLIENT, TO_SERVER, parse, stages

HEADER = 'received;desc="100.25", request;dur=1.5, codes;dur=3, from-talker;dur=0.5'


def test_stages_keep_their_order() -> None:
    timing = parse(HEADER)
    assert timing.received_s == 100.25
    assert list(timing.stages_s.items()) == [("request", 0.0015), ("codes", 0.003), ("from-talker", 0.0005)]


def test_with_one_clock_all_stages_make_up_the_time_to_the_first_byte() -> None:
    found = stages(HEADER, sent_at_s=100.249, ttfb_s=0.01)
    assert list(found) == [TO_SERVER, "request", "codes", "from-talker", TO_CLIENT]
    assert found[TO_SERVER] == pytest.approx(0.001)
    assert sum(found.values()) == pytest.approx(0.01)


@pytest.mark.parametrize("sent_at_s", [100.26, 90.0])
def test_with_clocks_that_disagree_only_the_server_speaks(sent_at_s: float) -> None:
    assert list(stages(HEADER, sent_at_s=sent_at_s, ttfb_s=0.01)) == ["request", "codes", "from-talker"]


@pytest.mark.parametrize("header", ["", "cache", "cache;desc=hit", "db;dur=fast", ";;,,=", 'total;dur="'])
def test_what_says_nothing_is_left_out(header: str) -> None:
    assert parse(header).stages_s == {}


def test_other_servers_are_understood() -> None:
    header = 'cache;desc="Cache, Read";dur=23.2,db;dur=53, app;dur=47.2;desc=x'
    assert parse(header).stages_s == pytest.approx({"cache": 0.0232, "db": 0.053, "app": 0.0472})
