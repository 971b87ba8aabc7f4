"""The `talkray` command as a person runs it, where it starts no server; tests/e2e has those that do."""

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_app.cli.ray_settings import free_port
from tests.fake_hub import NAME, WEIGHTS, Hub, files, serving

TALKRAY = [sys.executable, "-m", "serve_app"]
BOUND_S = 60
GRAIN_S = 0.002  # a loop that waited without a pause would hold up what it waits for


def talkray(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*TALKRAY, *arguments], env=os.environ | variables, capture_output=True, text=True, timeout=BOUND_S, check=False
    )


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


def test_doctor_downloads_nothing(tmp_path: Path) -> None:
    with serving(Hub({NAME: files()})) as hub:
        done = talkray("doctor", "--model", "1.7B-CustomVoice", **hub.variables(tmp_path))
    [line] = [line for line in done.stdout.splitlines() if " weights " in line]
    assert line == f"ok    weights      {NAME}, downloaded at start to {tmp_path / 'hf' / 'hub'}"
    assert hub.asked == [f"GET /api/models/{NAME}"]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_an_unreachable_hub_costs_no_more_than_three_seconds(tmp_path: Path) -> None:
    """A busy machine may take as long again as it takes for all the rest."""
    began_s = time.monotonic()
    talkray("doctor", "--model", "embedded")
    rest_s = time.monotonic() - began_s
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.setblocking(False)
        began_s = time.monotonic()
        done = talkray("doctor", "--model", "1.7B-CustomVoice", **Hub({}, silent.getsockname()[1]).variables(tmp_path))
        took_s = time.monotonic() - began_s
        silent.accept()[0].close()
        with pytest.raises(BlockingIOError):  # it was asked once
            silent.accept()
    assert done.returncode == 1
    assert f"FAIL  weights      {NAME} is not in the cache {tmp_path / 'hf' / 'hub'}" in done.stdout
    assert took_s < 3 + 2 * rest_s


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
    assert "cannot be combined" in done.stderr


def handles_interrupts(process: "subprocess.Popen[str]") -> bool:
    """Whether a Ctrl-C runs Python code in it, as the kernel knows."""
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
    [caught] = [line for line in status.splitlines() if line.startswith("SigCgt:")]
    return bool(int(caught.split()[1], 16) >> (signal.SIGINT - 1) & 1)


@pytest.mark.parametrize("tenth_s", range(8))
def test_ctrl_c_at_any_moment_shows_no_traceback(tenth_s: int, tmp_path: Path) -> None:
    """From the moment on at which Python has begun with our code. What comes after the checks: tests/faults."""
    arguments = [*TALKRAY, "serve", "--model", "0.6B-Base", "--port", str(free_port())]
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        subprocess.Popen(
            arguments,
            env=os.environ | Hub({}, silent.getsockname()[1]).variables(tmp_path),
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


# With a checkpoint that is not here yet: what goes wrong before the start.
SERVE = ("serve", "--model", "1.7B-CustomVoice", "--port")


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving(Hub({NAME: files()})) as hub:
        yield hub


def test_the_way_of_a_download_is_told(hub: Hub, tmp_path: Path) -> None:
    hub.corrupt = {WEIGHTS}
    lines = talkray(*SERVE, str(free_port()), **hub.variables(tmp_path)).stdout.splitlines()
    assert [line for line in lines if re.search(rf"s\] downloading {NAME}: 1\.22MB of 1\.22MB", line)]


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        ({"corrupt": {WEIGHTS}}, f"{WEIGHTS} of {NAME} is corrupt: its sha256 is "),
        ({"refuses": 403}, f"weights: {NAME} is not in the cache "),
        (
            {"repositories": {NAME: files(**{"config.json": b'{"model_type": "llama"}'})}},
            f"{NAME} is a checkpoint of another family: config.json has model_type 'llama'",
        ),
    ],
)
def test_a_failure_is_one_line_and_no_start(hub: Hub, tmp_path: Path, failure: dict[str, object], says: str) -> None:
    for name, value in failure.items():
        setattr(hub, name, value)
    done = talkray(*SERVE, str(free_port()), **hub.variables(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith(f"talkray: {says}")
    assert done.stderr.count("\n") == 1
    assert "starting Ray" not in done.stdout


def test_ctrl_c_keeps_what_has_arrived(hub: Hub, tmp_path: Path) -> None:
    hub.gate = threading.Event()  # small files arrive, large ones stop half-way
    command, environment = [*TALKRAY, *SERVE, str(free_port())], os.environ | hub.variables(tmp_path)
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        assert hub.at_gate.wait(BOUND_S)
        os.killpg(process.pid, signal.SIGINT)
        said = process.communicate(timeout=BOUND_S)[0]
    assert process.returncode == 130
    assert "Traceback" not in said
    arrived = hub.repositories[NAME]["config.json"]
    assert [blob.read_bytes() for blob in tmp_path.rglob(arrived.etag)] == [arrived.data]
