"""Ingress deployment: the HTTP and WebSocket APIs, which call the pools through their handles."""

import asyncio
import ctypes
from collections.abc import Mapping, Sequence
from functools import partial
from pkgutil import resolve_name
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.util import get_node_ip_address

from deployments.serving import ray_metrics, ray_private
from deployments.serving.handles import call_all_replicas
from deployments.serving.processes import freeze_loaded
from serve_app.api.application import create_api
from serve_app.api.early_status import EarlyStatusProtocol
from serve_app.api.routing import dialects_of
from serve_app.config import ApiSettings
from serve_app.extension import ExtensionState, Node
from serve_app.extensions import load_extensions
from serve_app.scaling.pool_watch import PoolWatch, scrape
from serve_app.speech.replica_synthesizer import Deployed, ReplicaSynthesizer

_WEBSOCKETS = "serve_app.api.bounded_websocket:uvicorn_settings"  # needed if any dialect has WebSockets
_C_LIBRARY = ctypes.CDLL(None)
# Parameters of mallopt. By default, freeing one large block raises both thresholds to 32 MiB, and each thread's arena
# then keeps this much memory.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MIB = -1, -3, 1 << 20


def limit_kept_memory() -> None:
    """Limit the memory that this process keeps after freeing large blocks."""
    _C_LIBRARY.mallopt(_MMAP_THRESHOLD, _MIB)
    _C_LIBRARY.mallopt(_TRIM_THRESHOLD, _MIB)


def return_memory() -> None:
    """Return unused memory to the system."""
    _C_LIBRARY.malloc_trim(0)


async def forget_everywhere(app_name: str, voices: tuple[bytes, ...]) -> None:
    """Call `forget` for deleted voices on every replica of the other deployments. Ingress replicas watch the store
    themselves.

    Raises NotReady if a replica does not answer; the caller should try again. Pools without replicas are skipped.
    """
    following = (serve.get_replica_context().deployment, "Ingress")
    pools = await asyncio.to_thread(ray_private.pools, app_name)
    names = [name for name, pool in pools.items() if name not in following and pool.running]
    handles = [serve.get_deployment_handle(name, app_name) for name in names]  # Serve caches the handles
    await asyncio.gather(*(call_all_replicas(handle, "forget", voices) for handle in handles))


class Ingress:
    """HTTP API replica, which does not need torch. Raises StartError if other hosts could connect without a key."""

    def __init__(
        self, settings: ApiSettings, models: Sequence[Deployed], added: Mapping[str, DeploymentHandle]
    ) -> None:
        """Create the replica. The first of the `models` is the default. `added`: deployments of extensions, by
        extension name.
        """
        ray_metrics.install(pool="ingress", models=tuple(model.name for model in models))
        has_sockets = any(dialect.sockets for dialect in dialects_of(load_extensions(settings.extensions)))
        sockets: dict[str, Any] = resolve_name(_WEBSOCKETS)(settings.admission) if has_sockets else {}
        ray_private.set_uvicorn_options(http=EarlyStatusProtocol, proxy_headers=False, **sockets)
        settings = settings.model_copy(update={"access": settings.access.for_host(ray_private.proxy_host())})
        app_name = serve.get_replica_context().app_name
        watch = PoolWatch(app_name, {model.name: model.deployments for model in models})
        node = Node(
            is_running=watch.is_running,
            is_ready=watch.is_ready,
            scrape=scrape,
            state=watch.state,
            sizes=watch.sizes,
            share_note=watch.share_note,
            notes=watch.notes,
            num_nodes=ray_private.num_nodes(),
            address=get_node_ip_address(),
            forget=partial(forget_everywhere, app_name),
            replica=ray_private.replica_name(),
            log_folder=ray_private.log_folder(),
        )
        self._api = create_api(
            {model.name: (ReplicaSynthesizer(model), model.admission) for model in models},
            settings,
            opened={},
            echo_request_id=False,
            node=node,
            added=added,
        )
        limit_kept_memory()
        freeze_loaded()

    def __del__(self) -> None:
        """Close the extensions. Serve calls this before ending the process."""
        for state in self._extensions():
            state.close()

    async def check_health(self) -> None:
        """Run the extensions' periodic work, and return freed memory to the system. Serve calls this periodically."""
        for state in self._extensions():
            state.follow()
        await asyncio.to_thread(return_memory)

    def _extensions(self) -> list[ExtensionState]:
        """Return the states of extensions, or [] if the start failed."""
        api = getattr(self, "_api", None)
        return [] if api is None else [each for each in api.state.opened.values() if isinstance(each, ExtensionState)]

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the app. Ray Serve calls this, because `serve.ingress()` in app.py is given no app."""
        return self._api
