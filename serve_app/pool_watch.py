"""The sizes of the pools, as Serve's controller knows them: for metrics, and for who waits for the first replica."""

import logging
import threading
import urllib.request
from collections import Counter
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError
from ray.serve.context import _get_global_client
from ray.serve.schema import DeploymentStatusOverview

from deployments import metrics

logger = logging.getLogger(__name__)

POOLS = {"Talker": "talker", "CodecDecoder": "codec", "Ingress": "ingress"}
_INTERVAL_S = 2.0
_SCRAPE_TIMEOUT_S = 5.0


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
        while True:
            try:
                self._look()
            except (RayError, TimeoutError) as error:  # the controller is being replaced
                logger.info("the pools cannot be seen now: %s", error)
            pause.wait(_INTERVAL_S)

    def _look(self) -> None:
        # `serve.status()` has pydantic check all of this again: 20 to 40 ms in which no stream of this process moves.
        details = _get_global_client().get_serve_details()
        application = details["applications"].get(self._app_name, {"deployments": {}})
        for name, deployment in application["deployments"].items():
            wanted, running = _counted(Counter(replica["state"] for replica in deployment["replicas"]))
            self._running[POOLS[name]] = running
            metrics.replicas(POOLS[name], wanted=wanted, running=running)


def sizes(deployment: DeploymentStatusOverview) -> tuple[int, int]:
    """Replicas wanted, those that start included and those that stop not; and replicas that run."""
    return _counted(deployment.replica_states)


def _counted(replica_states: Mapping[Any, int]) -> tuple[int, int]:
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
