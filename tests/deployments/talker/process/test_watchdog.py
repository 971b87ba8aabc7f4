import socket
import threading
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.talker.engine.engine import Engine
from deployments.talker.process import channel, engine_process
from deployments.talker.process.engine_process import EXIT_CODE, EngineProcess, InputPreparation, Watchdog


def watch(device: str) -> tuple[Watchdog, SimpleQueue[int]]:
    given_up: SimpleQueue[int] = SimpleQueue()
    return Watchdog(device, lambda: None, give_up=given_up.put), given_up


def test_a_step_that_waits_for_ever_is_given_up() -> None:
    watchdog, given_up = watch("cpu")
    with watchdog.running(), watchdog.step():
        assert given_up.get(timeout=10) == EXIT_CODE


@pytest.mark.parametrize(("device", "step_s", "idle_s", "codes"), [
    ("cuda", 1.6, 0.0, [EXIT_CODE]), ("cpu", 1.6, 0.0, []), ("cpu", 1.6, 1.3, [EXIT_CODE]),
    ("cpu", 61.0, 0.0, [EXIT_CODE]),
])  # fmt: skip
def test_a_step_that_works_has_its_time_too(device: str, step_s: float, idle_s: float, codes: list[int]) -> None:
    watchdog, given_up = watch(device)
    watchdog._judge(step_s, idle_s)
    assert [given_up.get() for _ in range(given_up.qsize())] == codes


def test_between_steps_nothing_is_expected() -> None:
    beats: SimpleQueue[int] = SimpleQueue()
    watchdog = Watchdog("cpu", lambda: beats.put(1), give_up=lambda code: pytest.fail("nothing hung"))
    with watchdog.running():
        for _ in range(4):
            beats.get(timeout=10)


def test_a_step_on_a_cpu_that_works_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "_LONGEST_IDLENESS_S", 0.3)
    beats: SimpleQueue[int] = SimpleQueue()
    watchdog = Watchdog("cpu", lambda: beats.put(1), give_up=lambda code: pytest.fail("it worked"))
    with watchdog.running(), watchdog.step():
        while beats.qsize() < 4:
            pass


def test_many_commands_at_once_may_take_longer_than_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engine_process._LONGEST_STEP_S, "cpu", 1.0)
    beats: SimpleQueue[int] = SimpleQueue()
    watchdog = Watchdog("cpu", lambda: beats.put(1), give_up=lambda code: pytest.fail("nothing hung"))
    read: list[channel.Command] = []

    def execute(process: EngineProcess, engine: Engine, command: channel.Command) -> None:
        beats.get(timeout=10)
        read.append(command)

    monkeypatch.setattr(EngineProcess, "_execute", execute)
    ours, theirs = socket.socketpair()
    with ours, theirs, watchdog.running():
        engine: Any = SimpleNamespace(is_idle=False, poll_timeout_s=0.0, step=lambda meanwhile: pytest.fail("a step"))
        commands = [channel.Abort(number) for number in range(8)]
        ours.sendall(b"".join(map(channel.encode, commands)))
        process = EngineProcess(theirs)
        process._preparation = InputPreparation(engine)
        with pytest.raises(pytest.fail.Exception, match="a step"):
            process._serve_once(engine, watchdog)
    assert read == commands


def test_work_within_a_step_leaves_the_rest_of_it_watched() -> None:
    watchdog, given_up = watch("cuda")
    with watchdog.running(), watchdog.step():
        with watchdog.step():
            pass
        assert given_up.get(timeout=10) == EXIT_CODE


def test_its_thread_ends_with_it() -> None:
    watchdog, _ = watch("cpu")
    with watchdog.running():
        pass
    assert "watchdog" not in {thread.name for thread in threading.enumerate()}
