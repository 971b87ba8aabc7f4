"""Restart HAProxy as soon as it dies, and keep it when the actor that manages it dies.

Serve polls HAProxy's admin socket every ten seconds, takes three misses for its death, and then replaces the actor,
which must first learn of all replicas: 26 s without a listener, then 404. Here the actor, which knows the replicas,
starts another HAProxy. If the actor died, its successor would find the port taken by a HAProxy that does not learn of
new replicas. Here it takes over from that process, as in a reload.

Serve has no setting for the actor's class, but calls a function of ours in its controller before the first one is made
(RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH).
"""

import asyncio
import contextlib
import logging
from pathlib import Path

import ray
from ray.serve._private import controller
from ray.serve._private.haproxy import HAProxyManager

logger = logging.getLogger("ray.serve")

_POLL_S = 0.1
_REPLICAS_KNOWN_S = 10.0


class KeptHAProxyManager(HAProxyManager.__ray_metadata__.modified_class.__ray_actor_class__):  # type: ignore[misc]
    """Serve's manager of HAProxy, extended to keep it alive.

    It derives from the class as Serve wrote it, not from the one that `ray.remote` made. Ray would take a class derived
    from the latter for the same class, and a controller that restarts while such actors run could not start more of
    them.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._haproxy_start_task: asyncio.Task[None]
        super().__init__(*args, **kwargs)
        if orphans := self._running():
            self._haproxy_start_task.cancel()
            self._haproxy_start_task = self.event_loop.create_task(self._take_over(orphans))
        self._keeping = self.event_loop.create_task(self._keep())

    async def shutdown(self) -> None:
        self._keeping.cancel()
        await super().shutdown()

    def _running(self) -> list[str]:
        """HAProxy processes left by an earlier actor."""
        return [path.name for path in Path("/proc").glob("[0-9]*") if self._haproxy._is_our_haproxy(int(path.name))]

    async def _take_over(self, orphans: list[str]) -> None:
        """Start HAProxy once a configuration has replicas; until then the old process serves."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REPLICAS_KNOWN_S):
                while not self._haproxy.backend_configs:  # noqa: ASYNC110, Serve has no event for it
                    await asyncio.sleep(_POLL_S)
        self._haproxy._generate_config_file_internal()
        sockets = ("-x", self._haproxy.cfg.socket_path)
        self._haproxy._proc = await self._haproxy._start_and_wait_for_haproxy("-sf", *orphans, *sockets)

    async def _keep(self) -> None:
        await self._haproxy_start_task
        while True:
            await asyncio.sleep(_POLL_S)
            async with self._reload_lock:  # a reload replaces the process
                process = self._haproxy._proc
                if process is not None and process.returncode is not None:
                    logger.warning("HAProxy ended with status %s: starting it again", process.returncode)
                    await self._haproxy.start()


def install() -> None:
    """Have Serve's controller, in whose process this is called, make managers of our class."""
    controller.HAProxyManager = ray.remote(num_cpus=0)(KeptHAProxyManager)
