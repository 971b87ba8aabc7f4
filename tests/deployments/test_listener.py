import pytest

from deployments.listener import Listener


def test_a_stream_that_has_delivered_nothing_is_due_now() -> None:
    listener = Listener()
    assert not listener.has_begun
    assert listener.deadline_s(now_s=7.0) == 7.0
    assert listener.lead_s(now_s=7.0) == 0.0


def test_playback_begins_with_the_first_delivery() -> None:
    listener = Listener()
    assert listener.deliver(0.5, now_s=10.0) == 0.0  # the time before it is no stall
    assert listener.deadline_s(now_s=10.2) == 10.5
    assert listener.lead_s(now_s=10.2) == pytest.approx(0.3)
    assert listener.deliver(1.0, now_s=10.3) == 0.0
    assert listener.deadline_s(now_s=10.3) == 11.5
    assert listener.lead_s(now_s=13.0) == -1.5  # the player is dry


def test_stalls_add_up_and_are_never_made_up_for() -> None:
    listener = Listener()
    for now_s in (10.0, 11.5, 11.6, 15.0):
        listener.deliver(1.0, now_s=now_s)
    assert listener.stalled_s == pytest.approx(0.5 + 0.0 + 1.5)
    assert listener.audio_s == 4.0


def test_the_time_a_reader_takes_is_no_stall() -> None:
    listener = Listener()
    listener.postpone(5.0)  # nobody hears anything yet
    listener.deliver(0.5, now_s=10.0)
    listener.postpone(2.0)
    assert listener.deliver(0.5, now_s=12.4) == 0.0
