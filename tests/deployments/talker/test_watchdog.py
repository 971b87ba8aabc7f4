import threading
from queue import SimpleQueue

import pytest

from deployments.talker.process import EXIT_CODE, Watchdog


def watch(device: str) -> tuple[Watchdog, SimpleQueue[int]]:
    given_up: SimpleQueue[int] = SimpleQueue()
    return Watchdog(device, lambda: None, give_up=given_up.put), given_up


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_step_that_waits_for_ever_is_given_up(device: str) -> None:
    watchdog, given_up = watch(device)
    with watchdog.running(), watchdog.step():
        assert given_up.get(timeout=10) == EXIT_CODE


def test_between_steps_nothing_is_expected() -> None:
    beats: SimpleQueue[int] = SimpleQueue()
    watchdog = Watchdog("cpu", lambda: beats.put(1), give_up=lambda code: pytest.fail("nothing hung"))
    with watchdog.running():
        for _ in range(8):
            beats.get(timeout=10)


def test_a_step_on_a_cpu_that_works_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.talker.process._LONGEST_IDLENESS_S", 0.3)
    beats: SimpleQueue[int] = SimpleQueue()
    watchdog = Watchdog("cpu", lambda: beats.put(1), give_up=lambda code: pytest.fail("it worked"))
    with watchdog.running(), watchdog.step():
        while beats.qsize() < 4:
            pass


def test_its_thread_ends_with_it() -> None:
    watchdog, _ = watch("cpu")
    with watchdog.running():
        pass
    assert "watchdog" not in {thread.name for thread in threading.enumerate()}
