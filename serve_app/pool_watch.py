"""The sizes of the pools, as Serve's controller knows them: for metrics, and for who waits for the first replica."""

import itertools
import logging
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import ray
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import RayError
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException

from deployments import metrics

logger = logging.getLogger(__name__)

POOLS = {"Talker": "talker", "CodecDecoder": "codec", "Ingress": "ingress"}
PROXY = "proxy"
_INTERVAL_S = 2.0
_LOOKS_PER_COUNT = 5  # the control store's list of the dead may be long
_SCRAPE_TIMEOUT_S = 5.0
# Whatever Serve stops it kills itself, which is another reason.
_UNINTENDED = (ActorDiedErrorContext.WORKER_DIED, ActorDiedErrorContext.NODE_DIED)


class PoolWatch:
    """Asks the controller every two seconds, on a thread of its own."""

    def __init__(self, app_name: str) -> None:
        self._app_name = app_name
        self._running: dict[str, int] = {}
        threading.Thread(target=self._watch, name="pool-watch", daemon=True).start()

    def has_talker(self) -> bool:
        """Whether a talker replica takes requests; True before the first answer of the controller."""
        return self._running.get("talker", 1) > 0

    def _watch(self) -> None:
        pause = threading.Event()
        for number in itertools.count():
            try:
                self._look()
                if number % _LOOKS_PER_COUNT == 0:
                    self._count_deaths()
            except (
                RayError,
                RayServeException,
                TimeoutError,
                ConnectionError,
            ) as error:  # the controller or the control store is away
                logger.info("the pools cannot be seen now: %s", error)
            pause.wait(_INTERVAL_S)

    def _look(self) -> None:
        # `serve.status()` has pydantic check all of this again: 20 to 40 ms in which no stream of this process moves.
        details = _get_global_client().get_serve_details()
        application = details["applications"].get(self._app_name, {"deployments": {}})
        for name, deployment in application["deployments"].items():
            wanted, running = sizes(Counter(replica["state"] for replica in deployment["replicas"]))
            self._running[POOLS[name]] = running
            metrics.replicas(POOLS[name], wanted=wanted, running=running)

    def _count_deaths(self) -> None:
        """Counted from outside: who dies says nothing, least of all an ingress, whose streams nobody else has."""
        dead = ray._private.state.actors(actor_state_name="DEAD")
        counts = deaths(dead.values(), self._app_name)
        for pool in (*POOLS.values(), PROXY):
            metrics.died(pool, counts[pool])


def deaths(dead: Iterable[Mapping[str, Any]], app_name: str) -> Counter[str]:
    """By pool, replicas that ended without being told to, from Ray's table of dead actors; proxies among them."""
    names = (actor["Name"] for actor in dead if _died(actor["DeathCause"]))
    return Counter(pool for pool in (_pool(name, app_name) for name in names) if pool)


def _died(cause: Any) -> bool:
    return cause.HasField("oom_context") or cause.actor_died_error_context.reason in _UNINTENDED


def _pool(name: str, app_name: str) -> str | None:
    """The pool of an actor, by the names that Serve gives."""
    if name.startswith("SERVE_PROXY_ACTOR"):
        return PROXY
    kind, _, replica = name.partition("::")
    app, _, rest = replica.partition("#")
    return POOLS.get(rest.partition("#")[0]) if (kind, app) == ("SERVE_REPLICA", app_name) else None


def sizes(replica_states: Mapping[Any, int]) -> tuple[int, int]:
    """Replicas wanted, those that start included and those that stop not; and replicas that run. By Serve's states."""
    states = {str(getattr(state, "value", state)): count for state, count in replica_states.items()}
    return sum(count for state, count in states.items() if state != "STOPPING"), states.get("RUNNING", 0)


def scrape() -> bytes:
    """What Ray's metrics agent on this node exports, of all processes here, in Prometheus' text format."""
    node_id = ray.get_runtime_context().get_node_id()
    node = next(node for node in ray.nodes() if node["NodeID"] == node_id)
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(url, timeout=_SCRAPE_TIMEOUT_S) as answer:
        content: bytes = answer.read()
    return content
