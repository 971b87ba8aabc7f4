"""Access to Ray's private interfaces.

All code here has been checked against the source code of Ray version `CHECKED_WITH`. A test fails with any other
version. Review this module before you change the version.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from typing import Any, Self

import ray
import uvicorn
from ray import serve
from ray._private import node, services
from ray._private.node import Node
from ray._raylet import persist_port  # type: ignore[attr-defined]
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.experimental import internal_kv
from ray.serve._private import api, client
from ray.serve._private.logging_utils import get_serve_logs_dir
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException

from deployments.errors import StartError

CHECKED_WITH = "2.60.0"

PROXY = "proxy"  # key for Serve's proxies in `count_deaths`
_POLL_S = 0.25
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


_starting: list[Node] = []
# Ports for Ray's agents. If Ray chooses a port itself, the raylet exits unless the agent reports it within 15 s.
AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")


def extend_start_timeouts(patience_s: float, agent_ports: Sequence[int]) -> None:
    """Extend the time limits of `ray.init` and of Serve's proxy to `patience_s`, and register parts for `ended_part`.

    `agent_ports` are free ports, one for each of AGENT_PORTS. After `patience_s`, `ray.init` raises StartError and
    Serve raises TimeoutError.
    """
    start = Node.start_head_processes

    def remembered(started: Node) -> None:
        _starting.append(started)
        for name, port in zip(AGENT_PORTS, agent_ports, strict=True):
            setattr(started._ray_params, name, port)
            persist_port(started._session_dir, started._node_id, name, port)  # the agent later writes the same value
        start(started)

    def patient(ask: Callable[..., Any], **short: int) -> Callable[..., Any]:
        def asked(*which: Any, **limits: Any) -> Any:
            until_s = time.monotonic() + patience_s
            while True:
                try:
                    return ask(*which, **limits | short)
                except RuntimeError as error:  # the part is not registered yet, or the control store does not respond
                    if time.monotonic() > until_s:
                        raise StartError(f"Ray did not start within {patience_s:.0f} s: {error}") from error
                    time.sleep(_POLL_S)

        return asked

    Node.start_head_processes = remembered
    services.get_node = patient(services.get_node)
    # `wait_for_persisted_port` blocks all other threads while waiting, so it is called repeatedly with short waits.
    node.wait_for_persisted_port = patient(node.wait_for_persisted_port, timeout_ms=100)
    api.HTTP_PROXY_TIMEOUT = client.HTTP_PROXY_TIMEOUT = patience_s


def ended_part(names: Iterable[str]) -> str | None:
    """Describe the first of the named Ray processes on this node that has ended; None while all are running."""
    nodes = [*_starting, ray._private.worker._global_node]
    started = dict(next((node.all_processes for node in nodes if node is not None), {}))
    for name in names:
        for process in (info.process for info in started.get(name, ())):
            if process.poll() is not None:
                status = process.returncode
                how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
                return f"Ray's {name} (process {process.pid}) {how}"
    return None


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
