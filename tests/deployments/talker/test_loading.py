import threading
from pathlib import Path

import pytest

from deployments.talker import loading
from deployments.talker.loading import StartClock, throttled, turn_on_gpu


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


def test_engines_of_one_gpu_start_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one would count the memory that another one takes as its own."""
    monkeypatch.setenv("TALKRAY_CACHE", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1")
    waits, order = threading.Event(), list[str]()

    def start() -> None:
        with turn_on_gpu(lambda stage: waits.set()):
            order.append("second")

    with turn_on_gpu(lambda stage: pytest.fail(stage)):
        second = threading.Thread(target=start)
        second.start()
        assert waits.wait(30)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-2")
        with turn_on_gpu(lambda stage: pytest.fail(stage)):  # another GPU waits for nobody
            order.append("first")
    second.join(30)
    assert order == ["first", "second"]
