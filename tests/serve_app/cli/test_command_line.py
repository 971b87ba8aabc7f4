"""The `talkray` command as a person runs it, where it starts no server; tests/e2e has those that do."""

import os
import queue
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from serve_app.cli.ray_settings import free_port

TALKRAY = [sys.executable, "-m", "serve_app"]
BOUND_S = 60
GRAIN_S = 0.002  # a loop that waited without a pause would hold up what it waits for
NAME = "Qwen/Qwen3-TTS-12Hz-0.6B-Base"


def talkray(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*TALKRAY, *arguments], env=os.environ | variables, capture_output=True, text=True, timeout=BOUND_S, check=False
    )


class Hub(BaseHTTPRequestHandler):
    """A Hugging Face hub that remembers what it was asked, and has whatever that is, or never says."""

    asked: ClassVar[list[str]]
    answers: ClassVar[bool]
    waited_s: ClassVar[queue.Queue[float]]  # until a client that got no answer has gone

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if not self.answers:
            began_s = time.monotonic()
            self.connection.recv(1)
            self.waited_s.put(time.monotonic() - began_s)
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Standard error is not for it."""


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    Hub.asked, Hub.answers, Hub.waited_s = [], True, queue.Queue()
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def variables(hub: ThreadingHTTPServer, folder: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(folder / "hf")}


def refused(*arguments: str, **environment: str) -> str:
    """What `talkray serve` says; it ends before it has started anything, after less than three seconds of work."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = talkray("serve", "--port", str(free_port()), *arguments, **environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr + done.stdout
    assert "starting" not in done.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3
    return done.stderr


def test_serve_refuses_a_mistyped_model_at_once() -> None:
    assert "did you mean '1.7B-CustomVoice'" in refused("--model", "1.7B-CustomVoise")


def test_serve_refuses_a_missing_gpu_at_once(tmp_path: Path) -> None:
    file = tmp_path / "talkray.yaml"
    file.write_text("talker_pool: {num_gpus: 99}", encoding="utf-8")
    assert "the pools need 99" in refused("--config", str(file), "--model", "embedded")


def test_serve_refuses_a_full_disk_by_folder_and_size() -> None:
    """/proc has room for nothing, and everybody may know."""
    said = refused("--model", "embedded", TALKRAY_CACHE="/proc/talkray", RAY_TMPDIR="/proc")
    assert said.splitlines() == [
        "talkray: disk: 0 MiB free in /proc/talkray; the embedded voice needs 35 MiB: free space, or set TALKRAY_CACHE",
        "disk: 0 MiB free in /proc; Ray needs 256 MiB: free space, or set RAY_TMPDIR",
    ]


def test_say_refuses_what_serve_refuses(tmp_path: Path) -> None:
    done = talkray("say", "hi", "-o", str(tmp_path / "hi.wav"), "--model", "1.7B-CustomVoise")
    assert done.returncode == 1
    assert "did you mean '1.7B-CustomVoice'" in done.stderr
    assert "starting" not in done.stdout + done.stderr


def test_doctor_downloads_nothing(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    done = talkray("doctor", "--model", "0.6B-Base", **variables(hub, tmp_path))
    [line] = [line for line in done.stdout.splitlines() if " weights " in line]
    assert line == f"ok    weights      {NAME}, downloaded at start to {tmp_path / 'hf' / 'hub'}"
    assert Hub.asked == [f"/api/models/{NAME}"]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_an_unreachable_hub_costs_no_more_than_three_seconds(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    """A busy machine may take as long again as it takes for all the rest."""
    Hub.answers = False
    began_s = time.monotonic()
    talkray("doctor", "--model", "embedded")
    rest_s = time.monotonic() - began_s
    done = talkray("doctor", "--model", "0.6B-Base", **variables(hub, tmp_path))
    assert done.returncode == 1
    assert f"FAIL  weights      {NAME} is not in the cache {tmp_path / 'hf' / 'hub'}" in done.stdout
    assert len(Hub.asked) == 1
    assert Hub.waited_s.get(timeout=BOUND_S) < 3 + rest_s


def test_doctor_keeps_topics_and_findings_apart() -> None:
    lines = talkray("doctor", "--model", "embedded").stdout.splitlines()[1:]
    assert all(line[6:].split()[0] == line[6:19].rstrip() for line in lines), lines


def test_the_version() -> None:
    done = talkray("--version")
    assert done.returncode == 0
    assert re.fullmatch(r"talkray \d+\.\d+\.\d+(rc\d+)?\n", done.stdout)


@pytest.mark.parametrize(
    "excluded",
    [
        ("--play", "-o", "x.wav"),
        ("--show", "-o", "x.wav"),
        ("--show", "--play"),
        ("--url", "http://127.0.0.1:1", "--model", "embedded"),
    ],
)
def test_say_refuses_what_it_would_ignore(excluded: tuple[str, ...]) -> None:
    done = talkray("say", "hi", *excluded)
    assert done.returncode == 1
    assert "exclude each other" in done.stderr


def handles_interrupts(process: "subprocess.Popen[str]") -> bool:
    """Whether a Ctrl-C runs Python code in it, as the kernel knows."""
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
    [caught] = [line for line in status.splitlines() if line.startswith("SigCgt:")]
    return bool(int(caught.split()[1], 16) >> (signal.SIGINT - 1) & 1)


@pytest.mark.parametrize("tenth_s", range(8))
def test_ctrl_c_at_any_moment_shows_no_traceback(tenth_s: int, tmp_path: Path) -> None:
    """From the moment on at which Python has begun with our code. What comes after the checks: tests/faults."""
    port = free_port()
    arguments = [*TALKRAY, "serve", "--model", "0.6B-Base", "--port", str(port)]
    with (
        socket.create_server(("127.0.0.1", 0)) as silent_hub,
        subprocess.Popen(
            arguments,
            env=os.environ
            | {"HF_ENDPOINT": f"http://127.0.0.1:{silent_hub.getsockname()[1]}", "HF_HOME": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process,
    ):
        while not handles_interrupts(process):
            assert process.poll() is None
            time.sleep(GRAIN_S)
        until_s = time.monotonic() + 1
        while handles_interrupts(process) and time.monotonic() < until_s:  # ours begins by leaving it to the kernel
            time.sleep(GRAIN_S)
        time.sleep(tenth_s / 10)
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=BOUND_S)[0]
    assert process.returncode in (-signal.SIGINT, 130)
    assert "Traceback" not in output
    assert "Exception" not in output
