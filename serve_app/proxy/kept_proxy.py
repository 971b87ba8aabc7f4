"""HAProxy manager that restarts HAProxy as soon as it dies, and keeps it running if its actor dies.

Serve polls HAProxy's admin socket every ten seconds, restarts its actor after three missed answers, and then waits
until the new actor has been told about all replicas. Clients cannot connect for 26 s, and then get status 404. With
this manager, the actor restarts HAProxy, because it has the list of replicas. If the actor died, Serve's next actor
would find the port occupied by a HAProxy process that is not told about new replicas. With this manager, the next actor
takes over from that process, as in a reload.

Serve has no setting for the actor's class. It calls `install` in its controller before it creates the first actor
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
    """Serve's HAProxy manager, extended to keep HAProxy running.

    It derives from Serve's original class, not from the class that `ray.remote` made. Ray would treat a class derived
    from the latter as the same class, and a restarted controller could then start no more such actors.
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
        """Return the HAProxy processes that an earlier actor left running."""
        return [path.name for path in Path("/proc").glob("[0-9]*") if self._haproxy._is_our_haproxy(int(path.name))]

    async def _take_over(self, orphans: list[str]) -> None:
        """Start HAProxy once its configuration contains replicas. Until then, the old process serves requests."""
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
                    logger.warning("HAProxy ended with status %s, restarting it", process.returncode)
                    await self._haproxy.start()


def install() -> None:
    """Make Serve's controller, which calls this function, create managers of this class."""
    controller.HAProxyManager = ray.remote(num_cpus=0)(KeptHAProxyManager)
