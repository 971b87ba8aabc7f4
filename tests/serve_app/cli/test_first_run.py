"""`talkray serve` with a checkpoint that is not here yet, as a person meets it: what goes wrong before the start."""

import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_app.cli.ray_settings import free_port
from tests.deployments.weights.test_download import NAME, WEIGHTS, files
from tests.fake_hub import Hub, serving

BOUND_S = 60
SERVE = [sys.executable, "-m", "serve_app", "serve", "--model", "1.7B-CustomVoice", "--port"]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving(Hub({NAME: files()})) as hub:
        yield hub


def serve(hub: Hub, folder: Path) -> "subprocess.CompletedProcess[str]":
    command, environment = [*SERVE, str(free_port())], os.environ | hub.variables(folder)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=BOUND_S, check=False)


def on_a_terminal(hub: Hub, folder: Path) -> str:
    """All that appears there, with its colours."""
    leader, follower = pty.openpty()
    environment = os.environ | hub.variables(folder) | {"TERM": "xterm-256color", "COLUMNS": "160"}
    with subprocess.Popen([*SERVE, str(free_port())], env=environment, stdout=follower, stderr=follower) as process:
        os.close(follower)
        shown = b"".join(iter(lambda: _read(leader), b""))
        os.close(leader)
        assert process.wait(BOUND_S) == 1
    return shown.decode()


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # so a terminal ends
        return b""


def test_a_terminal_shows_a_bar_with_bytes_rate_and_time_left(hub: Hub, tmp_path: Path) -> None:
    hub.breaks, hub.corrupt = [(150_000, False)], {WEIGHTS}
    shown = on_a_terminal(hub, tmp_path)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert re.search(rf"━+.* downloading {NAME} .*: \d+ kB of 1\.22 MB, [\d.]+ [kM]B/s, \d:\d\d left", plain), plain
    assert "did not arrive as the hub has it" in plain


def test_elsewhere_it_is_lines(hub: Hub, tmp_path: Path) -> None:
    hub.corrupt = {WEIGHTS}
    lines = serve(hub, tmp_path).stdout.splitlines()
    assert [line for line in lines if re.search(rf"s\] downloading {NAME}: 0 B of 1\.22 MB", line)]
    assert "━" not in "".join(lines)


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        ({"corrupt": {WEIGHTS}}, f"{WEIGHTS} of {NAME} did not arrive as the hub has it: its SHA-256 is "),
        ({"sizes": {WEIGHTS: 10**15}}, f"the disk is full: {NAME} needs 1000000 GB more, and "),
        (
            {"repositories": {NAME: files(**{"config.json": b'{"model_type": "llama"}'})}},
            f"{NAME} is a checkpoint of another family: config.json says model_type 'llama'",
        ),
    ],
)
def test_a_failure_is_one_line_before_anything_starts(
    hub: Hub, tmp_path: Path, failure: dict[str, object], says: str
) -> None:
    for name, value in failure.items():
        setattr(hub, name, value)
    done = serve(hub, tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"talkray: {says}")
    assert done.stderr.count("\n") == 1
    assert "starting Ray" not in done.stdout


def test_ctrl_c_keeps_what_has_arrived(hub: Hub, tmp_path: Path) -> None:
    hub.breaks, hub.gate = [(150_000, False)], threading.Event()  # the smallest arrives, the next one stops half-way
    command, environment = [*SERVE, str(free_port())], os.environ | hub.variables(tmp_path)
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        assert hub.at_gate.wait(BOUND_S)
        os.killpg(process.pid, signal.SIGINT)
        said = process.communicate(timeout=BOUND_S)[0]
    assert process.returncode == 130
    assert "Traceback" not in said
    arrived = hub.repositories[NAME]["speech_tokenizer/model.safetensors"]
    assert [blob.read_bytes() for blob in tmp_path.rglob(arrived.etag)] == [arrived.data]
