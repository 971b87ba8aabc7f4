"""How many replicas a server runs, read while the load is on: from Ray Serve's status or from Talkray's metrics."""

import asyncio
import contextlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp

from loadtest.traces import Clock, RunFolder

PERIOD_S = 0.5
TIMEOUT = aiohttp.ClientTimeout(total=5)
FILE = "replicas.jsonl"
GAUGE = re.compile(r'^(?:ray_)?talkray_replicas_(wanted|running)\{[^}]*\bpool="(\w+)"[^}]*\}\s+(\S+)', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ReplicaCount:
    """One deployment at one moment."""

    running: int
    target: int | None  # None: the server does not say


@dataclass(frozen=True, slots=True)
class Sample:
    """All deployments at one moment, in seconds since the start of the run."""

    time_s: float
    deployments: Mapping[str, ReplicaCount]

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Sample":
        """The sample that `replicas.jsonl` holds."""
        counts = {name: ReplicaCount(**count) for name, count in record["deployments"].items()}
        return cls(record["time_s"], counts)


class NoReplicaCountsError(Exception):
    """The URL does not answer with replica counts."""


Parse = Callable[[str], dict[str, ReplicaCount]]  # a body; raises NoReplicaCountsError


def parse_status(body: str) -> dict[str, ReplicaCount]:
    """Replica counts in the JSON of Serve's `GET /api/serve/applications/`. Raises NoReplicaCountsError."""
    try:
        return count_deployments(json.loads(body))
    except ValueError as error:
        raise NoReplicaCountsError(f"what is no JSON ({error})") from error


def parse_metrics(body: str) -> dict[str, ReplicaCount]:
    """Replica counts of every pool in Prometheus' text format. Raises NoReplicaCountsError.

    Every ingress replica tells them: the greatest counts, since one that is not asked any more may tell old ones.
    """
    told: dict[str, dict[str, int]] = {}
    for kind, pool, value in GAUGE.findall(body):
        counts = told.setdefault(pool, {})
        counts[kind] = max(counts.get(kind, 0), int(float(value)))
    if not told:
        raise NoReplicaCountsError("metrics without talkray_replicas_running (they come ten seconds after the start)")
    return {pool: ReplicaCount(counts.get("running", 0), counts.get("wanted")) for pool, counts in told.items()}


def count_deployments(document: Any) -> dict[str, ReplicaCount]:
    """Replica counts of every deployment in Serve's status. Raises NoReplicaCountsError.

    Deployments of the same name in several applications are added up.
    """
    counts: dict[str, ReplicaCount] = {}
    try:
        for application in document["applications"].values():
            for name, deployment in application["deployments"].items():
                before = counts.get(name, ReplicaCount(0, 0))
                running = sum(replica["state"] == "RUNNING" for replica in deployment["replicas"])
                target = deployment.get("target_num_replicas")
                total = None if target is None or before.target is None else before.target + target
                counts[name] = ReplicaCount(before.running + running, total)
    except (KeyError, TypeError, AttributeError) as error:
        raise NoReplicaCountsError(f"not the status of Ray Serve ({error!r} is missing or of another type)") from error
    return counts


class ReplicaWatch:
    """Asks `url` for the replica counts, and writes them down. What cannot be read during the run is a gap in them."""

    def __init__(self, url: str, folder: RunFolder, *, parse: Parse) -> None:
        self.url = url
        self.folder = folder
        self._parse = parse

    async def check(self) -> None:
        """Raises NoReplicaCountsError, aiohttp.ClientError or TimeoutError unless the counts can be read."""
        async with aiohttp.ClientSession() as session:
            await self._read(session)

    async def watch(self, clock: Clock) -> None:
        """Sample until cancelled, in the time of `clock`."""
        async with aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError, NoReplicaCountsError):
                    counts = await self._read(session)
                    self.folder.append(FILE, asdict(Sample(clock.now_s(), counts)))
                await asyncio.sleep(PERIOD_S)

    async def _read(self, session: aiohttp.ClientSession) -> dict[str, ReplicaCount]:
        async with session.get(self.url, timeout=TIMEOUT) as response:
            if response.status != 200:
                raise NoReplicaCountsError(f"HTTP {response.status}")
            return self._parse(await response.text())


def read_samples(folder: RunFolder) -> list[Sample]:
    """What was sampled during a run, nothing if nothing was."""
    return [Sample.from_json(record) for record in folder.read_lines(FILE)]
