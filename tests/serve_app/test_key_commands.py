from pathlib import Path

import pytest
from typer.testing import CliRunner

from serve_app import cli as module
from serve_app.auth import KeyFileError, Keys
from serve_app.cli import cli
from serve_app.config import AppConfig
from serve_app.local_server import Address
from serve_app.refusals import Unauthorized

RUNNER = CliRunner()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TALKRAY_KEYS_FILE", str(tmp_path / "keys.json"))
    return tmp_path / "keys.json"


def run(*arguments: str) -> str:
    result = RUNNER.invoke(cli, ["key", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_create_list_revoke(file: Path) -> None:
    key = run("create", "ada", "--max-streams", "2").strip()
    other = run("create", "bob", "--requests-per-minute", "60").strip()
    Keys(file).caller(key)
    lines = run("list").splitlines()
    assert [line.split()[:6] for line in lines] == [
        [key.split("-")[1], "ada", "any", "requests/min", "2", "streams"],
        [other.split("-")[1], "bob", "60", "requests/min", "any", "streams"],
    ]
    assert key not in run("list")
    assert "revoked" in run("revoke", "ada")
    assert ["revoked" in line for line in run("list").splitlines()] == [True, False]
    with pytest.raises(Unauthorized):
        Keys(file).caller(key)


def test_a_missing_file_is_an_error(file: Path) -> None:
    with pytest.raises(KeyFileError, match="talkray key create"):
        RUNNER.invoke(cli, ["key", "list"], catch_exceptions=False)


def test_serve_takes_a_key_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("create", "ada")
    started: list[tuple[AppConfig, Address]] = []

    class Stop(Exception):
        pass

    def running(config: AppConfig, address: Address, report: object) -> None:
        started.append((config, address))
        raise Stop

    monkeypatch.setattr(module, "running", running)
    monkeypatch.chdir(file.parent)
    with pytest.raises(Stop):
        RUNNER.invoke(cli, ["serve", "--model", "x", "--host", "0.0.0.0", "--keys", file.name], catch_exceptions=False)
    [(config, address)] = started
    assert config.api.access.keys_file == file
    assert address == Address("0.0.0.0", 8000)


def test_serve_checks_the_key_file_first(file: Path) -> None:
    with pytest.raises(KeyFileError):
        RUNNER.invoke(cli, ["serve", "--model", "x", "--keys", str(file)], catch_exceptions=False)
