"""One ingress replica asks the controller for all, on real Ray Serve; another one does when it dies."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import ray
from ray import serve
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle

from serve_app.scaling.pool_watch import PoolWatch
from tests.scale.pools import BOUND_S

pytestmark = pytest.mark.anyio

APP, INGRESSES = "watched", 3


@dataclass(frozen=True, slots=True)
class Watching:
    """What the watch of one ingress replica has seen and done."""

    process: int
    rank: int
    asked: int  # the controller, in a row
    running: dict[str, int]  # replicas by pool


class Idle:
    def __init__(self, *called: DeploymentHandle) -> None: ...


class WatchingIngress:
    """Watches the pools as ours does."""

    def __init__(self, *called: DeploymentHandle) -> None:
        self._watch = PoolWatch(APP, {"": ("Talker", "Codec")})

    def knows(self) -> Watching:
        running = {name: len(pool.running) for name, pool in self._watch._snapshot.pools.items()}
        rank = serve.get_replica_context().rank
        return Watching(os.getpid(), rank.rank if rank else -1, self._watch._asked, running)


@ray.remote(num_cpus=0)
class Client:
    """A handle belongs to one event loop, and an actor has one for its life."""

    async def known(self) -> dict[int, Watching]:
        """What each ingress replica knows, by its rank, once all have answered."""
        handle, found = serve.get_deployment_handle("Ingress", APP), dict[int, Watching]()
        while len(found) < INGRESSES:
            with contextlib.suppress(RayError):  # one has died
                watching: Watching = await handle.knows.remote()
                found[watching.rank] = watching
        return found


Known = dict[int, Watching]


def deployed(name: str, kind: type, *called: serve.Application, replicas: int = 1) -> serve.Application:
    options = {"ray_actor_options": {"num_cpus": 0.001}, "num_replicas": replicas, "health_check_period_s": 2}
    return serve.deployment(name=name, **options)(kind).bind(*called)


async def until(client: ActorHandle, is_so: Callable[[Known], bool]) -> Known:
    async with asyncio.timeout(BOUND_S):
        while not is_so(found := await client.known.remote()):  # noqa: ASYNC110, other processes change it
            await asyncio.sleep(0.5)
    return found


def one_asks(found: Known) -> bool:
    """The replica of rank 0 has asked for a while, and no other one asks."""
    return found[0].asked >= 5 and found[1].asked == found[2].asked == 0


async def test_one_ingress_asks_for_all_and_its_successor_after_it() -> None:
    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        serve.start(proxy_location="Disabled")
        codec = deployed("Codec", Idle, deployed("Talker", Idle))
        app = deployed("Ingress", WatchingIngress, codec, replicas=INGRESSES)
        await asyncio.to_thread(serve.run, app, name=APP, route_prefix=None)
        client = Client.remote()  # type: ignore[attr-defined]  # Ray's
        found = await until(client, one_asks)
        assert all(watching.running == {"talker": 1, "codec": 1, "ingress": 3} for watching in found.values())
        os.kill(found[0].process, signal.SIGKILL)
        after = await until(client, lambda now: one_asks(now) and now[0].process != found[0].process)
        assert {after[1].process, after[2].process} == {found[1].process, found[2].process}
        assert all(watching.running["ingress"] == 3 for watching in after.values())
    finally:
        serve.shutdown()
        ray.shutdown()
