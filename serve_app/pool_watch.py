"""The sizes of the pools, as Serve's controller knows them: for metrics, and for who waits for the first replica."""

import logging
import threading
import urllib.request

import ray
from ray import serve
from ray.exceptions import RayError
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
        application = serve.status().applications.get(self._app_name)
        for name, deployment in application.deployments.items() if application else ():
            wanted, running = sizes(deployment)
            self._running[POOLS[name]] = running
            metrics.replicas(POOLS[name], wanted=wanted, running=running)


def sizes(deployment: DeploymentStatusOverview) -> tuple[int, int]:
    """Replicas wanted, those that start included and those that stop not; and replicas that run."""
    states = {str(getattr(state, "value", state)): count for state, count in deployment.replica_states.items()}
    return sum(count for state, count in states.items() if state != "STOPPING"), states.get("RUNNING", 0)


def scrape() -> bytes:
    """What Ray's metrics agent on this node exports, of all processes here, in Prometheus' text format."""
    node_id = ray.get_runtime_context().get_node_id()
    node = next(node for node in ray.nodes() if node["NodeID"] == node_id)
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(url, timeout=_SCRAPE_TIMEOUT_S) as answer:
        content: bytes = answer.read()
    return content
