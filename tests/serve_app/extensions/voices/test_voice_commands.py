"""`talkray voice` on a folder."""

from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deployments.errors import InvalidRequest
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


def test_a_voice_from_its_first_to_last_day(tmp_path: Path, recording: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "store"
    voice_id = run(store, "add", "ada", recording, "--text", "Hiss.", "--owner", "lab").split()[0]
    run(store, "add", "ada", recording, "--style", "cheerful")
    listed = run(store, "list")
    assert "of lab  neutral 1.0 s, cheerful 1.0 s" in listed
    assert '"text": "Hiss."' in run(store, "show", voice_id)
    run(store, "rename", "ada", "gr/ace")
    file = tmp_path / "gr_ace.voice"
    monkeypatch.chdir(tmp_path)
    run(store, "export", "gr/ace")
    assert "deleted" in run(store, "remove", "gr/ace")
    assert run(store, "list") == ""
    other = tmp_path / "other"
    assert run(other, "import", str(file), "--owner", "ada").startswith(voice_id)
    assert "of ada" in run(other, "list")


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


def test_the_latest_respelling_of_a_word_counts(tmp_path: Path) -> None:
    lexicon, file = partial(run, command="lexicon"), str(tmp_path / "words.pls")
    for word, respelling in (("SQL", "sequel"), ("GIF", "jif"), ("SQL", "ess queue ell")):
        lexicon(tmp_path / "store", "add", word, respelling)
    assert lexicon(tmp_path / "store", "list") == "GIF\tjif\nSQL\tess queue ell\n"
    assert "2 words" in lexicon(tmp_path / "store", "export", "-o", file)
    for word in ("SQL", "URL"):
        lexicon(tmp_path / "other", "add", word, "earl")
    assert lexicon(tmp_path / "other", "import", file).startswith("the lexicon now contains 3 words")
    assert lexicon(tmp_path / "other", "remove", "GIF").startswith("the lexicon now contains 2 words")
    assert lexicon(tmp_path / "other", "list") == "SQL\tess queue ell\nURL\tearl\n"
    with pytest.raises(InvalidRequest, match="'GIF' is not in the lexicon"):
        lexicon(tmp_path / "other", "remove", "GIF")


def test_a_folder_of_recordings(tmp_path: Path) -> None:
    source = tmp_path / "recordings"
    source.mkdir()
    for number, name in enumerate(("ada.wav", "grace.WAV")):
        (source / name).write_bytes(wav(number))
    (source / "ada.txt").write_text("Hiss.\n")
    run(tmp_path / "store", "import", str(source), "--consent", "by letter")
    first, second = run(tmp_path / "store", "list").splitlines()
    assert "ada" in first
    assert "vector" not in first
    assert "speaker vector only" in second
    for name in ("ada", "grace"):
        assert "by letter" in run(tmp_path / "store", "show", name)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("show", "nobody"), "Voice 'nobody' is unknown"),
        (("import", "/nowhere"), "is not a voice file"),
        (("add", "a", "/nowhere"), "cannot be read"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, arguments: tuple[str, ...], told: str) -> None:
    with pytest.raises(Exception, match=told):
        run(tmp_path / "store", *arguments)
