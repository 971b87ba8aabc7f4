"""Read a server's replica counts while it is under load, from Ray Serve's status or from Talkray's metrics."""

import asyncio
import contextlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp

from loadtest.traces import Clock, LoadTestError, TraceFolder

PERIOD_S = 0.5
TIMEOUT = aiohttp.ClientTimeout(total=5)
FILE = "replicas.jsonl"
GAUGE = re.compile(r'^(?:ray_)?talkray_replicas_(wanted|running)\{[^}]*\bpool="(\w+)"[^}]*\}\s+(\S+)', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ReplicaCount:
    """Replicas of one deployment at one point in time."""

    running: int
    target: int | None  # None if the server does not report the target


@dataclass(frozen=True, slots=True)
class ReplicaSample:
    """Replicas of all deployments at one point in time, counted in seconds from the start of the run."""

    time_s: float
    deployments: Mapping[str, ReplicaCount]


class NoReplicaCountsError(LoadTestError):
    """Raised if a URL does not return replica counts."""


def parse(body: str) -> dict[str, ReplicaCount]:
    """Parse Serve's status or Talkray's metrics into replica counts. Raises `NoReplicaCountsError`."""
    return parse_status(body) if body.lstrip().startswith(("{", "[", "<", "null")) else parse_metrics(body)


def parse_status(body: str) -> dict[str, ReplicaCount]:
    """Return the replica counts in Serve's `GET /api/serve/applications/`, summed over deployments of the same name."""
    counts: dict[str, ReplicaCount] = {}
    try:
        for application in json.loads(body)["applications"].values():
            for name, deployment in application["deployments"].items():
                before, target = counts.get(name, ReplicaCount(0, 0)), deployment.get("target_num_replicas")
                running = sum(replica["state"] == "RUNNING" for replica in deployment["replicas"])
                total = None if target is None or before.target is None else before.target + target
                counts[name] = ReplicaCount(before.running + running, total)
    except ValueError as error:
        raise NoReplicaCountsError(f"invalid JSON ({error})") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise NoReplicaCountsError(f"not the status of Ray Serve ({error!r} is missing or of another type)") from error
    return counts


def parse_metrics(body: str) -> dict[str, ReplicaCount]:
    """Return the replica counts of every pool in Prometheus text format. Raises `NoReplicaCountsError`.

    Every ingress replica reports the counts. The largest count is used, because idle ingress replicas may report old
    counts.
    """
    found: dict[str, dict[str, int]] = {}
    for kind, pool, value in GAUGE.findall(body):
        counts = found.setdefault(pool, {})
        counts[kind] = max(counts.get(kind, 0), int(float(value)))
    if not found:
        raise NoReplicaCountsError("metrics without talkray_replicas_running, which appears ten seconds after start")
    return {pool: ReplicaCount(counts.get("running", 0), counts.get("wanted")) for pool, counts in found.items()}


async def read_counts(session: aiohttp.ClientSession, url: str) -> dict[str, ReplicaCount]:
    """Read the current counts. Raises `LoadTestError`, `aiohttp.ClientError` or `TimeoutError`."""
    is_ray = "/api/serve/" in url  # anyone with the token can run code, so send it only to Ray
    async with session.get(url, timeout=TIMEOUT, headers=_ray_token() if is_ray else {}) as response:
        body = await response.text()
    if is_ray and response.status in (401, 403):
        raise LoadTestError(f"{url} returned {body!r}. Set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to Ray's token")
    if response.status != 200:
        raise NoReplicaCountsError(f"HTTP {response.status}")
    return parse(body)


def _ray_token() -> dict[str, str]:
    """Return the header with the token that Ray's own commands would send, or an empty dictionary."""
    token, path = os.environ.get("RAY_AUTH_TOKEN"), os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token"
    with contextlib.suppress(OSError):
        token = token or Path(os.path.expanduser(path)).read_text(encoding="utf-8").strip()
    return {"Authorization": f"Bearer {token}"} if token else {}


async def watch(url: str, clock: Clock, *, folder: TraceFolder) -> None:
    """Write the counts, with times from `clock`, until cancelled. If they cannot be read, there is a gap."""
    async with aiohttp.ClientSession() as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, LoadTestError):
                counts = await read_counts(session, url)
                folder.append(FILE, asdict(ReplicaSample(clock.now_s(), counts)))
            await asyncio.sleep(PERIOD_S)


def read_samples(folder: TraceFolder) -> list[ReplicaSample]:
    """Return the samples of a run; empty if none were recorded."""
    return [
        ReplicaSample(record["time_s"], {name: ReplicaCount(**count) for name, count in record["deployments"].items()})
        for record in folder.read_lines(FILE)
    ]
