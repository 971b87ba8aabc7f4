from collections.abc import Callable
from pathlib import Path

import pytest

from deployments.config import TalkerConfig
from deployments.errors import EngineError
from deployments.talker.engine import startup
from deployments.talker.engine.startup import StartClock, build_engine, throttled


def test_phases_do_not_count_what_happens_within_them_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 4.0, 4.0, 5.0, 10.0])
    monkeypatch.setattr(startup.time, "perf_counter", lambda: next(now, 10.0))
    heard: list[str] = []
    clock = StartClock(heard.append)
    with clock.phase("outer"):
        with clock.phase("inner"):
            pass
        with clock.phase("inner"):
            pass
    assert clock.seconds == {"inner": 2.0, "outer": 3.0}
    assert heard == ["outer", "inner", "inner"]
    assert clock.summary() == "5.0 s in all: inner 2.0 s, outer 3.0 s"


def test_more_positions_than_the_checkpoint_has_are_an_error(tiny_checkpoint: Callable[[str], Path]) -> None:
    config = TalkerConfig(device="cpu", max_model_len=40_000)
    with pytest.raises(EngineError, match=r"talker.max_model_len is 40000, but \S+ has 32768 positions"):
        build_engine(tiny_checkpoint("CustomVoice"), config)


def test_progress_is_told_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(startup.time, "monotonic", lambda: now)
    heard: list[str] = []
    progress = throttled("compiling kernels", heard.append)
    for done in range(4):
        progress(done, 4)
        now += 0.5
    assert heard == ["compiling kernels 0/4", "compiling kernels 2/4"]
