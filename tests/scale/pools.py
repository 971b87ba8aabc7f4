"""Replica counts as Serve tells them."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from deployments.serving import ray_private
from serve_app.cli.serve.local_server import APP_NAME

# Bounds a hang: on two busy cores a replica takes half a minute to start.
BOUND_S = 180
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Sizes:
    talkers: tuple[int, int]
    codecs: tuple[int, int]


def pool_sizes() -> Sizes:
    pools = ray_private.pools(APP_NAME)
    return Sizes(*((pools[name].wanted, len(pools[name].running)) for name in ("Talker", "Codec")))


async def until(is_reached: Callable[[Sizes], bool]) -> list[Sizes]:
    """The different sizes up to those that fulfil `is_reached`."""
    history: list[Sizes] = []
    async with asyncio.timeout(BOUND_S):
        while True:
            now = await asyncio.to_thread(pool_sizes)
            if not history or now != history[-1]:
                history.append(now)
            if is_reached(now):
                return history
            await asyncio.sleep(_POLL_S)
