"""How many cases: a few in `make test`, always the same; `TALKRAY_FUZZ_CASES` of each kind in `make fuzz`."""

import asyncio
import gc
import os
import random
import resource
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings

NUM_CASES = int(os.environ.get("TALKRAY_FUZZ_CASES", "40"))
SEED = int(os.environ.get("TALKRAY_FUZZ_SEED", "0"))
# Bounds a hang; no case takes nearly as long, also where other processes have most of the processor.
BOUND_S = 120
MOST_TURN_S = 0.2
MOST_GROWTH_KIB = 64 << 10

settings.register_profile(
    "fuzz", derandomize="TALKRAY_FUZZ_CASES" not in os.environ, max_examples=NUM_CASES, deadline=None,
    database=None, suppress_health_check=list(HealthCheck),
)  # fmt: skip
settings.load_profile("fuzz")


@asynccontextmanager
async def unstalled() -> AsyncIterator[None]:
    """No turn of the event loop takes `MOST_TURN_S` of the processor, so that an answer to `/health` is never later.

    The time of this thread counts, not that of a clock: other processes may have the processor meanwhile.
    """
    longest_s = 0.0

    async def beat() -> None:
        nonlocal longest_s
        while True:
            begun_s = time.thread_time()
            await asyncio.sleep(0.002)
            longest_s = max(longest_s, time.thread_time() - begun_s)

    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    beating = asyncio.create_task(beat())
    try:
        await asyncio.sleep(0)
        yield
        await asyncio.sleep(0.003)
    finally:
        beating.cancel()
        await asyncio.wait((beating,))
    assert longest_s < MOST_TURN_S, f"the event loop stood still for {longest_s:.2f} s"
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    assert grown_kib < MOST_GROWTH_KIB, f"{grown_kib} KiB for one case"


@dataclass(slots=True)
class Cases:
    outcomes: dict[str, int] = field(default_factory=dict)

    def count(self, outcome: object) -> None:
        self.outcomes[str(outcome)] = self.outcomes.get(str(outcome), 0) + 1

    def __iter__(self) -> Iterator[random.Random]:
        """One source of chance for each case: its number says how to make it again."""
        for number in range(NUM_CASES):
            yield random.Random(f"{SEED}.{number}")


@pytest.fixture
def cases(request: pytest.FixtureRequest) -> Iterator[Cases]:
    counted = Cases()
    gc.collect()
    gc.freeze()  # the collector's time is bounded by what a case makes, not by what the tests before it left
    yield counted
    outcomes = ", ".join(f"{name}: {number}" for name, number in sorted(counted.outcomes.items()))
    print(f"\n{request.node.name}: {sum(counted.outcomes.values())} cases ({outcomes})")  # noqa: T201
