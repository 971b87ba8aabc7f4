"""Two hosts on one machine and a wire between them that can be slow or cut: network namespaces and a relay.

Needs root, iproute2 and /dev/net/tun. Kernels with netem could delay packets themselves; not all have it.
"""

import contextlib
import fcntl
import os
import select
import shutil
import struct
import subprocess
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

NEAR_IP, FAR_IP = "10.77.0.1", "10.77.0.2"
_MTU = 9000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_POLL_S = 0.05


class Wire:
    """Carries packets from each end to the other, in a thread of its own."""

    def __init__(self, ends: tuple[int, int]) -> None:
        self.delay_s = 0.0
        self.is_cut = False  # then nothing arrives at either side, and nobody is told
        self._ends = ends
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._carry, name="wire")

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._ended.set()
            self._thread.join()

    def _carry(self) -> None:
        one, other = self._ends
        across = {one: other, other: one}
        under_way: deque[tuple[float, int, bytes]] = deque()
        while not self._ended.is_set():
            wait_s = min(_POLL_S, max(0.0, under_way[0][0] - time.monotonic())) if under_way else _POLL_S
            readable, _, _ = select.select(self._ends, [], [], wait_s)
            now_s = time.monotonic()
            under_way.extend((now_s + self.delay_s, across[end], os.read(end, _MTU)) for end in readable)
            while under_way and under_way[0][0] <= now_s:
                _, end, packet = under_way.popleft()
                if not self.is_cut:
                    with contextlib.suppress(OSError):  # the namespace at the other end is being taken down
                        os.write(end, packet)


@dataclass(frozen=True, slots=True)
class Link:
    """The names of two namespaces, and the wire between them."""

    near: str
    far: str
    wire: Wire


def inside(namespace: str, *command: str) -> list[str]:
    return ["ip", "netns", "exec", namespace, *command]


def why_impossible() -> str | None:
    """Why this machine lets us have no two hosts; None where it does."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "needs root and iproute2"
    try:
        with linked():
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        return str(getattr(error, "stderr", error)).strip()


@contextlib.contextmanager
def linked() -> Iterator[Link]:
    """The namespaces, for as long as they are needed."""
    name = uuid.uuid4().hex[:6]
    near, far = f"near-{name}", f"far-{name}"
    with contextlib.ExitStack() as opened:
        ends = []
        for namespace, end, addresses in ((near, f"n{name}", (NEAR_IP, FAR_IP)), (far, f"f{name}", (FAR_IP, NEAR_IP))):
            _ip("netns", "add", namespace)
            opened.callback(_ip, "netns", "del", namespace)
            _ip("-n", namespace, "link", "set", "lo", "up")
            ends.append(_tun(end))
            opened.callback(os.close, ends[-1])
            _ip("link", "set", end, "netns", namespace)
            _ip("-n", namespace, "addr", "add", addresses[0], "peer", addresses[1], "dev", end)
            _ip("-n", namespace, "link", "set", end, "mtu", str(_MTU), "up")
        wire = Wire((ends[0], ends[1]))
        with wire.running():
            yield Link(near, far, wire)


def _tun(name: str) -> int:
    """An interface whose packets are read and written here; it may move to any namespace."""
    end = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return end


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
