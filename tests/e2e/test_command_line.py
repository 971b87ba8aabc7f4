"""The `talkray` command as a person runs it, each time in a process group of its own."""

import contextlib
import io
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
import wave
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import soundfile
from safetensors.numpy import load_file, save_file

from deployments.weights.store import locate
from serve_app.cli.ray_settings import free_port
from serve_app.cli.serve.local_server import why_unusable
from tools.suites.processes import MARK, marked

TALKRAY = [sys.executable, "-m", "serve_app"]
BOUND_S = 120
SECRET = "Nobody may read this."


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Marks every process of one test; none of them outlives it."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    yield mark
    assert marked(mark) == {}


def environment() -> dict[str, str]:
    """A user's: without the settings, ports among them, of the Ray that serves the other tests."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}


def talkray(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*TALKRAY, *arguments], env=environment(), capture_output=True, text=True, timeout=BOUND_S, check=False
    )


def start(*arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*TALKRAY, *arguments], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip


def read_until(output: Iterator[str], wanted: str) -> list[str]:
    lines = []
    for line in output:
        lines.append(line)
        if wanted in line:
            return lines
    raise AssertionError(f"the command ended before it printed {wanted!r}: {''.join(lines)}")


def interrupt(process: "subprocess.Popen[str]") -> None:
    """Ctrl-C on a terminal reaches the whole process group."""
    os.killpg(process.pid, signal.SIGINT)


@contextlib.contextmanager
def client_of(*models: str) -> Iterator[httpx.Client]:
    """Of a server with these models, which ends with the block."""
    port = free_port()
    named = [argument for model in models for argument in ("--model", model)]
    with start("serve", *named, "--port", str(port)) as process:
        assert process.stdout is not None
        try:
            read_until(process.stdout, "Ctrl-C stops.")
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=BOUND_S) as client:
                yield client
        finally:
            interrupt(process)
            process.communicate(timeout=BOUND_S)


def assert_say_finds_it(url: str, folder: Path) -> None:
    """Without --url, wherever it listens; `talkray say` starts no server of its own then."""
    file = folder / "hi.mp3"
    done = talkray("say", "hi", "-o", str(file), "--speed", "1.5", "--instructions", "calmly")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"wrote {file}")
    assert done.stdout.endswith(f", spoken by {url}\n")
    piped = subprocess.run(
        ["bash", "-c", f"echo hi | {shlex.join(TALKRAY)} say - -o -"], env=environment(), capture_output=True,
        check=True,
    )  # fmt: skip
    with wave.open(io.BytesIO(piped.stdout)) as audio:
        assert audio.getnframes() * 2 == len(audio.readframes(1 << 30)) > 0


def test_serve_speaks_and_stops_at_ctrl_c(mark: str, tmp_path: Path) -> None:
    port = free_port()
    with start("serve", "--model", "embedded", "--port", str(port)) as process:
        assert process.stdout is not None
        lines = read_until(process.stdout, "Ctrl-C stops.")
        [ready] = [line for line in lines if line.startswith("ready: ")]
        assert f"open http://127.0.0.1:{port} in a browser" in ready
        assert any("This is the demo voice" in line for line in lines)
        assert not [line for line in lines if "updating" in line or "KV blocks" in line]
        [curl] = [line.strip() for line in lines if line.strip().startswith("curl ")]
        spoken = subprocess.run(
            curl.replace("-o hello.mp3", "--fail --silent --max-time 60"), shell=True, capture_output=True, check=True
        )
        assert soundfile.info(io.BytesIO(spoken.stdout)).format == "MP3"
        for voice in ("alloy", "nobody"):
            asked = f'{{"input": "{SECRET}", "voice": "{voice}"}}'
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/audio/speech", asked.encode(), {"x-request-id": f"seen-{voice}"}
            )
            with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(request, timeout=BOUND_S) as heard:
                heard.read()
        assert_say_finds_it(f"http://127.0.0.1:{port}", tmp_path)
        body = b'{"input": "On and on.", "voice": "alloy", "ignore_eos": true, "max_new_tokens": 3000}'
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/audio/speech", body)
        with urllib.request.urlopen(request, timeout=BOUND_S) as stream:
            assert stream.read(1)
            interrupt(process)
            rest = process.communicate(timeout=BOUND_S)[0]
    assert process.returncode == 0
    assert "stopping" in rest
    output = "".join(lines) + rest
    assert re.search(
        r"\d  POST /v1/audio/speech  seen-alloy  127\.0\.0\.1  nora  \d\.\d s of audio, the first after \d+ ms  stop\n",
        output,
    )
    assert re.search(r"\d  POST /v1/audio/speech  seen-nobody  127\.0\.0\.1  voice_not_found\n", output)
    assert SECRET not in output
    assert [noise for noise in ("INFO", "WARNING", "raylet", "Traceback") if noise in output] == []
    assert why_unusable("127.0.0.1", port) is None


def test_requests_as_json_and_nothing_else(mark: str, tmp_path: Path) -> None:
    """One line each, of errors too; whatever else the command says goes to standard error."""
    port, report = free_port(), tmp_path / "report"
    origin = {"origin": "https://app.example.com"}
    arguments = ["serve", "--model", "embedded", "--port", str(port), "--json", "--allow-origin", origin["origin"]]
    with (
        report.open("w") as stderr,
        subprocess.Popen(
            [*TALKRAY, *arguments],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        while "Ctrl-C stops." not in report.read_text():
            assert process.poll() is None, report.read_text()
            time.sleep(0.1)
        asked = {"input": SECRET, "voice": "alloy", "response_format": "pcm"}
        url = f"http://127.0.0.1:{port}/v1/audio/speech"
        heard = httpx.post(url, json=asked, headers=origin, timeout=BOUND_S)
        assert (heard.status_code, heard.headers["access-control-allow-origin"]) == (200, origin["origin"])
        assert httpx.post(url, json=asked | {"voice": "nobody"}, timeout=BOUND_S).status_code == 400
        interrupt(process)
        printed = process.communicate(timeout=BOUND_S)[0]
    # Which of the two lines comes first on a busy machine is not said.
    refused, spoken = sorted(map(json.loads, printed.splitlines()), key=lambda line: line["outcome"] == "stop")
    assert (
        set(spoken)
        == set(refused)
        >= {"time", "id", "method", "path", "client", "key", "voice", "audio_s", "ttfa_ms", "outcome"}
    )
    assert (spoken["client"], spoken["voice"], spoken["outcome"]) == ("127.0.0.1", "nora", "stop")
    assert spoken["audio_s"] > 0 < spoken["ttfa_ms"]
    assert (refused["client"], refused["outcome"], refused["audio_s"]) == ("127.0.0.1", "voice_not_found", 0)
    assert SECRET not in printed + report.read_text()


def test_ctrl_c_while_loading(mark: str) -> None:
    with start("serve", "--model", "embedded", "--port", str(free_port())) as process:
        assert process.stdout is not None
        read_until(process.stdout, "speech model starting")
        interrupt(process)
        rest = process.communicate(timeout=BOUND_S)[0]
    assert process.returncode == 130
    assert "Traceback" not in rest


def test_a_missing_tensor_is_named(mark: str, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    for path in locate("embedded").iterdir():
        (directory / path.name).symlink_to(path)
    weights = load_file(locate("embedded") / "model.safetensors")
    name = next(iter(weights))
    (directory / "model.safetensors").unlink()
    save_file({key: weights[key] for key in weights if key != name}, directory / "model.safetensors")
    done = talkray("serve", "--model", str(directory), "--port", str(free_port()))
    assert done.returncode == 1
    assert f"talkray: Talker did not start: {directory}" in done.stderr
    assert f"{name} is missing" in done.stderr
    assert "Logs: " in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


@pytest.fixture
def taken_port() -> Iterator[int]:
    """Held by something that is not Talkray."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


def test_a_taken_port_is_refused(taken_port: int) -> None:
    done = talkray("serve", "--model", "embedded", "--port", str(taken_port))
    assert done.returncode == 1
    reason = f"127.0.0.1:{taken_port} cannot be used (Address already in use): choose another --port"
    assert done.stderr == f"talkray: port: {reason}\n"
