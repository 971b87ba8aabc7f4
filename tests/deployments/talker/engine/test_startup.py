from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

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


def test_a_talker_that_makes_no_audio_has_no_codec_on_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator gives back what loading the talker has freed, or it would be missing for keys and values."""
    done = list[str]()

    class Slots:
        precision = "float16"

        @classmethod
        def load(cls, *_: object, **__: object) -> "Slots":
            done.append("loaded")
            return cls()

    chosen = SimpleNamespace(slots=Slots, backend=None)
    monkeypatch.setattr(startup, "choose_decoders", lambda config, device: chosen)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("emptied"))
    monkeypatch.setattr(startup.SpeechTokenizerConfig, "load", lambda folder: SimpleNamespace(frame_s=0.08))
    for makes_audio, expected in ((False, ["emptied"]), (True, ["loaded", "emptied"])):
        done.clear()
        start = torch.device("cuda"), StartClock(), startup.prepare_nothing
        startup._load_audio(tmp_path, 16, *start, makes_audio=makes_audio)
        assert done == expected
