"""How many replicas a server runs, read from Ray Serve's REST status while the load is on. Optional."""

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp

from loadtest.traces import Clock, RunFolder

PERIOD_S = 0.5
TIMEOUT = aiohttp.ClientTimeout(total=5)
FILE = "replicas.jsonl"


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


class NotServeStatusError(Exception):
    """The URL does not answer with Serve's status."""


def parse_status(document: Any) -> dict[str, ReplicaCount]:
    """Replica counts of every deployment in Serve's `GET /api/serve/applications/`. Raises NotServeStatusError.

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
        raise NotServeStatusError(f"not the status of Ray Serve ({error!r} is missing or of another type)") from error
    return counts


class ReplicaWatch:
    """Asks `url` for the replica counts, and writes them down. What cannot be read during the run is a gap in them."""

    def __init__(self, url: str, folder: RunFolder) -> None:
        self.url = url
        self.folder = folder

    async def check(self) -> None:
        """Raises NotServeStatusError, aiohttp.ClientError or TimeoutError unless the counts can be read."""
        async with aiohttp.ClientSession() as session:
            await self._read(session)

    async def watch(self, clock: Clock) -> None:
        """Sample until cancelled, in the time of `clock`."""
        async with aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError, NotServeStatusError):
                    counts = await self._read(session)
                    self.folder.append(FILE, asdict(Sample(clock.now_s(), counts)))
                await asyncio.sleep(PERIOD_S)

    async def _read(self, session: aiohttp.ClientSession) -> dict[str, ReplicaCount]:
        async with session.get(self.url, timeout=TIMEOUT) as response:
            if response.status != 200:
                raise NotServeStatusError(f"HTTP {response.status}")
            return parse_status(await response.json(content_type=None))


def read_samples(folder: RunFolder) -> list[Sample]:
    """What was sampled during a run, nothing if nothing was."""
    return [Sample.from_json(record) for record in folder.read_lines(FILE)]
