"""The link to a host is cut, or slow: nobody closes a connection, packets only stop to arrive, or arrive late."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.faults import network
from tests.faults.cut import NOW

DELAY_S = 0.025  # each way


@pytest.mark.parametrize("fault", ["cut", "delay"])
def test_streams_of_a_host_go_on_when_its_link(fault: str) -> None:
    obstacle = network.why_impossible()
    if obstacle is not None:
        pytest.skip(obstacle)
    # A short path: Ray's sockets are in there.
    with network.linked() as link, tempfile.TemporaryDirectory(prefix="cut", ignore_cleanup_errors=True) as scratch:
        order = network.inside(link.near, sys.executable, "-m", "tests.faults.cut", link.far, scratch)
        path = Path(scratch) / "cut.log"
        with path.open("w") as log, subprocess.Popen(order, stdout=subprocess.PIPE, stderr=log, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.strip() != NOW:
                    print(fault, line, end="")
                elif fault == "cut":
                    link.wire.is_cut = True
                else:
                    link.wire.delay_s = DELAY_S
        logs = "".join(path.read_text() for path in Path(scratch).glob("*.log"))
    assert process.returncode == 0, logs
