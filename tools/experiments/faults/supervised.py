"""A server that is started again whenever it ends, as systemd does it, and what its processes hold each second."""

import contextlib
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.black_box import (
    ENGINE,
    GCS,
    GONE_S,
    HAPROXY,
    INGRESS,
    MANAGER,
    RAYLET,
    TALKER,
    ServerCommand,
)

RESTART_S = 1.0  # RestartSec= of the unit
CLEARED = "cleared what a dead server left"
COMMAND = "serve command"
# Every kind of process of a server, and what its command line has.
KINDS = {
    "talker replica": TALKER,
    "engine process": ENGINE,
    "codec replica": "ServeReplica:talkray:Codec",
    "ingress replica": INGRESS,
    "HAProxy": HAPROXY,
    "HAProxy's manager": MANAGER,
    "Serve's own proxy": "ray::ProxyActor",
    "Serve controller": "ServeController",
    "raylet": RAYLET,
    "GCS": GCS,
    "runtime env agent": "ray::RuntimeEnvAgent",
    "dashboard agent": "ray::DashboardAgent",
    "dashboard": "dashboard/dashboard.py",
    "log monitor": "_private/log_monitor.py",
    "autoscaler monitor": "_private/monitor.py",
    "driver": "serve_app.cli.serve.driver",
}
# Without one of these the server ends, and its streams with it.
VITAL = ("raylet", "GCS", "runtime env agent", "dashboard agent", "driver", COMMAND)
# Ray does not replace these; nobody needs them.
SPARED = ("dashboard", "log monitor", "autoscaler monitor")
# Whose streams die with it.
CARRIERS = ("ingress replica", "HAProxy")


@dataclass(frozen=True, slots=True)
class ServerStart:
    """One start of the command."""

    at_s: float  # of time.monotonic()
    ended_s: float
    status: int
    cleared: bool  # it found remains of the one before
    left: tuple[str, ...]  # what was there GONE_S after its end
    last: str  # what it said at its end


@dataclass(frozen=True, slots=True)
class Held:
    """What one process holds."""

    kind: str
    mebibytes: float  # of its own: what it shares with others is left out
    files: int


def held(process: int, kind: str) -> Held:
    """Raises OSError once it has ended."""
    _, resident, shared = (int(each) for each in Path(f"/proc/{process}/statm").read_text().split()[:3])
    mebibytes = (resident - shared) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return Held(kind, mebibytes, len(os.listdir(f"/proc/{process}/fd")))


def kind_of(command: str) -> str:
    """Of the process with this command line."""
    return next((kind for kind, title in KINDS.items() if title in command), "other")


class SupervisedServer:
    """Keeps a server running until it is stopped."""

    def __init__(self, scratch: Path, port: int, arguments: tuple[str, ...], folder: Path) -> None:
        """`folder` is where the server makes its own ones."""
        self._scratch, self._port, self._arguments = scratch, port, arguments
        # Ray's workers give way to all others by default (nice 15): to the soak's own clients as well.
        self._environment = {"RAY_TMPDIR": str(folder), "RAY_worker_niceness": "0"}
        self._stopping = threading.Event()
        self._burials: list[threading.Thread] = []
        self.ended: list[ServerStart] = []
        self.server = self._start()
        self.started_s = [time.monotonic()]
        self._thread = threading.Thread(target=self._keep)
        self._thread.start()

    def find(self) -> dict[str, list[int]]:
        server = self.server
        found: dict[str, list[int]] = {COMMAND: [server.pid] if server.status is None else []}
        for process, command in server.processes().items():
            if process != server.pid:
                found.setdefault(kind_of(command), []).append(process)
        return found

    def survey(self) -> dict[int, Held]:
        seen = {}
        for kind, processes in self.find().items():
            for process in processes:
                with contextlib.suppress(OSError):
                    seen[process] = held(process, kind)
        return seen

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()
        self.server.end()
        for burial in self._burials:
            burial.join()

    def _start(self) -> ServerCommand:
        return ServerCommand(self._scratch, self._port, *self._arguments, environment=self._environment)

    def _keep(self) -> None:
        while not self._stopping.wait(0.05):
            if self.server.status is not None:
                burial = threading.Thread(target=self._bury, args=(self.server, self.started_s[-1], time.monotonic()))
                burial.start()
                self._burials.append(burial)
                self._stopping.wait(RESTART_S)
                self.server = self._start()
                self.started_s.append(time.monotonic())

    def _bury(self, server: ServerCommand, started_s: float, ended_s: float) -> None:
        """Nobody ends what a server has left, for as long as it has to end it."""
        while (left := server.processes()) and time.monotonic() < ended_s + GONE_S:
            time.sleep(0.1)
        assert server.status is not None
        output = server.output
        names = tuple(sorted(kind_of(command) for command in left.values()))
        last = output.strip().rpartition("\n")[2]
        self.ended.append(ServerStart(started_s, ended_s, server.status, CLEARED in output, names, last))
        server.end()
