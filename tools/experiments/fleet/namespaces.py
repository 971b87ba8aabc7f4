"""Simulated machines on one machine: each in its own network, PID and mount namespaces, all on one bridge.

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

# Process 1 of a machine reaps orphaned processes, and all processes end with it.
_INIT = 'trap : TERM; "$@" & wait $!; wait $!'
_FIRST = 2  # address of the first machine; the bridge has the previous address
_BOUNDARY = ("unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")


@dataclass(slots=True)
class Machine:
    """Namespaces with an address, and the service that runs in them."""

    name: str
    address: str
    namespace: str
    log: Path
    process: "subprocess.Popen[bytes] | None" = None

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Run a command as the machine's only service. All its descendants end with it."""
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
        """Return whether the service is running."""
        return self.process is not None and self.process.poll() is None

    def service(self) -> int:
        """Return the service's process id in this namespace."""
        assert self.process is not None
        process = self.process.pid
        for _ in ("unshare runs init", "init runs the service"):
            process = _children(process)[0]
        return process

    def inside(self, *command: str) -> list[str]:
        """Return a command line that runs inside all of the machine's namespaces."""
        assert self.process is not None
        init = _children(self.process.pid)[0]
        return ["nsenter", "--target", str(init), "--net", "--mount", "--pid", *command]

    def kill(self, process: int | None = None) -> None:
        """Kill one process by its id inside the machine, or kill all processes, like a power cut."""
        if process is not None:
            subprocess.run(self.inside("kill", "-9", str(process)), check=True, capture_output=True)
            return
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def terminate(self) -> None:
        """Send SIGTERM to the service, as systemd and container runtimes do."""
        os.kill(self.service(), signal.SIGTERM)

    def tail(self) -> str:
        """Return the last output of the service."""
        return self.log.read_text(errors="replace")[-3000:]


@dataclass(slots=True)
class Network:
    """Network bridge, whose first address belongs to this process."""

    name: str
    prefix: str
    folder: Path
    machines: dict[str, Machine] = field(default_factory=dict)

    @property
    def gateway(self) -> str:
        return f"{self.prefix}.1"

    def machine(self, name: str) -> Machine:
        """Create a machine with the next address."""
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
    """Return the reason why namespaces are unavailable here, or None if they are available."""
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
    """Create a bridge within the context. Logs of the machines go to `folder`."""
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
            _ip("link", "del", f"{name}{number}")  # a namespace and its link may persist for minutes
            _ip("netns", "del", machine.namespace)
        _ip("link", "del", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def _children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
