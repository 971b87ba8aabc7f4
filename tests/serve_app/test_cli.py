from pathlib import Path

import pytest
from typer.testing import CliRunner

from deployments.errors import TalkrayError
from serve_app import cli as module
from serve_app.cli import cli, main
from serve_app.config import AppConfig, one_gpu
from serve_app.doctor import Finding
from serve_app.ray_settings import TUNED

RUNNER = CliRunner()


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "count_gpus", lambda: 0)


def test_help_lists_the_commands() -> None:
    result = RUNNER.invoke(cli, ["--help"])
    assert result.exit_code == 0
    for command in ("serve", "say", "doctor", "env", "random-checkpoint", "verify", "loadtest"):
        assert command in result.output


def test_env_prints_the_tuned_settings() -> None:
    result = RUNNER.invoke(cli, ["env"])
    assert result.output.splitlines() == [f"export {name}={value}" for name, value in TUNED.items()]


@pytest.mark.parametrize(("ok", "exit_code"), [(True, 0), (False, 1)])
def test_doctor_fails_where_a_finding_does(monkeypatch: pytest.MonkeyPatch, ok: bool, exit_code: int) -> None:
    asked: list[tuple[AppConfig, int]] = []

    def examine(config: AppConfig, port: int) -> list[Finding]:
        asked.append((config, port))
        return [Finding(True, "Python", "3.11"), Finding(ok, "port", "8001")]

    monkeypatch.setattr(module, "examine", examine)
    result = RUNNER.invoke(cli, ["doctor", "--port", "8001"])
    assert result.exit_code == exit_code
    assert [line[:4].strip() for line in result.output.splitlines()[1:]] == ["ok", "ok" if ok else "FAIL"]
    assert asked == [(AppConfig(model="embedded"), 8001)]


def test_a_model_overrides_the_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "talkray.yaml"
    file.write_text("model: embedded\ncodec: {workers: 2}", encoding="utf-8")
    asked: list[AppConfig] = []
    monkeypatch.setattr(module, "examine", lambda config, _: asked.append(config) or [])
    RUNNER.invoke(cli, ["doctor", "--config", str(file), "--model", "here"], catch_exceptions=False)
    [config] = asked
    assert (config.model, config.codec.workers) == ("here", 2)


def test_with_a_gpu_the_talker_makes_audio_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[AppConfig] = []
    monkeypatch.setattr(module, "count_gpus", lambda: 1)
    monkeypatch.setattr(module, "examine", lambda config, _: asked.append(config) or [])
    RUNNER.invoke(cli, ["doctor", "--model", "embedded"], catch_exceptions=False)
    assert asked[0] == one_gpu().model_copy(update={"model": "embedded"})
    assert (asked[0].talker_pool.num_gpus, asked[0].codec_pool.num_gpus) == (1, 0)
    assert asked[0].codec.placement == "inline"


def test_other_modules_get_their_arguments_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(module.subprocess, "call", lambda command: calls.append(command) or 3)
    result = RUNNER.invoke(cli, ["loadtest", "run", "--url", "U", "--help"])
    assert result.exit_code == 3
    assert calls[0][1:] == ["-m", "loadtest", "run", "--url", "U", "--help"]


def test_errors_on_purpose_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise TalkrayError("no room")

    monkeypatch.setattr(module, "cli", fail)
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == "talkray: no room"
