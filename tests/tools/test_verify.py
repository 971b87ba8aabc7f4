import argparse
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from deployments.codec.decoder import PCM_SCALE
from deployments.protocol import Reference, Sampling
from deployments.talker.engine.engine import Engine
from talkray_tools import verify
from talkray_tools.subject import Subject
from talkray_tools.unfolded_codec import DecoderNetwork
from talkray_tools.verify import find_official, main

Checkpoints = Callable[[str], Path]
NOISE = np.random.RandomState(0).uniform(-0.1, 0.1, 24000).astype(np.float32)
SHORT = ("--threads", "1", "--frames", "6", "--device", "cpu")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the official package, and with few of the tiny codec's codes."""
    monkeypatch.setattr(verify, "find_official", lambda named: None)
    monkeypatch.setattr(verify, "TEXT", "Hm.")
    monkeypatch.setattr(verify, "FOLLOWED_TEXTS", ("This goes on a little.",))
    monkeypatch.setattr(verify, "_FOLLOWED_FRAMES", 30)
    codes = torch.zeros(1, 4, 16, dtype=torch.long)
    monkeypatch.setattr("talkray_tools.unfolded_codec.every_code", lambda config: codes)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    soundfile.write(tmp_path / "recording.wav", NOISE, 24000)
    return tmp_path / "recording.wav"


def run(model: Path, out: Path, *options: object) -> int:
    return main([*SHORT, "--model", str(model), "--out", str(out), *map(str, options)])


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == verify.__name__]


def report(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "verify.json").read_text())
    return read


def failed(folder: Path) -> list[str]:
    return [check["name"] for check in report(folder)["checks"] if check["passed"] is False]


def test_a_sound_checkpoint_passes(tiny_checkpoint: Checkpoints, out: Path, said: pytest.LogCaptureFixture) -> None:
    assert run(tiny_checkpoint("VoiceDesign"), out) == 0, failed(out)
    checks = {check["name"]: check for check in report(out)["checks"]}
    assert all(checks[f"speech {what}, seed {seed}"]["passed"] for what in ("ends", "is heard") for seed in (1, 2, 3))
    for name in ("it loads", "codes are the same alone and with others", "greedy codes are those of float32"):
        assert checks[name]["passed"], name
    assert checks["the waveform is that of float32"]["values"]["snr_db"] > 35
    assert checks["first audio"]["values"]["first_audio_ms"] > 0
    assert checks["memory"]["values"]["host_gib"] > 0.1
    assert checks["a head follows the text"]["passed"] is None
    assert "estimates" in checks["a head follows the text"]["detail"]
    assert "pip install" in checks["greedy codes are the official package's"]["detail"]
    assert lines(said)[-1].startswith("PASS: ")
    assert soundfile.info(out / "speech-1.wav").samplerate == 24000


def test_speech_that_never_ends_fails(
    tiny_checkpoint: Checkpoints, out: Path, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.talker.networks.unfused_networks.MIN_NEW_TOKENS", 10**6)
    assert run(tiny_checkpoint("VoiceDesign"), out) == 1
    assert [name for name in failed(out) if name.startswith("speech ends")] == [
        f"speech ends, seed {seed}" for seed in (1, 2, 3)
    ]
    assert lines(said)[-1].startswith("FAIL: speech ends, seed 1; ")
    assert str(out / "verify.json") in lines(said)[-1]


def test_serving_needs_two_paths(tiny_checkpoint: Checkpoints, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes and audio that only the served path gets wrong are noticed."""
    original_step, original_audio = Engine.step, DecoderNetwork.forward

    def wrong(self: Engine) -> object:
        output = original_step(self)
        if self.runner.networks.name != "plain":  # as verify judges
            for _, chunk in output.chunks:
                chunk.codes[:, 3] = (chunk.codes[:, 3] + 700) % 2048
        return output

    def distorted(self: DecoderNetwork, codes: torch.Tensor) -> torch.Tensor:
        return original_audio(self, codes).roll(3, dims=-1)

    monkeypatch.setattr(Engine, "step", wrong)
    monkeypatch.setattr(DecoderNetwork, "forward", distorted)
    assert run(tiny_checkpoint("VoiceDesign"), out) == 1
    assert {"greedy codes are those of float32", "the waveform is that of float32"} <= set(failed(out))


def test_base_asks_for_a_recording(tiny_checkpoint: Checkpoints, out: Path, said: pytest.LogCaptureFixture) -> None:
    assert run(tiny_checkpoint("Base"), out) == 0
    assert any("--reference" in line for line in lines(said))


def test_a_base_checkpoint_clones_a_recording(tiny_checkpoint: Checkpoints, out: Path, recording: Path) -> None:
    run(tiny_checkpoint("Base"), out, "--reference", recording, "--reference-text", "Hm.")
    checks = {check["name"]: check["passed"] for check in report(out)["checks"]}
    assert checks["greedy codes are those of float32"]
    assert checks["the waveform is that of float32"]
    unclear = {f"speech ends, seed {seed}" for seed in (1, 2, 3)}  # random weights end where they like
    assert {name for name, passed in checks.items() if not passed and passed is not None} <= unclear


@pytest.mark.parametrize("by_talker", [False, True])
def test_speech_that_goes_on_from_a_recording_is_judged_so(tiny_checkpoint: Checkpoints, by_talker: bool) -> None:
    """As the codec pool makes it, and as a talker's device does."""
    directory = tiny_checkpoint("Base")
    options = argparse.Namespace(device="cpu", threads=1, deterministic=False)
    subject = Subject(directory, Reference(NOISE, "Hm."), options)
    subject.on_gpu = by_talker
    request = subject.request("Hm.", Sampling(do_sample=False, subtalker_dosample=False, max_new_tokens=7))
    [spoken] = subject.speak(request)
    exact, heard = verify.Exact(directory, threads=1), spoken.pcm.astype(np.float32) / PCM_SCALE
    assert exact.check_audio("served", request, spoken.codes, heard, least_db=35).passed
    official = np.concatenate([[0.5], heard]).astype(np.float32)
    assert exact.check_audio("official", request, spoken.codes, official, least_db=35).passed
    assert not exact.check_audio("late", request, spoken.codes, heard[1:], least_db=35).passed


def test_a_recording_at_another_rate_is_refused(tiny_checkpoint: Checkpoints, out: Path, recording: Path) -> None:
    soundfile.write(recording, np.zeros(8000), 8000)
    with pytest.raises(SystemExit, match="Resample it to the checkpoint's 24000 Hz"):
        run(tiny_checkpoint("Base"), out, "--reference", recording)


def test_a_missing_checkpoint_is_a_failure_in_words(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    assert run(tmp_path / "nothing", tmp_path / "out") == 1
    assert f"checkpoint directory {tmp_path / 'nothing'} does not exist" in lines(said)[0]


def test_an_interpreter_that_is_not_there_has_no_official_package(tmp_path: Path) -> None:
    assert find_official(tmp_path / "python") is None
