from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deployments.config import TalkerConfig
from deployments.errors import EngineError
from deployments.talker.audio.audio_streams import AudioStreams
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
    for device, makes_audio, expected in (
        ("cuda", False, ["emptied"]), ("cuda", True, ["loaded", "emptied"]), ("cpu", True, ["emptied"]),
    ):  # fmt: skip
        done.clear()
        start = torch.device(device), StartClock(), startup.precompile_nothing
        audio = startup._load_audio(tmp_path, 16, *start, makes_audio=makes_audio)
        assert (done, audio.precision) == (expected, "float16" if "loaded" in done else "float32")
        assert audio._num_slots == 16


def test_an_engine_is_built_as_its_settings_say(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, asked, load_audio = list[int](), list[object](), startup._load_audio

    def load(*args: Any, **options: bool) -> AudioStreams:
        asked.append(options)
        audio = load_audio(*args, **options)
        audio.precision = "float16"
        return audio

    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(startup, "_load_audio", load)
    sizes = {"max_num_seqs": 3, "max_num_waiting": 5, "max_model_len": 500}
    engine = build_engine(checkpoint, TalkerConfig(device="cpu", threads=2, **sizes), makes_audio=False)
    assert asked == [{"makes_audio": False}]
    assert (threads, engine.info.codec_precision) == ([2], "float16")
    assert (engine.scheduler.max_num_seqs, engine.scheduler.max_num_waiting) == (3, 5)
    assert engine.scheduler.blocks.num_blocks == 3 * 32 + 1  # the last block of each need not be full


@pytest.mark.parametrize(("on_gpu", "makes_audio", "gpu_frames"), [
    (True, True, 2), (True, False, 0), (False, True, 0),  # a decoder is loaded for the first frame that is wanted
])  # fmt: skip
def test_a_start_warms_up_what_the_engine_will_do(
    on_gpu: bool, makes_audio: bool, gpu_frames: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, runner = list[Any](), SimpleNamespace(on_gpu=on_gpu)
    engine = SimpleNamespace(runner=runner, lanes=SimpleNamespace(runners=[]))
    device = SimpleNamespace(startup_lock=lambda report: nullcontext(), begin=lambda: "8 of 16 CPUs")
    monkeypatch.setattr(startup, "EngineDevice", lambda config: device)
    monkeypatch.setattr(startup, "build_engine", lambda *_, makes_audio, **__: done.append(makes_audio) or engine)
    monkeypatch.setattr(startup, "capture", lambda runners, progress: done.append(len(runners)))
    monkeypatch.setattr(startup, "_run_warm_up_request", lambda engine, *, on_gpu, gpu_frames: done.append(gpu_frames))
    stages: list[str] = []
    startup.load_engine(tmp_path, TalkerConfig(), StartClock(stages.append), makes_audio=makes_audio)
    assert done == [makes_audio, *([1] if on_gpu else []), gpu_frames]
    assert stages[:2] == ["starting the device", "on 8 of 16 CPUs"]
