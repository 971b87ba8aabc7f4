"""The `talkray` command as a person runs it."""

import io
import re
import shlex
import socket
import subprocess
import time
import wave
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import soundfile
from safetensors.numpy import load_file, save_file

from deployments.weights.store import locate
from tests.e2e.black_box import COMMAND, START_S, ServerCommand, refusal, starting, talkray, users_environment
from tests.e2e.commands.conftest import BOUND_S, CANARY, NOISE, ORIGIN, Guarded, bearer


def test_a_start_says_how_to_speak(plain: ServerCommand) -> None:
    said = plain.output.partition("Press Ctrl-C to stop.")[0]
    lines = said.splitlines()
    [ready] = [line for line in lines if line.startswith("ready: ")]
    assert httpx.get(re.findall(r"open (\S+) in a browser", ready)[0]).status_code == 200
    assert any("This is the small English demo voice" in line for line in lines)
    assert [noise for noise in (*NOISE, "updating", "KV blocks") if noise in said] == []
    [curl] = [line.strip() for line in lines if line.strip().startswith("curl ")]
    command = curl.replace("-o hello.mp3", "--fail --silent --max-time 60")
    spoken = subprocess.run(command, shell=True, capture_output=True, check=True)
    assert soundfile.info(io.BytesIO(spoken.stdout)).format == "MP3"


def test_say_finds_the_server(plain: ServerCommand, tmp_path: Path) -> None:
    """Without --url, wherever it listens; `talkray say` starts no server of its own then."""
    file = tmp_path / "hi.mp3"
    done = talkray("say", "hi", "-o", str(file), "--speed", "1.5", "--instructions", "slowly")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"wrote {file}")
    assert done.stdout.endswith(f", spoken by {plain.url}\n")
    piped = subprocess.run(
        ["bash", "-c", f"echo hi | {shlex.join(COMMAND)} say - -o -"], env=users_environment(), capture_output=True,
        check=True, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    with wave.open(io.BytesIO(piped.stdout)) as audio:
        assert audio.getnframes() * 2 == len(audio.readframes(1 << 30)) > 0


def test_each_request_is_a_line_without_its_text(plain: ServerCommand) -> None:
    for voice in ("alloy", "nobody"):
        asked = {"input": CANARY, "voice": voice}
        httpx.post(
            f"{plain.url}/v1/audio/speech", json=asked, headers={"x-request-id": f"seen-{voice}"}, timeout=BOUND_S
        )
        plain.reach(f"seen-{voice}", BOUND_S)
    assert re.search(
        r"\d  POST /v1/audio/speech  seen-alloy  127\.0\.0\.1  nora  \d\.\d s of audio, the first after \d+ ms  stop\n",
        plain.output,
    )
    assert re.search(r"\d  POST /v1/audio/speech  seen-nobody  127\.0\.0\.1  voice_not_found\n", plain.output)
    assert CANARY not in plain.output


def test_requests_as_json_and_nothing_else(guarded: Guarded) -> None:
    """One line each, of errors too; whatever else the command says goes to standard error."""
    found = []
    for voice, status in (("alloy", 200), ("nobody", 400)):
        asked = {"input": CANARY, "voice": voice, "response_format": "pcm"}
        headers = {"x-request-id": f"json-{voice}", "origin": ORIGIN, **bearer(guarded.key)}
        heard = httpx.post(f"{guarded.url}/v1/audio/speech", json=asked, headers=headers, timeout=BOUND_S)
        assert (heard.status_code, heard.headers["access-control-allow-origin"]) == (status, ORIGIN)
        until_s = time.monotonic() + BOUND_S
        while not (lines := [line for line in guarded.lines() if line["id"] == f"json-{voice}"]):
            assert time.monotonic() < until_s, guarded.server.output
            time.sleep(0.05)
        found += lines
    spoken, refused = found
    assert (
        set(spoken)
        == set(refused)
        >= {"time", "id", "method", "path", "client", "key", "voice", "audio_s", "ttfa_ms", "outcome"}
    )
    assert (spoken["client"], spoken["voice"], spoken["outcome"]) == ("127.0.0.1", "nora", "stop")
    assert spoken["audio_s"] > 0 < spoken["ttfa_ms"]
    assert (refused["client"], refused["outcome"], refused["audio_s"]) == ("127.0.0.1", "voice_not_found", 0)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    for path in locate("embedded").iterdir():
        (directory / path.name).symlink_to(path)
    weights = load_file(locate("embedded") / "model.safetensors")
    name = next(iter(weights))
    (directory / "model.safetensors").unlink()
    save_file({key: weights[key] for key in weights if key != name}, directory / "model.safetensors")
    with starting(tmp_path, "--model", str(directory)) as server:
        assert server.wait(START_S) == 1
        server.leaves_nothing()
    assert f"talkray: Talker did not start: {directory}" in server.output
    assert f"{name} is missing" in server.output
    assert "Logs: " in server.output
    assert "Traceback" not in server.output


@pytest.fixture
def taken_port() -> Iterator[int]:
    """Held by something that is not Talkray."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


def test_a_taken_port_is_refused(taken_port: int) -> None:
    reason = f"127.0.0.1:{taken_port} cannot be used (Address already in use): choose another --port"
    assert refusal("--port", str(taken_port)) == f"talkray: port: {reason}\n"
