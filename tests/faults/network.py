"""Two hosts and a link between them that can be cut: network namespaces of this machine. Needs root and `ip`."""

import contextlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
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
        _ip("-n", self.far, "link", "set", self.far_end, "down")


def is_possible() -> bool:
    """Whether this machine lets us have namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    probe = f"talkray-{uuid.uuid4().hex[:6]}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False).returncode == 0
    if made:
        _ip("netns", "del", probe)
    return made


@contextlib.contextmanager
def linked() -> Iterator[Link]:
    """The namespaces, for as long as they are needed."""
    name = uuid.uuid4().hex[:6]
    link = Link(f"near-{name}", f"far-{name}", f"n{name}", f"f{name}")
    try:
        for namespace in (link.near, link.far):
            _ip("netns", "add", namespace)
            _ip("-n", namespace, "link", "set", "lo", "up")
        _ip("link", "add", link.near_end, "netns", link.near, "type", "veth", "peer", link.far_end, "netns", link.far)
        for namespace, end, address in ((link.near, link.near_end, NEAR_IP), (link.far, link.far_end, FAR_IP)):
            _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", end)
            _ip("-n", namespace, "link", "set", end, "up")
        yield link
    finally:
        for namespace in (link.near, link.far):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
