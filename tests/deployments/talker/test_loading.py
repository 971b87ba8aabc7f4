import pytest

from deployments.talker import loading
from deployments.talker.loading import StartClock, throttled


def test_phases_do_not_count_what_happens_within_them_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 4.0, 4.0, 5.0, 10.0])
    monkeypatch.setattr(loading.time, "perf_counter", lambda: next(now, 10.0))
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


def test_progress_is_told_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(loading.time, "monotonic", lambda: now)
    heard: list[str] = []
    progress = throttled("compiling kernels", heard.append)
    progress(0, 3)
    progress(1, 3)
    now += 1.0
    progress(2, 3)
    assert heard == ["compiling kernels 0/3", "compiling kernels 2/3"]
