"""The quickest of the ways in which a server may end; tests/faults/test_ends.py has the others."""

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.black_box import GCS, RAYLET, Sampled, ServerCommand, ends_while_it_speaks

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


@pytest.mark.faults
@pytest.mark.parametrize(("title", "interrupted"), [(RAYLET, False), (GCS, False), (GCS, True)])
def test_a_start_waits_for_parts_of_ray_that_get_no_time(started: ServerCommand, title: str, interrupted: bool) -> None:
    """Ray itself gives up after half a minute. A stopped process stands for one of an overloaded machine."""
    while not (found := started.find(title)):
        assert started.status is None, started.output
    for process in found:
        os.kill(process, signal.SIGSTOP)
    started.reach("starting Ray: 20 s" if interrupted else "starting Ray: 70 s", within_s=120)
    if interrupted:
        started.signal_group(signal.SIGINT)
        started.wait(within_s=5)
        started.leaves_nothing()
        return
    for process in found:
        os.kill(process, signal.SIGCONT)
    started.ready()
