"""`talkray serve` with a checkpoint that is not here yet, as a person meets it: what goes wrong before the start."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_app.cli.ray_settings import free_port
from tests.fake_hub import NAME, WEIGHTS, Hub, files, serving

BOUND_S = 60
SERVE = [sys.executable, "-m", "serve_app", "serve", "--model", "1.7B-CustomVoice", "--port"]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving(Hub({NAME: files()})) as hub:
        yield hub


def serve(hub: Hub, folder: Path) -> "subprocess.CompletedProcess[str]":
    command, environment = [*SERVE, str(free_port())], os.environ | hub.variables(folder)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=BOUND_S, check=False)


def test_the_way_of_a_download_is_told(hub: Hub, tmp_path: Path) -> None:
    hub.corrupt = {WEIGHTS}
    lines = serve(hub, tmp_path).stdout.splitlines()
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
    done = serve(hub, tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"talkray: {says}")
    assert done.stderr.count("\n") == 1
    assert "starting Ray" not in done.stdout


def test_ctrl_c_keeps_what_has_arrived(hub: Hub, tmp_path: Path) -> None:
    hub.gate = threading.Event()  # small files arrive, large ones stop half-way
    command, environment = [*SERVE, str(free_port())], os.environ | hub.variables(tmp_path)
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
