"""`talkray voice design` and `lock` with a server."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import soundfile
from typer.testing import CliRunner

from serve_app.cli.main import cli
from serve_app.extensions.designs import design_commands
from tests.serve_app.cli.test_check_client import Server
from tests.serve_app.cli.test_say import only_player, write_program
from tests.serve_app.fake import VOICE_DESIGN, utterance

__all__ = ["only_player"]  # a fixture


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("TALKRAY_DATA", str(tmp_path))
    with Server(list(utterance(10)), info=VOICE_DESIGN) as server:
        yield server


def run(*arguments: str, status: int = 0, typed: str = "") -> str:
    result = CliRunner().invoke(cli, ["voice", *arguments], input=typed)
    assert result.exit_code == status, result.output
    return result.output + str(result.exception or "")


def designs(server: Server, folder: Path, *more: str, **options: object) -> str:
    asked = ["design", "A calm old man", "--url", server.url, "-o", str(folder), *more]
    return run(*asked, **options)  # type: ignore[arg-type]


def stored() -> str:
    return run("list")


def test_three_files_and_how_to_keep_one(server: Server, tmp_path: Path) -> None:
    told = designs(server, tmp_path, "--text", "So it is.", "--seed", "7")
    assert "Text of the candidates: So it is." in told
    assert [soundfile.info(tmp_path / f"design-{number}.wav").duration for number in (1, 2, 3)] == [0.8] * 3
    assert "talkray voice lock ID NAME" in told
    assert stored() == ""
    line = next(line for line in told.splitlines() if line.startswith("2  "))
    assert line.endswith("0.8 s  seed 8")
    assert run("lock", line.split()[1], "Grandpa", "--server", server.url).strip().endswith("Grandpa")
    assert "Grandpa" in stored()


def test_one_is_locked_at_once(server: Server, tmp_path: Path) -> None:
    assert designs(server, tmp_path, "--lock", "3", "--name", "ada").strip().endswith("ada")
    assert "ada" in stored()
    again = designs(server, tmp_path, "--lock", "3", "--name", "ada", status=1)
    assert "a voice is already named 'ada'" in again
    server.synthesizer.scripts = [utterance(2)]  # too short: it is left out
    assert "Use 1 to 2" in designs(server, tmp_path, "--lock", "3", "--name", "bea", status=1)


def test_choosing_by_ear(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only_player: Path) -> None:
    monkeypatch.setattr(design_commands, "_is_terminal", lambda: True)
    heard = tmp_path / "heard"
    write_program(only_player, f"import sys; open({str(heard)!r}, 'ab').write(sys.stdin.buffer.read())")
    designs(server, tmp_path, typed="2\ngrace\n")
    assert heard.read_bytes() == b"".join((tmp_path / f"design-{number}.wav").read_bytes() for number in (1, 2, 3))
    assert "grace" in stored()
    only_player.unlink()
    assert "cannot play the candidate: no audio player is installed" in designs(server, tmp_path, typed="0\n")


def test_what_goes_wrong_is_said(server: Server, tmp_path: Path) -> None:
    assert "--lock requires --name" in designs(server, tmp_path, "--lock", "1", status=1)
    assert "cannot be written" in designs(server, tmp_path / "nowhere", status=1)
    assert "'design_0' is unknown" in run("lock", "design_0", "ada", "--url", server.url, status=1)
    assert server.synthesizer.requests != []
