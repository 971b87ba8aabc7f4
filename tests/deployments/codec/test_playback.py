import pytest

from deployments.codec.playback import PlaybackClock


def test_a_stream_that_has_delivered_nothing_is_due_now() -> None:
    clock = PlaybackClock()
    assert clock.deadline_s(now_s=7.0) == 7.0
    assert clock.lead_s(now_s=7.0) == 0.0


def test_playback_begins_with_the_first_delivery() -> None:
    clock = PlaybackClock()
    clock.deliver(0.5, now_s=10.0)
    assert clock.deadline_s(now_s=10.2) == 10.5
    assert clock.lead_s(now_s=10.2) == pytest.approx(0.3)
    clock.deliver(1.0, now_s=10.3)
    assert clock.deadline_s(now_s=10.3) == 11.5


def test_the_lead_is_negative_once_the_player_has_run_dry() -> None:
    clock = PlaybackClock()
    clock.deliver(0.5, now_s=10.0)
    assert clock.lead_s(now_s=12.0) == pytest.approx(-1.5)


def test_the_clock_does_not_start_again_after_an_underrun() -> None:
    clock = PlaybackClock()
    clock.deliver(0.5, now_s=10.0)
    clock.deliver(0.5, now_s=20.0)
    assert clock.deadline_s(now_s=20.0) == 11.0
