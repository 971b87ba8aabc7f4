"""`talkray voice` on a folder."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from serve_app.cli.main import cli
from tests.serve_app.extensions.voices.speakers import spoken, wav


def run(store: Path, *arguments: str, command: str = "voice") -> str:
    result = CliRunner().invoke(cli, [command, *arguments, "--store", str(store)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def recording(tmp_path: Path) -> str:
    file = tmp_path / "a.wav"
    file.write_bytes(wav())
    return str(file)


def test_a_recording_is_prepared_and_told_what_to_record_better(tmp_path: Path) -> None:
    source = tmp_path / "recordings"
    source.mkdir()
    (source / "ada.wav").write_bytes(spoken())
    told = run(tmp_path / "store", "add", "ada", str(source / "ada.wav"))
    assert "Appended 0.50 s of silence" in told
    assert "The transcript is missing." in told
    told = run(tmp_path / "store", "add", "grace", str(source / "ada.wav"), "--prepare", "none")
    assert "neutral 6.0 s" in told
    assert "Appended" not in told
    assert "Appended" in run(tmp_path / "other", "import", str(source))
    assert "neutral 6.0 s" in run(tmp_path / "third", "import", str(source), "--prepare", "none")
    file = tmp_path / "ada.voice"
    run(tmp_path / "store", "export", "ada", "-o", str(file))
    with pytest.raises(Exception, match="--prepare applies only to folders"):
        run(tmp_path / "third", "import", str(file), "--prepare", "none")


def test_an_export_has_the_name_of_its_voice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.wav").write_bytes(spoken())
    told = run(tmp_path / "store", "add", "Ada/B", str(tmp_path / "a.wav"))
    (voice_id,) = re.findall(r"voice_\w+", told)
    monkeypatch.chdir(tmp_path)
    assert run(tmp_path / "store", "export", voice_id).startswith("wrote Ada_B.voice (")
    assert Path("Ada_B.voice").read_bytes()[:2] == b"PK"
