"""Machines on one machine: each in a network, a PID and a mount namespace, all on one bridge.

Needs root and iproute2.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# Process 1 of a machine collects what its processes leave behind; its end takes all of them with it.
_INIT = 'trap : TERM; "$@" & wait $!; wait $!'
_FIRST = 2  # address of a machine; the one before is the bridge's
_BOUNDARY = ("unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")


@dataclass(slots=True)
class Machine:
    """A namespace with an address, and what runs in it."""

    name: str
    address: str
    namespace: str
    log: Path
    process: "subprocess.Popen[bytes] | None" = None

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Run a command as this machine's only service; everything that it starts ends with it."""
        inner = [*_BOUNDARY, "bash", "-c", _INIT, "init", *command]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *inner],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **environment},
            )

    @property
    def is_running(self) -> bool:
        """Whether its service has not ended."""
        return self.process is not None and self.process.poll() is None

    def service(self) -> int:
        """The process id, as seen from here, of the service itself."""
        assert self.process is not None
        process = self.process.pid
        for _ in ("unshare runs init", "init runs the service"):
            process = _children(process)[0]
        return process

    def inside(self, *command: str) -> list[str]:
        """A command line that runs in all of its namespaces."""
        assert self.process is not None
        init = _children(self.process.pid)[0]
        return ["nsenter", "--target", str(init), "--net", "--mount", "--pid", *command]

    def kill(self, process: int | None = None) -> None:
        """End one of its processes, by its id in there, or all at once as a power cut does."""
        if process is not None:
            subprocess.run(self.inside("kill", "-9", str(process)), check=True, capture_output=True)
            return
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def terminate(self) -> None:
        """Ask its service to end, as systemd and a container runtime do."""
        os.kill(self.service(), signal.SIGTERM)

    def tail(self) -> str:
        """The end of what its service has printed."""
        return self.log.read_text(errors="replace")[-3000:]


@dataclass(slots=True)
class Network:
    """The bridge, on which this process has the first address."""

    name: str
    prefix: str
    folder: Path
    machines: dict[str, Machine] = field(default_factory=dict)

    @property
    def gateway(self) -> str:
        return f"{self.prefix}.1"

    def machine(self, name: str) -> Machine:
        """Another machine; its address is the next one."""
        number = len(self.machines) + _FIRST
        namespace, ours, theirs = f"{self.name}-{name}", f"{self.name}{number}", f"{self.name}e{number}"
        _ip("netns", "add", namespace)
        _ip("link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", namespace)
        _ip("link", "set", ours, "master", self.name, "up")
        _ip("-n", namespace, "link", "set", "lo", "up")
        _ip("-n", namespace, "addr", "add", f"{self.prefix}.{number}/24", "dev", theirs)
        _ip("-n", namespace, "link", "set", theirs, "up")
        _ip("-n", namespace, "route", "add", "default", "via", f"{self.prefix}.1")
        machine = Machine(name, f"{self.prefix}.{number}", namespace, self.folder / f"{name}.log")
        self.machines[name] = machine
        return machine


def why_impossible() -> str | None:
    """Why this machine lets us have no others; None where it does."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "needs root and iproute2"
    try:
        with network(Path("/tmp")) as probe:
            machine = probe.machine("probe")
            subprocess.run(
                ["ip", "netns", "exec", machine.namespace, *_BOUNDARY, "true"],
                check=True,
                capture_output=True,
                text=True,
            )
    except subprocess.CalledProcessError as error:
        return str(error.stderr).strip()
    return None


@contextlib.contextmanager
def network(folder: Path) -> Iterator[Network]:
    """A bridge, for as long as it is needed; logs of the machines go to `folder`."""
    name = f"tk{uuid.uuid4().hex[:5]}"
    prefix = f"10.{os.getpid() % 100 + 100}.{uuid.uuid4().int % 250}"
    _ip("link", "add", name, "type", "bridge")
    made = Network(name, prefix, folder)
    try:
        _ip("addr", "add", f"{prefix}.1/24", "dev", name)
        _ip("link", "set", name, "up")
        yield made
    finally:
        for number, machine in enumerate(made.machines.values(), _FIRST):
            if machine.is_running:
                machine.kill()
            _ip("link", "del", f"{name}{number}")  # a namespace may live on for minutes, and its link with it
            _ip("netns", "del", machine.namespace)
        _ip("link", "del", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def _children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
