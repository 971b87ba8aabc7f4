import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
from typer.testing import CliRunner, Result

from deployments.errors import InvalidRequest, StartError
from serve_app.cli.main import cli
from serve_app.extensions.voices import voice_commands
from tests.serve_app.extensions.voices.test_reference_doctor import RATE, SAID, demo, speech

RUNNER = CliRunner(env={"COLUMNS": "200"})


@pytest.fixture(autouse=True)
def no_recogniser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(voice_commands, "_RECOGNISER", ("no_such_package",))


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    soundfile.write(tmp_path / "nora.wav", speech(), RATE)
    return tmp_path / "nora.wav"


def check(*arguments: object) -> Result:
    return RUNNER.invoke(cli, ["voice", "check", *map(str, arguments)])


def test_a_good_recording(recording: Path) -> None:
    result = check(recording, "--text", SAID)
    assert result.exit_code == 0, result.output
    assert "The check found no flaws." in result.output
    assert "Appended 0.50 s of silence." in result.output


def test_a_problem_is_told_with_advice_and_fails(recording: Path) -> None:
    soundfile.write(recording, np.clip(speech() * 8, -1, 1), RATE)
    result = check(recording, "--text", SAID)
    assert result.exit_code == 1
    [line] = [line for line in result.output.splitlines() if line.startswith("problem")]
    assert "The recording is clipped" in line
    assert "Reduce the gain" in result.output
    assert check(recording, "--text", SAID, "--json").exit_code == 1


def test_a_note_does_not_fail(recording: Path) -> None:
    result, as_json = check(recording), check(recording, "--json")
    assert (result.exit_code, as_json.exit_code) == (0, 0)
    assert "The transcript is missing." in result.output
    told = json.loads(as_json.output)
    assert told["file"] == str(recording)
    assert [flaw["code"] for flaw in told["flaws"]] == ["no_transcript"]
    assert told["measures"]["sample_rate"] == RATE


@pytest.mark.parametrize("ending", ["flac", "WAV"])
def test_the_prepared_recording(recording: Path, tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"prepared.{ending}"
    told = json.loads(check(recording, "--json", "-o", file).output)
    audio, rate = soundfile.read(file)
    assert rate == RATE
    assert audio.size / rate == pytest.approx(told["stored_seconds"], abs=1e-4)
    assert not audio[-RATE // 2 :].any()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(("-o", "prepared.mp3"), ".flac or .wav"), (("--language", "klingon"), "--language klingon")],
)
def test_another_ending_or_an_unknown_language(recording: Path, arguments: tuple[str, ...], told: str) -> None:
    result = check(recording, *arguments)
    assert isinstance(result.exception, InvalidRequest)
    assert told in str(result.exception)


def test_what_is_no_recording_is_refused_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("no sound", encoding="utf-8")
    result = check(file)
    assert isinstance(result.exception, InvalidRequest)
    assert str(result.exception) == f"{file} cannot be used: the file is not in a supported audio format."


def test_words_are_compared_where_a_recogniser_is_installed(recording: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=0, stdout='{"text": "[red]Good evening", "errors": 9, "words": 9}')

    monkeypatch.setattr(voice_commands, "_RECOGNISER", ("json",))
    monkeypatch.setattr(subprocess, "run", run)
    result = check(recording, "--text", SAID, "--language", "de-AT")
    assert result.exit_code == 0, result.output
    assert "A recogniser hears 9 of 9 words differently: [red]Good evening" in result.output
    check(recording)
    assert commands[0][-4:] == [f"--transcript={SAID}", "--language=de-AT", "--", str(recording)]
    assert commands[1][-4:] == ["--transcript=", "--language=", "--", str(recording)]


def test_a_recogniser_that_fails_is_an_error(recording: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = SimpleNamespace(returncode=1, stdout="", stderr="no room for the model")
    monkeypatch.setattr(voice_commands, "_RECOGNISER", ("json",))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    result = check(recording)
    assert isinstance(result.exception, StartError)
    assert "no room for the model" in str(result.exception)


def test_a_recogniser_hears_whether_it_is_the_transcript(tmp_path: Path) -> None:
    """The real one, in a process of its own as the command has it; it guesses the language."""
    soundfile.write(tmp_path / "iris.wav", demo()[9 * RATE : round(12.75 * RATE)], RATE)
    heard = voice_commands._heard(tmp_path / "iris.wav", "This is Iris, please leave a message after the tone.", None)
    assert "please leave a message" in heard.text.lower()
    assert heard.words == 10
    assert heard.errors <= 5  # the voice is small, and so is the recogniser
