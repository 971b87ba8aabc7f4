"""The kinds of processes of a server, and what one of them holds."""

import os
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.black_box import ENGINE, GCS, HAPROXY, INGRESS, MANAGER, RAYLET, TALKER

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
    "driver": "serve_app.cli.serve.driver",
}


@dataclass(frozen=True, slots=True)
class Held:
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
