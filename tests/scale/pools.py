"""Replica counts as Serve tells them."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ray import serve

from serve_app.local_server import APP_NAME

# Bounds a hang: on two busy cores a replica takes half a minute to start.
BOUND_S = 180
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Sizes:
    """Replicas wanted and running."""

    talkers: tuple[int, int]
    codecs: tuple[int, int]


def sizes(replica_states: Mapping[Any, int]) -> tuple[int, int]:
    """Replicas wanted, those that start included and those that stop not; and replicas that run. By Serve's states."""
    states = {str(getattr(state, "value", state)): count for state, count in replica_states.items()}
    return sum(count for state, count in states.items() if state != "STOPPING"), states.get("RUNNING", 0)


def pool_sizes() -> Sizes:
    deployments = serve.status().applications[APP_NAME].deployments
    return Sizes(*(sizes(deployments[name].replica_states) for name in ("Talker", "CodecDecoder")))


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
