"""Processes of one test run, found by a variable in the environment that they inherit, wherever they end up."""

import contextlib
import os
import signal
from pathlib import Path

MARK = "TALKRAY_TEST_RUN"


def marked(mark: str) -> dict[int, str]:
    """Command line of every living process that was started under `MARK=mark`, by its id."""
    wanted = f"{MARK}={mark}".encode()
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (process / "environ").read_bytes().split(b"\0"):
                found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def end_proxy(node_id: str) -> None:
    """Kill a HAProxy that outlived the actor that started it, in a cluster of which no `RunFolder` knows."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it may end while we look
            command = (process / "cmdline").read_bytes()
            if b"haproxy" in command and node_id.encode() in command:
                os.kill(int(process.name), signal.SIGKILL)
