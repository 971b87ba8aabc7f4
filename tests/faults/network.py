"""Two hosts and a link between them that can be cut or slow: network namespaces, which need root and iproute2."""

import contextlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

NEAR_IP, FAR_IP = "10.77.0.1", "10.77.0.2"


@dataclass(frozen=True, slots=True)
class Link:
    """Names of the two namespaces and of the link's ends in them."""

    near: str
    far: str
    near_end: str
    far_end: str

    def inside(self, namespace: str, *command: str) -> list[str]:
        """A command line that runs in one of the namespaces."""
        return ["ip", "netns", "exec", namespace, *command]

    def cut(self) -> None:
        """From now on nothing arrives at either side, and nobody is told."""
        _run("ip", "-n", self.far, "link", "set", self.far_end, "down")

    def delay(self, each_way_ms: int) -> None:
        """From now on packets take so much longer in both directions."""
        for namespace, end in ((self.near, self.near_end), (self.far, self.far_end)):
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", end, "root", "netem", "delay", f"{each_way_ms}ms")


def why_impossible() -> str | None:
    """Why this machine lets us have no two hosts; None where it does."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "needs root and iproute2"
    return _failure(lambda link: None)


def why_no_delay() -> str | None:
    """Why packets cannot be delayed here: not every kernel has netem."""
    return why_impossible() or _failure(lambda link: link.delay(1))


def _failure(use: Callable[[Link], None]) -> str | None:
    try:
        with linked() as link:
            use(link)
    except (OSError, subprocess.CalledProcessError) as error:
        return str(getattr(error, "stderr", error)).strip()
    return None


@contextlib.contextmanager
def linked() -> Iterator[Link]:
    """The namespaces, for as long as they are needed."""
    name = uuid.uuid4().hex[:6]
    link = Link(f"near-{name}", f"far-{name}", f"n{name}", f"f{name}")
    try:
        for namespace in (link.near, link.far):
            _run("ip", "netns", "add", namespace)
            _run("ip", "-n", namespace, "link", "set", "lo", "up")
        ends = ["netns", link.near, "type", "veth", "peer", link.far_end, "netns", link.far]
        _run("ip", "link", "add", link.near_end, *ends)
        for namespace, end, address in ((link.near, link.near_end, NEAR_IP), (link.far, link.far_end, FAR_IP)):
            _run("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", end)
            _run("ip", "-n", namespace, "link", "set", end, "up")
        yield link
    finally:
        for namespace in (link.near, link.far):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
