"""The quickest of the ways in which a server may end; tests/faults/test_ends.py has the others."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.black_box import RAYLET, Sampled, ServerCommand, ends_while_it_speaks, free_port, speaks_again

EVERY_PROCESS, KILL = "TERM to every process", "KILL to the process"


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def server(tmp_path: Path, port: int) -> Iterator[ServerCommand]:
    server = ServerCommand(tmp_path, port)
    try:
        yield server
    finally:
        server.end()


@pytest.mark.parametrize("way", [EVERY_PROCESS, KILL])
def test_it_ends_while_it_speaks(way: str, tmp_path: Path) -> None:
    ends_while_it_speaks(tmp_path, way)


def test_without_its_raylet(server: ServerCommand, tmp_path: Path, port: int) -> None:
    server.ready()
    [raylet] = server.find(RAYLET)
    with Sampled(server) as sampled:
        os.kill(raylet, signal.SIGKILL)
        status = server.wait(within_s=30)
    server.leaves_nothing()
    assert status not in (0, -signal.SIGABRT)
    assert "raylet" in server.output.splitlines()[-1] or "raylet" in server.output.splitlines()[-2]
    assert 429 not in sampled.answers()
    speaks_again(tmp_path, port)
