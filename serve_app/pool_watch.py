"""The sizes of the pools, as Serve's controller knows them: for metrics, and for who waits for the first replica."""

import itertools
import logging
import threading
import urllib.request

import ray
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from deployments import metrics, ray_internals
from deployments.ray_internals import Pool

logger = logging.getLogger(__name__)

POOLS = {"Talker": "talker", "CodecDecoder": "codec", "Ingress": "ingress"}
_TURN_S = 0.2  # shorter than api.admission.max_line_s, after which a line that does not move is a 429
_TURNS_PER_LOOK = 10
_TURNS_PER_COUNT = 50  # the control store's list of the dead may be long
_SCRAPE_TIMEOUT_S = 5.0


class PoolWatch:
    """Asks the controller every two seconds, and the control store five times a second, on a thread of its own."""

    def __init__(self, app_name: str) -> None:
        self._app_name = app_name
        self._pools: dict[str, Pool] = {}
        self._lives: dict[str, bool] = {}
        threading.Thread(target=self._watch, name="pool-watch", daemon=True).start()

    def is_running(self) -> bool:
        """Whether each pool that speech needs has a live replica; True before the first answer of the controller."""
        codecs = self._pools.get("codec")
        return self._lives.get("talker", True) and (self._lives.get("codec", True) or not (codecs and codecs.wanted))

    def is_ready(self) -> bool:
        """Whether speech may be asked for: it runs, or the talkers are at zero because nobody has asked."""
        talkers = self._pools.get("talker")
        return self.is_running() or (talkers is not None and not talkers.wanted)

    def _watch(self) -> None:
        pause = threading.Event()
        for number in itertools.count():
            try:
                if number % _TURNS_PER_LOOK == 0:
                    self._look()
                if number % _TURNS_PER_COUNT == 0:
                    self._count_deaths()
                self._ask_who_lives()
            except (
                RayError,
                RayServeException,
                TimeoutError,
                ConnectionError,
            ) as error:  # the controller or the control store is away
                logger.info("the pools cannot be seen now: %s", error)
            except Exception:  # whatever it is, what was seen last would stand for good without the next look
                logger.exception("the pools cannot be seen now")
            pause.wait(_TURN_S)

    def _look(self) -> None:
        for name, pool in ray_internals.pools(self._app_name).items():
            self._pools[POOLS[name]] = pool
            metrics.replicas(POOLS[name], wanted=pool.wanted, running=len(pool.running))

    def _ask_who_lives(self) -> None:
        for name, pool in self._pools.items():
            self._lives[name] = any(map(ray_internals.is_alive, pool.running))

    def _count_deaths(self) -> None:
        """Counted from outside: who dies says nothing, least of all an ingress, whose streams nobody else has."""
        counts = ray_internals.count_deaths(self._app_name)
        for deployment, pool in POOLS.items():
            metrics.died(pool, counts[deployment])
        metrics.died(ray_internals.PROXY, counts[ray_internals.PROXY])


def scrape() -> bytes:
    """What Ray's metrics agent on this node exports, of all processes here, in Prometheus' text format."""
    node_id = ray.get_runtime_context().get_node_id()
    node = next(node for node in ray.nodes() if node["NodeID"] == node_id)
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(url, timeout=_SCRAPE_TIMEOUT_S) as answer:
        content: bytes = answer.read()
    return content
