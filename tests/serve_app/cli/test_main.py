import errno
import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

from deployments.errors import StartError, TalkrayError
from serve_app.api.access.keys import Keys
from serve_app.api.error_replies import Unauthorized
from serve_app.api.request_record import Entry
from serve_app.cli import main as module
from serve_app.cli import ray_settings
from serve_app.cli.doctor import Finding
from serve_app.cli.main import ProgressLine, cli, main
from serve_app.cli.ray_settings import for_a_node, free_port
from serve_app.cli.serve.local_server import Address
from serve_app.config import AppConfig, ConfigError
from serve_app.config_file import read_config
from serve_app.extensions import COMMANDS

RUNNER = CliRunner()
Started = list[tuple[AppConfig, Address]]
ENTRY = {
    "time": "2026-01-02T03:04:05+0000", "id": "a1", "method": "POST", "path": "/v1/audio/speech", "client": "::1",
    "key": None, "voice": "nora", "audio_s": 2.34, "ttfa_ms": 120, "outcome": "stop",
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "count_gpus", lambda: 0)


def settings_of(monkeypatch: pytest.MonkeyPatch, *arguments: str, gpus: int = 0) -> AppConfig:
    """Those that `talkray doctor` looks at."""
    asked: list[AppConfig] = []
    monkeypatch.setattr(module, "count_gpus", lambda: gpus)
    monkeypatch.setattr(module, "examine", lambda config, _: asked.append(config) or [])
    monkeypatch.setattr(module, "predict_memory", lambda *_, **__: [])
    RUNNER.invoke(cli, ["doctor", *arguments], catch_exceptions=False)
    [config] = asked
    return config


def test_help_lists_the_commands_in_panels() -> None:
    result = RUNNER.invoke(cli, ["--help"], env={"COLUMNS": "80"})
    lines = result.output.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("╭")] == ["Options", *module.PANELS]
    shown = {line.split()[1] for line in lines if line.startswith("│ ") and line[2] != " "}
    assert shown >= {"serve", "say", "book", "voice", "loadtest", "bench", "usage", "key", "env"}
    assert all(find_spec(name) is not None for _, name, _ in module._MODULES.values())


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_group_of_an_extension_is_its_own(name: str) -> None:
    result = RUNNER.invoke(cli, [name, "--help"], env={"COLUMNS": "80"})
    assert COMMANDS[name][0] in result.output
    assert f"Usage: root {name}" in result.output or f"{name} [OPTIONS] COMMAND" in result.output


def test_env_prints_the_tuned_settings() -> None:
    result = RUNNER.invoke(cli, ["env"])
    assert result.output.startswith("export ")
    done = subprocess.run(["sh", "-c", f"{result.output} env -0"], env={}, capture_output=True, text=True, check=True)
    assert {f"{name}={value}" for name, value in for_a_node().items()} <= {*done.stdout.split("\0")}


def test_env_asks_for_no_more_connections_than_files_can_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_settings.resource, "getrlimit", lambda _: (1024, 4096))
    result = RUNNER.invoke(cli, ["env"])
    assert "export RAY_SERVE_HAPROXY_MAXCONN=1365" in result.output.splitlines()


@pytest.mark.parametrize(
    ("running", "arguments", "port"), [(None, (), 8000), (8321, (), 8321), (8321, ("--port", "8001"), 8001)]
)
def test_doctor_looks_at_the_server_that_say_finds(
    monkeypatch: pytest.MonkeyPatch, running: int | None, arguments: tuple[str, ...], port: int
) -> None:
    asked: list[Address] = []
    monkeypatch.setattr(module, "examine", lambda config, address: asked.append(address) or [])
    monkeypatch.setattr(module, "find_server", lambda: running and f"http://127.0.0.1:{running}")
    RUNNER.invoke(cli, ["doctor", *arguments], catch_exceptions=False)
    assert asked == [Address("127.0.0.1", port)]


@pytest.mark.parametrize(
    ("typed", "shown"), [("/usr/bin/talkray", "talkray"), (".venv/bin/talkray", ".venv/bin/talkray"), ("x.py", None)]
)
def test_a_command_knows_what_was_typed(monkeypatch: pytest.MonkeyPatch, typed: str, shown: str | None) -> None:
    called: list[dict[str, str]] = []
    monkeypatch.setattr(module.subprocess, "call", lambda command, env: called.append(env) or 0)
    monkeypatch.setattr(module.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(module.sys, "argv", [typed])
    RUNNER.invoke(cli, ["loadtest", "run"])
    assert called[0].get("TALKRAY_TYPED") == (shown and f"{shown} loadtest")


@pytest.mark.parametrize(("ok", "exit_code"), [(True, 0), (False, 1)])
def test_doctor_fails_where_a_finding_does(monkeypatch: pytest.MonkeyPatch, ok: bool, exit_code: int) -> None:
    asked: Started = []

    def examine(config: AppConfig, address: Address) -> list[Finding]:
        asked.append((config, address))
        return [Finding("Python", "3.11"), Finding("port", "8001", ok=ok)]

    monkeypatch.setattr(module, "examine", examine)
    result = RUNNER.invoke(cli, ["doctor", "--port", "8001"])
    assert result.exit_code == exit_code
    assert [line[:4].strip() for line in result.output.splitlines()[1:]] == ["ok", "ok" if ok else "FAIL"]
    assert asked == [(AppConfig(model="embedded"), Address("127.0.0.1", 8001))]


def test_a_model_overrides_the_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "talkray.yaml"
    file.write_text("model: embedded\ncodec: {workers: 2}", encoding="utf-8")
    config = settings_of(monkeypatch, "--config", str(file), "--model", "here")
    assert (config.model, config.codec.workers) == ("here", 2)


def test_with_a_gpu_the_talker_makes_audio_too(monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings_of(monkeypatch, "--model", "embedded", gpus=1)
    assert config == read_config(module.ONE_GPU).model_copy(update={"model": "embedded"})
    assert (config.talker_pool.num_gpus, config.codec_pool.num_gpus, config.codec.placement) == (1, 0, "inline")


def test_other_modules_get_their_arguments_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(module.subprocess, "call", lambda command, env: calls.append(command) or 3)
    result = RUNNER.invoke(cli, ["loadtest", "run", "--url", "U", "--help"])
    assert result.exit_code == 3
    assert calls[0][1:] == ["-m", "loadtest", "run", "--url", "U", "--help"]


def test_a_stage_is_one_line_however_long_it_is() -> None:
    file = io.StringIO()
    with ProgressLine(file) as progress:
        progress.report("long " * 40)
        progress.done("done " * 40)
    assert len(file.getvalue().splitlines()) == 2


def test_a_download_answers_ctrl_c_itself_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    before, during = signal.getsignal(signal.SIGINT), []

    def fail(model: str, *, report: Callable[[str], None]) -> Path:
        during.append(signal.getsignal(signal.SIGINT))
        raise StartError(f"{model}: no room on the disk")

    monkeypatch.setattr(module, "find", lambda _: None)
    monkeypatch.setattr(module, "locate", fail)
    with ProgressLine(io.StringIO()) as progress, pytest.raises(StartError, match="no room"):
        module._fetch("a/model", progress)
    assert signal.getsignal(signal.SIGINT) is before
    assert during[0] is not before


def test_errors_on_purpose_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise TalkrayError("no room")

    monkeypatch.setattr(module, "cli", fail)
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == "talkray: no room"


@pytest.fixture
def key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TALKRAY_KEYS_FILE", str(tmp_path / "keys.json"))
    return tmp_path / "keys.json"


def run(*arguments: str) -> str:
    result = RUNNER.invoke(cli, ["key", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_create_list_revoke(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = run("create", "ada", "--max-streams", "2").strip()
    other = run("create", "bob", "--requests-per-minute", "60").strip()
    assert not Keys(key_file).find(key).admin
    root = run("create", "root", "--admin").strip()
    assert Keys(key_file).find(root).admin
    *lines, of_root = run("list").splitlines()
    assert of_root.split()[:3] == [root.split("-")[1], "root", "(admin)"]
    assert [line.split()[:6] for line in lines] == [
        [key.split("-")[1], "ada", "any", "requests/min", "2", "streams"],
        [other.split("-")[1], "bob", "60", "requests/min", "any", "streams"],
    ]
    assert key not in run("list")
    changed = [run("limit", "ada", f"--{option}") for option in ("max-streams=0", "requests-per-minute=9")]
    assert [line.split()[2:6:2] for line in changed] == [["any", "any"], ["9", "any"]]
    monkeypatch.setattr("serve_app.cli.key_file._now", lambda: "later")
    assert "revoked" in run("revoke", "ada")
    assert [line.endswith("revoked later") for line in run("list").splitlines()] == [True, False, False]
    with pytest.raises(Unauthorized):
        Keys(key_file).find(key)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """The servers that `talkray serve` has started: each serves one request, and ends."""
    started: Started = []

    @contextmanager
    def running(
        config: AppConfig, address: Address, _: object, *, show: Callable[[Entry], None] | None
    ) -> Iterator[SimpleNamespace]:
        started.append((config, address))
        if show:
            show(ENTRY)
        yield SimpleNamespace(url="http://127.0.0.1:1", wait=lambda: None)

    monkeypatch.setattr(module, "running", running)
    return started


def serve(*options: str) -> Result:
    result = RUNNER.invoke(cli, ["serve", "--model", "embedded", *options])
    assert result.exit_code == 0, result.output
    return result


def test_serve_takes_a_key_file_and_origins(key_file: Path, monkeypatch: pytest.MonkeyPatch, started: Started) -> None:
    run("create", "ada")
    monkeypatch.chdir(key_file.parent)
    port = free_port()
    access = "{keys_file: other.json, allowed_origins: ['https://c.example']}"
    Path("own.yaml").write_text(f"api: {{access: {access}}}", encoding="utf-8")
    options = ["--config", "own.yaml", "--host", "0.0.0.0", "--port", str(port), "--keys", key_file.name]
    serve(*options, "--allow-origin", "https://a.example", "--allow-origin", "https://b.example")
    [(config, address)] = started
    assert config.api.access.keys_file == key_file
    assert config.api.access.allowed_origins == tuple(f"https://{name}.example" for name in "cab")
    assert address == Address("0.0.0.0", port)


def test_serve_checks_the_pages_that_it_lets_in_and_the_key_file_first(key_file: Path) -> None:
    options = ["--model", "embedded", "--allow-origin", "app.example.com"]
    with pytest.raises(ConfigError, match=r"--allow-origin: allowed_origins\.0: .*'app.example.com' is not an origin"):
        RUNNER.invoke(cli, ["serve", *options], catch_exceptions=False)
    with pytest.raises(ConfigError):
        RUNNER.invoke(cli, ["serve", "--model", "x", "--keys", str(key_file)], catch_exceptions=False)


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ((), "2026-01-02 03:04:05  POST /v1/audio/speech  a1  ::1  nora  2.3 s of audio, the first after 120 ms  stop"),
        (("--quiet",), ""),
        (("--json",), json.dumps(ENTRY)),
    ],
)
@pytest.mark.usefixtures("started")
def test_what_serve_prints_of_a_request(options: tuple[str, ...], shown: str) -> None:
    result = serve("--port", str(free_port()), *options)
    lines = result.stdout.splitlines()
    assert [line for line in lines if "a1" in line] == ([shown] if shown else [])
    assert "--json" not in options or lines == [shown]
    told = result.stderr if "--json" in options else result.stdout
    assert "ready: open http://127.0.0.1:1/docs in a browser" in told  # no page answers on this port
    assert "This is the small English demo voice" in told
    assert "Press Ctrl-C to stop." in told


def test_settings_of_no_file_follow_the_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, started: Started) -> None:
    def smaller(config: AppConfig, _: Address) -> AppConfig:
        return config.model_copy(update={"talker": config.talker.model_copy(update={"max_num_seqs": 5})})

    monkeypatch.setattr(module, "for_this_card", smaller)
    (tmp_path / "own.yaml").write_text("talker: {max_num_seqs: 7}", encoding="utf-8")
    for options in ([], ["--config", str(tmp_path / "own.yaml")]):
        result = serve("--port", str(free_port()), *options)
        assert ("this GPU can hold 5 rows of 4096 positions" in result.stdout) is (not options)
    assert [config.talker.max_num_seqs for config, _ in started] == [5, 7]


CLONE_AND_VOICES = ("--model", "Qwen/Qwen3-TTS-12Hz-1.7B-Base", "--model", "/checkpoints/my voices")


def test_several_models_have_names_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings_of(monkeypatch, *CLONE_AND_VOICES)
    named = [("1.7B-Base", CLONE_AND_VOICES[1]), ("my-voices", CLONE_AND_VOICES[3])]
    assert [(each.name, each.model) for each in config.models] == named
    assert config.num_gpus == 0


@pytest.mark.parametrize(
    ("gpus", "more", "num_gpus", "fraction"),
    [(1, (), 0.5, 0.45), (2, (), 1.0, 0.85), (2, ("--model", "third"), 0.5, 0.45)],
)
def test_models_share_few_gpus(
    monkeypatch: pytest.MonkeyPatch, gpus: int, more: tuple[str, ...], num_gpus: float, fraction: float
) -> None:
    monkeypatch.setattr(module, "resolve_auto", lambda model, **_: SimpleNamespace(model=model, reason=""))
    for own in settings_of(monkeypatch, *CLONE_AND_VOICES, *more, gpus=gpus).by_model().values():
        assert (own.talker_pool.num_gpus, own.talker.gpu_memory_fraction) == (num_gpus, fraction)
        assert own.codec.placement == "inline"


def test_a_full_disk_behind_standard_output_is_one_line() -> None:
    code = "import sys; from serve_app.cli.main import main; sys.argv[1:] = ['--version']; main()"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "talkray: cannot write to standard output: No space left on device\n")


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_does_not_stop_a_server() -> None:
    with ProgressLine(FullDisk()) as progress:
        progress.report("loading")
