"""Find processes of one test run by an inherited environment variable."""

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

MARK = "TALKRAY_TEST_RUN"


def marked(mark: str) -> dict[int, str]:
    """Return the command lines of all living processes started with `MARK=mark`, by process id."""
    wanted = f"{MARK}={mark}".encode()
    commands = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (process / "environ").read_bytes().split(b"\0"):
                commands[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return commands


def end_marked(mark: str) -> None:
    """End all processes started with `MARK=mark`."""
    while running := marked(mark):
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def suspend(process: int, bound_s: float) -> None:
    """Stop every thread of a process, and wait until all have stopped. SIGSTOP alone returns earlier."""
    os.kill(process, signal.SIGSTOP)
    until_s = time.monotonic() + bound_s
    while set(states := _thread_states(process)) != {"T"}:
        assert time.monotonic() < until_s, f"threads of process {process} are in the states {states}"
        time.sleep(0.001)


def _thread_states(process: int) -> list[str]:
    """Return states as `ps` names them: R is running, S sleeping, T stopped."""
    stats = [file.read_text() for file in Path(f"/proc/{process}/task").glob("*/stat")]
    return [stat.rpartition(")")[2].split()[0] for stat in stats]


def read_logs(processes: Mapping[int, str]) -> dict[Path, bytes]:
    """Return the contents of all Ray log files for these processes, which must include the control store."""
    [gcs] = [command for command in processes.values() if "gcs_server" in command]
    folder = Path(gcs.split("--log_dir=")[1].split()[0])
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def end_proxy(node_id: str) -> None:
    """Kill a HAProxy that outlived its actor, in a cluster without a `RunFolder`."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process may exit meanwhile
            command = (process / "cmdline").read_bytes()
            if b"haproxy" in command and node_id.encode() in command:
                os.kill(int(process.name), signal.SIGKILL)
