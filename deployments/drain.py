"""What a replica learns about its own end, and the one place that looks into Serve for it.

Serve 2.60 tells user code nothing of a replica that it stops: it waits for its streams, up to two minutes. Scale-down,
a redeploy and a node that is drained (a spot notice, `ray drain-node`) all come this way.
"""

import asyncio
import logging
import os
from typing import Any

import ray
from ray import serve
from ray.serve.exceptions import RayServeException

from deployments.errors import Moved

logger = logging.getLogger(__name__)

_POLL_S = 0.25
# A broken replica's last words reach its callers within this time.
_LAST_WORDS_S = 0.25


class Departure:
    """Tells when this replica should hand its streams over; outside Serve it never does."""

    def __init__(self) -> None:
        self._noticing: asyncio.Task[None] | None = None
        self._is_due = False

    def check(self) -> None:
        """Raise Moved once Serve stops this replica and another one could take its streams over."""
        self._noticing = self._noticing or asyncio.create_task(self._notice())
        if self._is_due:
            raise Moved("the replica is being stopped")

    async def _notice(self) -> None:
        replica = _replica_impl()
        if replica is None:
            return
        while not replica._shutting_down:  # noqa: ASYNC110, Serve has no event for it
            await asyncio.sleep(_POLL_S)
        while not await asyncio.to_thread(_others_run):  # noqa: ASYNC110, nor for this
            await asyncio.sleep(_POLL_S)  # the only one speaks on, as long as Serve lets it
        logger.warning("this replica is stopped: its streams go on elsewhere")
        self._is_due = True


async def end_process(reason: str) -> None:
    """End a broken replica, so that Serve replaces it; outside Serve nothing happens.

    A router sends requests to the replica that has the fewest, and none has fewer than one that fails at once.
    """
    if _replica_impl() is None:
        return
    logger.error("this replica ends: %s", reason)
    await asyncio.sleep(_LAST_WORDS_S)
    os._exit(1)


def _replica_impl() -> Any:
    """Serve's own object around the user's class, None outside a replica."""
    try:
        serve.get_replica_context()
    except RayServeException:
        return None
    worker = ray._private.worker.global_worker
    return worker.actors[worker.actor_id]._replica_impl


def _others_run() -> bool:
    """Whether Serve counts running replicas of this deployment: one that it stops is not among them."""
    context = serve.get_replica_context()
    application = serve.status().applications.get(context.app_name)
    deployment = application.deployments.get(context.deployment) if application else None
    return deployment is not None and deployment.replica_states.get("RUNNING", 0) > 0
