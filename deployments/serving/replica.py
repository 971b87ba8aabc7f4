"""Behavior common to all replicas: they send heartbeats, hand over their streams, and exit when broken.

When Serve 2.60 stops a replica, it does not notify user code, but waits up to two minutes for its streams. Serve
stops replicas when scaling down or redeploying, and when a node is drained (a spot notice, `ray drain-node`).
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import TypeVar

from ray import serve

from deployments.errors import InvalidRequest, Moved, NotReady, Overloaded, ReplicaLost
from deployments.protocol import FrameChunk, PcmChunk, with_mark
from deployments.serving import ray_private
from deployments.serving.handles import ItemReader
from deployments.serving.processes import freeze_loaded

logger = logging.getLogger(__name__)

_HEARTBEAT_S = 0.5  # longest interval without a chunk
_POLL_S = 0.25
_LAST_WORDS_S = 0.25  # time for a broken replica's errors to reach its callers

# Errors that a replica rejects requests with. They are not failures of the replica.
_REFUSALS = (InvalidRequest, Moved, NotReady, Overloaded)

C = TypeVar("C", FrameChunk, PcmChunk)


def is_failure(record: logging.LogRecord) -> bool:
    """Return False for tracebacks of rejected requests, to filter them out of Serve's log.

    Serve logs a traceback for each call that raises an error, and an overload causes hundreds of rejections.
    """
    return record.exc_info is None or not isinstance(record.exc_info[1], _REFUSALS)


class Replica:
    """Health checks and streams of one replica. Outside Serve, a replica is never stopped and never exits."""

    def __init__(self, lost: type[ReplicaLost], failure: Callable[[], str | None]) -> None:
        """`failure` returns why the replica cannot recover, or None. `lost` is the error that ends its streams."""
        if ray_private.this_replica() is not None:
            freeze_loaded()
        self._lost, self._failure = lost, failure
        self._ending: asyncio.Task[None] | None = None
        self._noticing: asyncio.Task[None] | None = None
        self._is_leaving = False
        self._name = ray_private.replica_name()
        logging.getLogger("ray.serve").addFilter(is_failure)

    def check_health(self) -> None:
        """Raise `lost` if this replica is broken, and schedule the exit of its process."""
        reason = self._failure()
        if reason is not None:
            self._ending = self._ending or asyncio.create_task(_end_process(reason))
            raise self._lost(reason)

    def check(self) -> None:
        """Raise `lost` if this replica is broken, or Moved if Serve is stopping it while another one is running."""
        self.check_health()
        self._noticing = self._noticing or asyncio.create_task(self._notice())
        if self._is_leaving:
            raise Moved("the replica is being stopped")

    async def with_heartbeats(
        self, chunks: AsyncGenerator[C, None], heartbeat: C, stage: str
    ) -> AsyncGenerator[C, None]:
        """Yield `chunks` with heartbeats: one at the start, and one after each _HEARTBEAT_S without a chunk.

        Adds a mark for `stage` to chunks with marks, and this replica's name to the first trail. Raises like `check`.
        """
        name = self._name
        async with aclosing(chunks):
            self.check()
            items = ItemReader(chunks)
            try:
                await asyncio.sleep(0)  # lets `chunks` call the next stage before the heartbeat is sent
                yield heartbeat
                while True:
                    self.check()
                    if not await items.wait(_HEARTBEAT_S):
                        yield heartbeat
                        continue
                    try:
                        chunk: C = items.get_nowait()
                    except StopAsyncIteration:
                        return
                    if name:
                        chunk = replace(chunk, trail=(*chunk.trail, (name, time.time_ns())))
                        name = ""
                    yield with_mark(chunk, stage)
            finally:
                await items.aclose()

    async def _notice(self) -> None:
        replica = ray_private.this_replica()
        if replica is None:
            return
        while not ray_private.is_stopping(replica):  # noqa: ASYNC110, Serve has no event for it
            await asyncio.sleep(_POLL_S)
        while not await asyncio.to_thread(_others_run):  # noqa: ASYNC110, Serve has no event for this either
            await asyncio.sleep(_POLL_S)  # the only replica serves its streams until Serve ends it
        logger.warning("Serve is stopping this replica: its streams continue on other replicas")
        self._is_leaving = True


async def _end_process(reason: str) -> None:
    """Exit a broken replica's process so that Serve replaces it. Does nothing outside Serve.

    A router would send most requests to it, because a replica that fails quickly has the fewest ongoing calls.
    """
    if ray_private.this_replica() is None:
        return
    logger.error("this replica exits: %s", reason)
    await asyncio.sleep(_LAST_WORDS_S)
    os._exit(1)


def _others_run() -> bool:
    """Return whether this deployment has other running replicas. Serve does not count one that is stopping."""
    context = serve.get_replica_context()
    application = serve.status().applications.get(context.app_name)
    deployment = application.deployments.get(context.deployment) if application else None
    return deployment is not None and deployment.replica_states.get("RUNNING", 0) > 0
