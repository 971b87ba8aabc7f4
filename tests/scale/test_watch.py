"""One ingress replica asks the controller for all, on real Ray Serve; another one does when it dies."""

import asyncio
import os
import signal
from collections.abc import Callable

import pytest
from ray.actor import ActorHandle

from tests.scale.pools import BOUND_S
from tools.experiments.controller_load import Client, PoolSizes, Watching, deploy, started

pytestmark = pytest.mark.anyio

CLUSTER = PoolSizes(talkers=1, codecs=1, ingresses=3)
Known = dict[int, Watching]


async def until(client: ActorHandle, is_so: Callable[[Known], bool]) -> Known:
    async with asyncio.timeout(BOUND_S):
        while not is_so(found := await client.known.remote(CLUSTER.ingresses)):  # noqa: ASYNC110, other processes change it
            await asyncio.sleep(0.5)
    return found


def one_asks(found: Known) -> bool:
    """The replica of rank 0 has asked for a while, and no other one asks."""
    return found[0].asked >= 5 and found[1].asked == found[2].asked == 0


async def test_one_ingress_asks_for_all_and_its_successor_after_it() -> None:
    with started():
        await asyncio.to_thread(deploy, CLUSTER)
        client = Client.remote()  # type: ignore[attr-defined]  # Ray's
        found = await until(client, one_asks)
        assert all(watching.running == {"talker": 1, "codec": 1, "ingress": 3} for watching in found.values())
        os.kill(found[0].process, signal.SIGKILL)
        after = await until(client, lambda now: one_asks(now) and now[0].process != found[0].process)
        assert {after[1].process, after[2].process} == {found[1].process, found[2].process}
        assert all(watching.running["ingress"] == 3 for watching in after.values())
