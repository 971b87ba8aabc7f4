"""Pool sizes from Serve's controller, for metrics and for requests to a pool without replicas."""

import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from deployments.serving import metrics, ray_private
from deployments.serving.ray_private import Pool
from deployments.serving.reports import Start, start_key
from serve_app.config import POOLS
from serve_app.direct import open_direct
from serve_app.speech.model_state import ModelState

logger = logging.getLogger(__name__)

_TURN_S = 0.2  # less than api.admission.max_line_s, after which requests in a stalled queue are refused with 429
_TURNS_PER_LOOK = 10  # minimum
_REPLICAS_PER_TURN = 40  # the controller's single thread takes about 0.2 ms per replica
_LOOKS_PER_COUNT = 5  # the control store's list of dead actors may be long
_SILENT_LOOKS = 3  # notes that may be missed before other replicas query for themselves
# A larger pool does not lose all replicas between two checks, and hundreds of ingresses would send thousands of queries
# per second.
_LARGEST_ASKED = 16
_SCRAPE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """The controller's answer, requested by one replica on behalf of all."""

    pools: Mapping[str, Pool]  # by `pool_of`
    deaths: Mapping[str, int]  # by the names in `pool_of` and PROXY; see `ray_private.count_deaths`

    def note(self) -> bytes:
        """Encode the answer as a note for the control store. Each note is unique, so readers can detect a new one."""
        pools = {name: (pool.wanted, pool.running) for name, pool in self.pools.items()}
        return json.dumps({"at_ns": time.time_ns(), "pools": pools, "deaths": self.deaths}).encode()

    @classmethod
    def read(cls, note: bytes) -> Self:
        said = json.loads(note)
        pools = {name: Pool(wanted, tuple(running)) for name, (wanted, running) in said["pools"].items()}
        return cls(pools, said["deaths"])


class KnownPools:
    """Pool state of one replica. The thread of `PoolWatch` updates it; this class does not query the controller."""

    def __init__(self, app_name: str, models: Mapping[str, tuple[str, str]]) -> None:
        """Create the state. `models` maps each model's name to its talker and codec deployments."""
        self._app_name, self._models = app_name, models
        self._snapshot = PoolSnapshot({}, {})
        self._note: bytes | None = None
        self._silence = _SILENT_LOOKS  # checks without a new note; the first check does not wait for a note
        self._lives: dict[str, bool] = {}
        self._starts: dict[str, Start | None] = {}

    def is_running(self, model: str) -> bool:
        """Return whether each pool of the model has a live replica. True before the controller's first answer."""
        talkers, codecs = map(pool_of, self._models[model])
        pool = self._snapshot.pools.get(codecs)
        return self._lives.get(talkers, True) and (self._lives.get(codecs, True) or not (pool and pool.wanted))

    def is_ready(self) -> bool:
        """Return whether the first model accepts requests: it is running, or its idle talkers are scaled to zero."""
        first = next(iter(self._models))
        talkers = self._snapshot.pools.get(pool_of(self._models[first][0]))
        return self.is_running(first) or (talkers is not None and not talkers.wanted)

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Return the numbers of requested and running replicas, by pool."""
        return {name: (pool.wanted, len(pool.running)) for name, pool in self._snapshot.pools.items()}

    def state(self, model: str) -> ModelState:
        """Return whether a model is ready and, if not, the progress of its startup."""
        pool = self._snapshot.pools.get(pool_of(self._models[model][0]))
        wanted = 1 if pool is None else pool.wanted
        start, running = self._starts.get(model), self.is_running(model)
        return ModelState.of(start, wanted=wanted, running=running, now_s=time.time())

    def receive_note(self, note: bytes | None) -> bool:
        """Process the note of the replica that queries the controller. Return True if the note is outdated, so this
        replica has to query the controller itself.
        """
        if note is not None and self._note is not None and note != self._note:  # may be left over from an old server
            self._silence = 0
            self.apply(PoolSnapshot.read(note))
        else:
            self._silence += 1
        self._note = note
        return self._silence >= _SILENT_LOOKS

    def apply(self, seen: PoolSnapshot) -> None:
        """Store and record the controller's answer."""
        self._snapshot = seen
        for name, pool in seen.pools.items():
            kind, _, model = name.partition(" ")
            metrics.WANTED.record(pool.wanted, pool=kind, model=model)
            metrics.RUNNING.record(len(pool.running), pool=kind, model=model)
        for name, count in seen.deaths.items():
            kind, _, model = name.partition(" ")
            metrics.DIED.record(count, pool=kind, model=model)

    def update_liveness(self, is_alive: Callable[[str], bool]) -> None:
        """Update which replicas of small pools are alive by calling `is_alive` for each replica."""
        for name in self._snapshot.pools.keys() & {*map(pool_of, itertools.chain(*self._models.values()))}:
            running = self._snapshot.pools[name].running
            self._lives[name] = len(running) > _LARGEST_ASKED or any(map(is_alive, running))

    def read_starts(self, get_note: Callable[[str], bytes | None], *, running: bool) -> None:
        """Read the note about each model's latest start. `running` selects the running models (possibly asleep) or all
        others.
        """
        for model, (talkers, _) in self._models.items():
            if self.is_running(model) is running:
                self._starts[model] = Start.read(get_note(start_key(self._app_name, talkers)))


class PoolWatch(KnownPools):
    """Thread that monitors the pools. One replica queries the controller on behalf of all replicas every two seconds.

    This replica is the ingress of rank 0. It writes each answer to the cluster's control store for the other replicas.
    After three missed answers, the other replicas query the controller themselves until an ingress of rank 0 writes
    again. Checks are less frequent above 400 replicas and more frequent while a pool is dead. Each ingress also asks
    the control store five times per second whether the replicas of small pools are alive.
    """

    def __init__(self, app_name: str, models: Mapping[str, tuple[str, str]]) -> None:
        super().__init__(app_name, models)
        self._own_note: Callable[[], bytes] | None = None
        self._note_key = f"pools of {app_name}"
        self._asked = 0  # consecutive checks in which this replica queried the controller
        threading.Thread(target=self._watch, name="pool-watch", daemon=True).start()

    def share_note(self, make: Callable[[], bytes]) -> None:
        """Write the note that `make` returns at each check, for the other ingress replicas."""
        self._own_note = make

    def notes(self) -> list[bytes]:
        """Return the notes of the other ingress replicas, possibly including replicas that have ended. Blocks."""
        pool, own = self._snapshot.pools.get("ingress"), _rank()
        ranks = (rank for rank in range(pool.wanted if pool else 0) if rank != own)
        notes = (ray_private.get_note(_note_of(self._app_name, rank)) for rank in ranks)
        return [note for note in notes if note is not None]

    def _watch(self) -> None:
        pause, next_look = threading.Event(), 0
        for number in itertools.count():
            try:
                if number >= next_look:
                    replicas = sum(pool.wanted for pool in self._snapshot.pools.values())
                    next_look = number + turns_per_look(replicas, is_running=all(map(self.is_running, self._models)))
                    self._look()
                    self.read_starts(ray_private.get_note, running=True)
                self.update_liveness(ray_private.is_alive)
                self.read_starts(ray_private.get_note, running=False)
            except (RayError, RayServeException, TimeoutError, ConnectionError) as error:  # no controller or store
                logger.info("cannot read the pools' state: %s", error)
            except Exception:  # otherwise the thread would end and the last answer would persist
                logger.exception("cannot read the pools' state")
            pause.wait(_TURN_S)

    def _look(self) -> None:
        """Query the controller if this is the querying replica, or if the querying replica has not written. Otherwise
        read its note.
        """
        if self._own_note is not None and (own := _rank()) is not None:
            ray_private.put_note(_note_of(self._app_name, own), self._own_note())
        if _is_leader():
            self.apply(seen := self._query_controller())
            ray_private.put_note(self._note_key, seen.note())
        elif self.receive_note(ray_private.get_note(self._note_key)):
            self.apply(self._query_controller())
        else:
            self._asked = 0

    def _query_controller(self) -> PoolSnapshot:
        pools = {pool_of(name): pool for name, pool in ray_private.pools(self._app_name).items()}
        deaths = self._count_deaths() if self._asked % _LOOKS_PER_COUNT == 0 else self._snapshot.deaths
        self._asked += 1
        return PoolSnapshot(pools, deaths)

    def _count_deaths(self) -> dict[str, int]:
        """Count replica deaths from outside, because a replica cannot report its own."""
        counts = ray_private.count_deaths(self._app_name)
        named = {pool_of(name): counts[name] for name in ("Ingress", *itertools.chain(*self._models.values()))}
        return named | {ray_private.PROXY: counts[ray_private.PROXY]}


def pool_of(deployment: str) -> str:
    """Return the pool's name in metrics, followed by the model's name if there are several: "talker", "talker base"."""
    kind, _, model = deployment.partition("-")
    return f"{POOLS[kind]} {model}".rstrip()


def turns_per_look(replicas: int, *, is_running: bool) -> int:
    """Return the number of 0.2 s turns between two checks. There are more turns with many replicas, and fewer while a
    pool is dead, so that a new replica is used as soon as it is ready.
    """
    return max(_TURNS_PER_LOOK if is_running else 1, replicas // _REPLICAS_PER_TURN)


def _is_leader() -> bool:
    """Return whether this is the ingress of rank 0. If an ingress dies, Serve gives its rank to its successor."""
    return serve.get_replica_context().deployment == "Ingress" and _rank() == 0


def _rank() -> int | None:
    rank = serve.get_replica_context().rank
    return None if rank is None else rank.rank


def _note_of(app_name: str, rank: int) -> str:
    """Return the key of an ingress replica's note. Its successor has the same rank and overwrites the note."""
    return f"ingress {rank} of {app_name}"


def scrape() -> bytes:
    """Return the metrics of all processes on this node, in the Prometheus text format of Ray's agent."""
    node_id = ray.get_runtime_context().get_node_id()
    node = next(node for node in ray.nodes() if node["NodeID"] == node_id)
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with open_direct(url, timeout_s=_SCRAPE_TIMEOUT_S) as answer:
        content: bytes = answer.read()
    return content
