"""Access to Ray's private interfaces. `ray_start.py` has those that only a command needs that starts Ray.

All code in both modules has been checked against the source code of Ray version `CHECKED_WITH`. A test fails with any
other version. Review both before you change the version.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from typing import Any, Self

import ray
import uvicorn
from ray import serve
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.experimental import internal_kv
from ray.serve._private.logging_utils import get_serve_logs_dir
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException

CHECKED_WITH = "2.60.0"

PROXY = "proxy"  # key for Serve's proxies in `count_deaths`
_NOTES = b"talkray"  # namespace for keys in the control store
_PROXY_ACTOR, _REPLICA_ACTOR = "SERVE_PROXY_ACTOR", "SERVE_REPLICA"
# Actors stopped by Serve have a different reason.
_UNINTENDED = (ActorDiedErrorContext.WORKER_DIED, ActorDiedErrorContext.NODE_DIED)


def proxy_host() -> str | None:
    """Return the address that Serve's proxies listen on; None means all addresses."""
    host: str | None = _get_global_client().http_config.host
    return host


def set_uvicorn_options(**settings: Any) -> None:
    """Set options for the uvicorn server that Serve starts after this replica's constructor. Serve sets none itself."""
    uvicorn.Config.__init__ = partialmethod(uvicorn.Config.__init__, **settings)  # type: ignore[assignment, method-assign]


# A new controller marks replicas as recovering or pending migration. Such replicas still accept requests.
_TAKING_REQUESTS = ("RUNNING", "RECOVERING", "PENDING_MIGRATION")


@dataclass(frozen=True, slots=True)
class Pool:
    """Replica counts for one deployment."""

    wanted: int  # includes replicas that are starting, excludes replicas that are stopping
    running: tuple[str, ...]  # actor ids of replicas that accept requests

    @classmethod
    def of(cls, replicas: Iterable[Mapping[str, Any]]) -> Self:
        """Return the pool described by Serve's replica details. A newly requested replica has no actor id yet."""
        states = [(_name(replica["state"]), replica.get("actor_id")) for replica in replicas]
        running = tuple(actor for state, actor in states if state in _TAKING_REQUESTS and actor)
        return cls(sum(state != "STOPPING" for state, _ in states), running)


def _name(state: Any) -> str:
    return str(getattr(state, "value", state))


def pools(app_name: str) -> dict[str, Pool]:
    """Return the replicas of each deployment. The controller notices a death only at the next health check.

    `serve.status()` would validate all details again with pydantic, which blocks this process for 20 to 40 ms.
    """
    details = _get_global_client().get_serve_details()
    application = details["applications"].get(app_name, {"deployments": {}})
    return {name: Pool.of(deployment["replicas"]) for name, deployment in application["deployments"].items()}


def num_nodes() -> int:
    return sum(bool(node["Alive"]) for node in ray.nodes())


def num_dead_nodes() -> int:
    """Return the number of nodes that the cluster has lost since it started."""
    return sum(not node["Alive"] for node in ray.nodes())


def is_alive(actor_id: str) -> bool:
    """Return whether the control store lists the actor as alive. The control store notices a death immediately."""
    return bool(ray._private.state.actors(actor_id).get("State") == "ALIVE")


def put_note(key: str, note: bytes) -> None:
    """Store a note in the control store for all processes in the cluster, replacing any previous note under `key`."""
    internal_kv._internal_kv_put(key, note, overwrite=True, namespace=_NOTES)


def get_note(key: str) -> bytes | None:
    """Return the latest note under `key`, or None."""
    note: bytes | None = internal_kv._internal_kv_get(key, namespace=_NOTES)
    return note


def count_deaths(app_name: str) -> Counter[str]:
    """Count replicas by deployment, and proxies under PROXY, that ended unexpectedly since Ray started.

    Queries the control store for the list of all dead actors, which may be long.
    """
    return deaths(ray._private.state.actors(actor_state_name="DEAD").values(), app_name)


def deaths(dead: Iterable[Mapping[str, Any]], app_name: str) -> Counter[str]:
    """Return the counts of `count_deaths` from Ray's table of dead actors."""
    names = (_deployment(actor["Name"], app_name) for actor in dead if _died(actor["DeathCause"]))
    return Counter(name for name in names if name)


def _died(cause: Any) -> bool:
    return cause.HasField("oom_context") or cause.actor_died_error_context.reason in _UNINTENDED


def _deployment(actor_name: str, app_name: str) -> str | None:
    """Parse Serve's actor names: SERVE_PROXY_ACTOR-NODE and SERVE_REPLICA::APP#DEPLOYMENT#ID."""
    if actor_name.startswith(_PROXY_ACTOR):
        return PROXY
    kind, _, replica = actor_name.partition("::")
    app, _, rest = replica.partition("#")
    return rest.partition("#")[0] if (kind, app) == (_REPLICA_ACTOR, app_name) else None


def this_replica() -> Any:
    """Return Serve's wrapper object for this replica; None outside a replica."""
    try:
        serve.get_replica_context()
    except RayServeException:
        return None
    worker = ray._private.worker.global_worker
    return worker.actors[worker.actor_id]._replica_impl


def replica_name() -> str:
    """Return DEPLOYMENT#ID, as used in Serve's log file names; an empty string outside a replica."""
    try:
        context = serve.get_replica_context()
    except RayServeException:
        return ""
    return f"{context.deployment}#{context.replica_tag}"


def log_folder() -> Path:
    """Return the folder with this node's Serve logs, which Ray's dashboard displays."""
    return Path(get_serve_logs_dir())


def is_stopping(replica: Any) -> bool:
    """Return whether Serve is stopping `replica`. Serve gives user code no other signal when stopping one."""
    stopping: bool = replica._shutting_down
    return stopping
