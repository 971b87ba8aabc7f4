"""The link to a host is cut, or slow: nobody closes a connection, packets only stop to arrive, or arrive late."""

import subprocess
import sys
import tempfile
from dataclasses import astuple
from pathlib import Path

import pytest

from tests.faults import network

BOUND_S = 300


def test_streams_of_a_host_that_is_cut_off_go_on() -> None:
    _speak("cut", network.why_impossible())


def test_a_slow_link_changes_nothing() -> None:
    _speak("delay", network.why_no_delay())


def _speak(fault: str, obstacle: str | None) -> None:
    if obstacle is not None:
        pytest.skip(obstacle)
    # A short path: Ray's sockets are in there.
    with network.linked() as link, tempfile.TemporaryDirectory(prefix="cut", ignore_cleanup_errors=True) as scratch:
        command = [sys.executable, "-m", "tests.faults.cut", fault, *astuple(link), scratch]
        done = subprocess.run(
            link.inside(link.near, *command), capture_output=True, text=True, timeout=BOUND_S, check=False
        )
        logs = "".join(path.read_text() for path in Path(scratch).glob("*.log"))
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr + logs
