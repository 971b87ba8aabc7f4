"""The common part of replicas: they send heartbeats, hand their streams over, and end when they are broken.

Serve 2.60 does not tell a replica that it is stopped, but waits for the streams, at most two minutes. This is so for a
scale-down, a redeploy, and a node that is drained (a spot notice, `ray drain-node`).
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
from deployments.serving.collector import freeze_loaded
from deployments.serving.handles import ItemReader

logger = logging.getLogger(__name__)

_HEARTBEAT_S = 0.5  # without a chunk
_POLL_S = 0.25
_LAST_WORDS_S = 0.25  # for the errors of a broken replica to reach its callers

# Errors by which a replica refuses a request. Nothing has failed.
_REFUSALS = (InvalidRequest, Moved, NotReady, Overloaded)

C = TypeVar("C", FrameChunk, PcmChunk)


def is_failure(record: logging.LogRecord) -> bool:
    """Whether a log record of Serve is more than the traceback of a refusal.

    Serve logs a traceback for each call that raises, and an overload makes hundreds. Serve's line for the call stays.
    """
    return record.exc_info is None or not isinstance(record.exc_info[1], _REFUSALS)


class Replica:
    """Health and streams of a replica. Outside Serve it is never stopped and ends no process."""

    def __init__(self, lost: type[ReplicaLost], failure: Callable[[], str | None]) -> None:
        """`failure` returns the reason why the replica cannot recover, or None. Streams then end with `lost`."""
        if ray_private.this_replica() is not None:
            freeze_loaded()
        self._lost, self._failure = lost, failure
        self._ending: asyncio.Task[None] | None = None
        self._noticing: asyncio.Task[None] | None = None
        self._is_leaving = False
        self._name = ray_private.replica_name()
        logging.getLogger("ray.serve").addFilter(is_failure)

    def check_health(self) -> None:
        """Raise `lost` if this replica is broken. Its process then ends."""
        reason = self._failure()
        if reason is not None:
            self._ending = self._ending or asyncio.create_task(_end_process(reason))
            raise self._lost(reason)

    def check(self) -> None:
        """Raise `lost` if this replica is broken, Moved if Serve stops it while another one runs."""
        self.check_health()
        self._noticing = self._noticing or asyncio.create_task(self._notice())
        if self._is_leaving:
            raise Moved("the replica is being stopped")

    async def with_heartbeats(
        self, chunks: AsyncGenerator[C, None], heartbeat: C, stage: str
    ) -> AsyncGenerator[C, None]:
        """`chunks` with heartbeats: one at once, and one after each _HEARTBEAT_S without a chunk.

        Chunks with marks get one for `stage`, the first chunk gets this replica's. Raises as `check` does.
        """
        name = self._name
        async with aclosing(chunks):
            self.check()
            items = ItemReader(chunks)
            try:
                await asyncio.sleep(0)  # `chunks` asks the next stage before the heartbeat is packed and sent
                yield heartbeat
                while True:
                    self.check()
                    if not await items.wait(_HEARTBEAT_S):
                        yield heartbeat
                        continue
                    try:
                        chunk: C = items.take()
                    except StopAsyncIteration:
                        return
                    if name:
                        chunk = replace(chunk, trail=(*chunk.trail, (name, time.time_ns())))
                        name = ""
                    yield with_mark(chunk, stage)
            finally:
                await items.drop()

    async def _notice(self) -> None:
        replica = ray_private.this_replica()
        if replica is None:
            return
        while not ray_private.is_stopping(replica):  # noqa: ASYNC110, Serve has no event for it
            await asyncio.sleep(_POLL_S)
        while not await asyncio.to_thread(_others_run):  # noqa: ASYNC110, nor for this
            await asyncio.sleep(_POLL_S)  # the only replica continues to speak while Serve lets it
        logger.warning("this replica is stopped: its streams go on elsewhere")
        self._is_leaving = True


async def _end_process(reason: str) -> None:
    """End the process of a broken replica, so that Serve replaces it. Outside Serve nothing happens.

    Else a router would send it most requests, because a replica that fails at once has the fewest.
    """
    if ray_private.this_replica() is None:
        return
    logger.error("this replica ends: %s", reason)
    await asyncio.sleep(_LAST_WORDS_S)
    os._exit(1)


def _others_run() -> bool:
    """Whether this deployment has running replicas. Serve does not count a replica that it stops."""
    context = serve.get_replica_context()
    application = serve.status().applications.get(context.app_name)
    deployment = application.deployments.get(context.deployment) if application else None
    return deployment is not None and deployment.replica_states.get("RUNNING", 0) > 0
