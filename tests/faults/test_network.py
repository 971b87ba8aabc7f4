"""The link to a host is cut: nobody closes a connection, packets only stop to arrive."""

import subprocess
import sys
import tempfile
from dataclasses import astuple

import pytest

from tests.faults import network


@pytest.mark.skipif(not network.is_possible(), reason="needs root and network namespaces")
def test_streams_of_a_host_that_is_cut_off_go_on() -> None:
    # A short path: Ray's sockets are in there.
    with network.linked() as link, tempfile.TemporaryDirectory(prefix="cut") as scratch:
        command = [sys.executable, "-m", "tests.faults.cut", *astuple(link), scratch]
        done = subprocess.run(
            link.inside(link.near, *command), capture_output=True, text=True, timeout=300, check=False
        )
    assert done.returncode == 0, done.stdout + done.stderr
