"""Sockets of processes, as the kernel lists them."""

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

LISTENING = "0A"
ESTABLISHED = "01"


@dataclass(frozen=True, slots=True)
class Listener:
    pid: int
    address: IPv4Address | IPv6Address
    port: int

    @property
    def loopback(self) -> bool:
        mapped = self.address.ipv4_mapped if isinstance(self.address, IPv6Address) else None
        return (mapped or self.address).is_loopback


def listeners(pids: Iterable[int]) -> list[Listener]:
    listening = dict(entry for table in ("tcp", "tcp6") for entry in _table(Path("/proc/net") / table))
    return [Listener(pid, *listening[inode]) for pid in pids for inode in _inodes(pid) if inode in listening]


def unread(port: int) -> int:
    """How many connections to a port of this machine have brought what nobody has read yet."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    queued = [_address(row[1])[1] for row in rows if row[3] == ESTABLISHED and int(row[4].partition(":")[2], 16)]
    return queued.count(port)


def _table(file: Path) -> list[tuple[str, tuple[IPv4Address | IPv6Address, int]]]:
    rows = [line.split() for line in file.read_text().splitlines()[1:]]
    return [(row[9], _address(row[1])) for row in rows if row[3] == LISTENING]


def _address(text: str) -> tuple[IPv4Address | IPv6Address, int]:
    """The kernel prints each word of the address in the machine's byte order."""
    address, _, port = text.partition(":")
    words = [bytes.fromhex(address[start : start + 8])[::-1] for start in range(0, len(address), 8)]
    return ip_address(b"".join(words)), int(port, 16)


def _inodes(pid: int) -> set[str]:
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
        with contextlib.suppress(OSError):  # it may be closed while we look
            target = os.readlink(descriptor)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    return inodes
