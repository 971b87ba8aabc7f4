"""The quickest of the ways in which a server may end; tests/faults/test_ends.py has the others."""

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.black_box import RAYLET, Sampled, ServerCommand, ends_while_it_speaks

EVERY_PROCESS, KILL = "TERM to every process", "KILL to the process"


def test_it_ends_while_it_speaks(tmp_path: Path, port: int) -> None:
    ends_while_it_speaks(tmp_path, port, KILL)


@pytest.mark.faults
def test_without_its_raylet(started: ServerCommand, tmp_path: Path, port: int) -> None:
    """It ends; the next one, as under a supervisor, speaks on the same port and ends in another way."""
    started.ready()
    [raylet] = started.find(RAYLET)
    with Sampled(started) as sampled:
        os.kill(raylet, signal.SIGKILL)
        status = started.wait(within_s=30)
    started.leaves_nothing()
    assert status not in (0, -signal.SIGABRT)
    assert "raylet" in started.output.splitlines()[-1] or "raylet" in started.output.splitlines()[-2]
    assert 429 not in sampled.answers()
    ends_while_it_speaks(tmp_path, port, EVERY_PROCESS)
