import logging
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from talkray_tools import verify
from talkray_tools.random_checkpoint import Options, write_checkpoint
from talkray_tools.released import SHAPES
from talkray_tools.verify import find_official, main


@pytest.fixture(autouse=True)
def without_official_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "find_official", lambda named: None)


def write_tiny(directory: Path, name: str) -> str:
    write_checkpoint(directory, SHAPES[name], Options(dtype=torch.float32))
    return str(directory)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == verify.__name__]


def test_a_checkpoint_that_speaks_passes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    wav = tmp_path / "speech.wav"
    assert (
        main(["--threads", "1", "--model", write_tiny(tmp_path / "model", "tiny-VoiceDesign"), "--wav", str(wav)]) == 0
    )
    verdicts = [line.split()[0] for line in lines(caplog) if not line.startswith(("wrote", "every code through"))]
    assert verdicts == ["PASS"] * 9 + ["SKIP"]
    assert any("every code of the codec is finite: the largest activation is" in line for line in lines(caplog))
    assert soundfile.info(wav).samplerate == 24000


def test_speech_that_never_ends_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(verify, "TEXT", "Hm.")
    monkeypatch.setattr("deployments.talker.frame_step.MIN_NEW_TOKENS", 10**6)
    assert main(["--threads", "1", "--model", write_tiny(tmp_path / "model", "tiny-VoiceDesign")]) == 1
    assert sum(line.startswith("FAIL speech ends") for line in lines(caplog)) == 3


def test_a_base_checkpoint_asks_for_a_recording(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert main(["--threads", "1", "--model", write_tiny(tmp_path / "model", "tiny-Base")]) == 0
    assert "--reference" in lines(caplog)[-1]


def test_a_base_checkpoint_clones_a_recording(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    recording = tmp_path / "recording.wav"
    soundfile.write(recording, np.random.RandomState(0).uniform(-0.1, 0.1, 24000), 24000)
    model = write_tiny(tmp_path / "model", "tiny-Base")
    assert main(["--threads", "1", "--model", model, "--reference", str(recording), "--reference-text", "Hm."]) == 0
    assert sum(line.startswith("PASS speech ends") for line in lines(caplog)) == 3


def test_a_recording_at_another_rate_is_refused(tmp_path: Path) -> None:
    recording = tmp_path / "recording.wav"
    soundfile.write(recording, np.zeros(8000), 8000)
    with pytest.raises(SystemExit, match="8000 Hz, the checkpoint works at 24000 Hz"):
        main(["--threads", "1", "--model", write_tiny(tmp_path / "model", "tiny-Base"), "--reference", str(recording)])


def test_a_missing_checkpoint_is_a_failure_in_words(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert main(["--threads", "1", "--model", str(tmp_path / "nothing")]) == 1
    assert lines(caplog) == [f"FAIL there is no checkpoint directory {tmp_path / 'nothing'}"]


def test_an_interpreter_that_is_not_there_has_no_official_package(tmp_path: Path) -> None:
    assert find_official(tmp_path / "python") is None
