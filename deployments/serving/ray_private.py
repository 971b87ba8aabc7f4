"""All that we use of Ray outside its public interface.

Based on the source code of Ray `CHECKED_WITH`. A test fails with any other version: look here before you raise it.
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

PROXY = "proxy"  # among the dead
_POLL_S = 0.25
_NOTES = b"talkray"  # namespace of the control store's keys
_PROXY_ACTOR, _REPLICA_ACTOR = "SERVE_PROXY_ACTOR", "SERVE_REPLICA"
# Serve itself kills the actors that it stops, which is another reason.
_UNINTENDED = (ActorDiedErrorContext.WORKER_DIED, ActorDiedErrorContext.NODE_DIED)


def proxy_host() -> str | None:
    """The address on which Serve's proxies listen; None is every address."""
    host: str | None = _get_global_client().http_config.host
    return host


def give_uvicorn(**settings: Any) -> None:
    """Give settings to the uvicorn that Serve starts in this replica after its constructor. Serve passes none."""
    uvicorn.Config.__init__ = partialmethod(uvicorn.Config.__init__, **settings)  # type: ignore[assignment, method-assign]


# A new controller is recovering, and about to migrate, replicas that take requests all the while.
_TAKING_REQUESTS = ("RUNNING", "RECOVERING", "PENDING_MIGRATION")


@dataclass(frozen=True, slots=True)
class Pool:
    """The replicas of one deployment."""

    wanted: int  # counts replicas that start, but none that stop
    running: tuple[str, ...]  # ids of the actors of replicas that take requests

    @classmethod
    def of(cls, replicas: Iterable[Mapping[str, Any]]) -> Self:
        """From Serve's details, which name no actor for a replica that was only just requested."""
        states = [(_name(replica["state"]), replica.get("actor_id")) for replica in replicas]
        running = tuple(actor for state, actor in states if state in _TAKING_REQUESTS and actor)
        return cls(sum(state != "STOPPING" for state, _ in states), running)


def _name(state: Any) -> str:
    return str(getattr(state, "value", state))


def pools(app_name: str) -> dict[str, Pool]:
    """The replicas of each deployment, as the controller knows them: it learns of a death at the next health check.

    `serve.status()` has pydantic check all of it again, which blocks all streams of this process for 20 to 40 ms.
    """
    details = _get_global_client().get_serve_details()
    application = details["applications"].get(app_name, {"deployments": {}})
    return {name: Pool.of(deployment["replicas"]) for name, deployment in application["deployments"].items()}


def num_nodes() -> int:
    return sum(bool(node["Alive"]) for node in ray.nodes())


def num_dead_nodes() -> int:
    """Nodes that the cluster has lost since it began."""
    return sum(not node["Alive"] for node in ray.nodes())


def is_alive(actor_id: str) -> bool:
    """Whether the control store, which learns of a death at once, has no record of one."""
    return bool(ray._private.state.actors(actor_id).get("State") == "ALIVE")


def put_note(key: str, note: bytes) -> None:
    """Keep a note for all processes of the cluster in its control store, replacing the last one."""
    internal_kv._internal_kv_put(key, note, overwrite=True, namespace=_NOTES)


def get_note(key: str) -> bytes | None:
    """The latest note under `key`, None without one."""
    note: bytes | None = internal_kv._internal_kv_get(key, namespace=_NOTES)
    return note


_starting: list[Node] = []
# Of Ray's agents. Where Ray chooses a port itself, its raylet ends unless the agent has told the port within 15 s.
AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")


def start_patiently(patience_s: float, agent_ports: Sequence[int]) -> None:
    """Let `ray.init` wait longer for its parts, which `ended_part` already knows then, and Serve for its proxy.

    `agent_ports` are free ports, one for each of AGENT_PORTS. `ray.init` raises StartError, Serve TimeoutError.
    """
    start = Node.start_head_processes

    def remembered(started: Node) -> None:
        _starting.append(started)
        for name, port in zip(AGENT_PORTS, agent_ports, strict=True):
            setattr(started._ray_params, name, port)
            persist_port(started._session_dir, started._node_id, name, port)  # as the agent will, when it listens
        start(started)

    def patient(ask: Callable[..., Any], **short: int) -> Callable[..., Any]:
        def asked(*which: Any, **limits: Any) -> Any:
            until_s = time.monotonic() + patience_s
            while True:
                try:
                    return ask(*which, **limits | short)
                except RuntimeError as error:  # it is not there yet, or the control store does not answer
                    if time.monotonic() > until_s:
                        raise StartError(f"Ray did not start within {patience_s:.0f} s: {error}") from error
                    time.sleep(_POLL_S)

        return asked

    Node.start_head_processes = remembered
    services.get_node = patient(services.get_node)
    # No other thread runs while it waits.
    node.wait_for_persisted_port = patient(node.wait_for_persisted_port, timeout_ms=100)
    api.HTTP_PROXY_TIMEOUT = client.HTTP_PROXY_TIMEOUT = patience_s


def ended_part(names: Iterable[str]) -> str | None:
    """Which named part of the Ray that this process started has ended, and how; None while all run."""
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
    """The number of replicas, by deployment, and of proxies (PROXY) that ended since Ray started without being stopped.

    Asks the control store for all dead actors, whose list may be long.
    """
    return deaths(ray._private.state.actors(actor_state_name="DEAD").values(), app_name)


def deaths(dead: Iterable[Mapping[str, Any]], app_name: str) -> Counter[str]:
    """The counts of `count_deaths`, from Ray's table of dead actors."""
    names = (_deployment(actor["Name"], app_name) for actor in dead if _died(actor["DeathCause"]))
    return Counter(name for name in names if name)


def _died(cause: Any) -> bool:
    return cause.HasField("oom_context") or cause.actor_died_error_context.reason in _UNINTENDED


def _deployment(actor_name: str, app_name: str) -> str | None:
    """Serve calls its actors SERVE_PROXY_ACTOR-NODE and SERVE_REPLICA::APP#DEPLOYMENT#ID."""
    if actor_name.startswith(_PROXY_ACTOR):
        return PROXY
    kind, _, replica = actor_name.partition("::")
    app, _, rest = replica.partition("#")
    return rest.partition("#")[0] if (kind, app) == (_REPLICA_ACTOR, app_name) else None


def this_replica() -> Any:
    """Serve's own object around the user's class; None outside a replica."""
    try:
        serve.get_replica_context()
    except RayServeException:
        return None
    worker = ray._private.worker.global_worker
    return worker.actors[worker.actor_id]._replica_impl


def replica_name() -> str:
    """DEPLOYMENT#ID, as in the names of Serve's log files; empty outside a replica."""
    try:
        context = serve.get_replica_context()
    except RayServeException:
        return ""
    return f"{context.deployment}#{context.replica_tag}"


def log_folder() -> Path:
    """The folder of this node's Serve logs, where Ray's dashboard finds them."""
    return Path(get_serve_logs_dir())


def is_stopping(replica: Any) -> bool:
    """Whether Serve is stopping `this_replica`. Serve does not tell user code, and has no event for it."""
    stopping: bool = replica._shutting_down
    return stopping
