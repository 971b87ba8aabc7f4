"""Pool sizes from Serve's controller, for metrics and for requests to a pool with zero replicas."""

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

_TURN_S = 0.2  # below api.admission.max_line_s, after which a queue that does not move is a 429
_TURNS_PER_LOOK = 10  # at least
_REPLICAS_PER_TURN = 40  # the controller's single thread takes about 0.2 ms for each replica it reports
_LOOKS_PER_COUNT = 5  # the control store's list of dead actors may be long
_SILENT_LOOKS = 3  # of the replica that asks for all; after these each asks for itself
# A larger pool does not die whole between two looks, and hundreds of ingresses would ask thousands of times a second.
_LARGEST_ASKED = 16
_SCRAPE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Seen:
    """The controller's answer, which one replica requests and all use."""

    pools: Mapping[str, Pool]  # by `pool_of`
    deaths: Mapping[str, int]  # as `ray_private.count_deaths` has them, by `pool_of` and PROXY

    def note(self) -> bytes:
        """Note for the control store. No two notes are equal, so that a reader can tell a new one."""
        pools = {name: (pool.wanted, pool.running) for name, pool in self.pools.items()}
        return json.dumps({"at_ns": time.time_ns(), "pools": pools, "deaths": self.deaths}).encode()

    @classmethod
    def read(cls, note: bytes) -> Self:
        said = json.loads(note)
        pools = {name: Pool(wanted, tuple(running)) for name, (wanted, running) in said["pools"].items()}
        return cls(pools, said["deaths"])


class KnownPools:
    """A replica's knowledge of the pools. Does not ask the controller itself; the thread of `PoolWatch` does."""

    def __init__(self, app_name: str, models: Mapping[str, tuple[str, str]]) -> None:
        """`models`: the deployments of the talkers and of the codec of each model, by its name."""
        self._app_name, self._models = app_name, models
        self._seen = Seen({}, {})
        self._note: bytes | None = None
        self._silence = _SILENT_LOOKS  # looks without a new note; at first it does not wait for another replica
        self._lives: dict[str, bool] = {}
        self._starts: dict[str, Start | None] = {}

    def is_running(self, model: str) -> bool:
        """Whether each pool that the model needs has a live replica; True before the first answer of the controller."""
        talkers, codecs = map(pool_of, self._models[model])
        pool = self._seen.pools.get(codecs)
        return self._lives.get(talkers, True) and (self._lives.get(codecs, True) or not (pool and pool.wanted))

    def is_ready(self) -> bool:
        """Whether the first model accepts requests: it runs, or its talkers are scaled to zero for lack of requests."""
        first = next(iter(self._models))
        talkers = self._seen.pools.get(pool_of(self._models[first][0]))
        return self.is_running(first) or (talkers is not None and not talkers.wanted)

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Replicas wanted and running, by pool."""
        return {name: (pool.wanted, len(pool.running)) for name, pool in self._seen.pools.items()}

    def state(self, model: str) -> ModelState:
        """Whether a model is ready, and the progress of its start if not."""
        pool = self._seen.pools.get(pool_of(self._models[model][0]))
        wanted = 1 if pool is None else pool.wanted
        start, running = self._starts.get(model), self.is_running(model)
        return ModelState.of(start, wanted=wanted, running=running, now_s=time.time())

    def hear(self, note: bytes | None) -> bool:
        """Take the note of the replica that asks for all. Returns True if it is silent: then ask the controller."""
        if note is not None and self._note is not None and note != self._note:  # the first may be an earlier server's
            self._silence = 0
            self.use(Seen.read(note))
        else:
            self._silence += 1
        self._note = note
        return self._silence >= _SILENT_LOOKS

    def use(self, seen: Seen) -> None:
        """Take the controller's answer, and record it."""
        self._seen = seen
        for name, pool in seen.pools.items():
            kind, _, model = name.partition(" ")
            metrics.WANTED.record(pool.wanted, pool=kind, model=model)
            metrics.RUNNING.record(len(pool.running), pool=kind, model=model)
        for name, count in seen.deaths.items():
            kind, _, model = name.partition(" ")
            metrics.DIED.record(count, pool=kind, model=model)

    def ask_who_lives(self, is_alive: Callable[[str], bool]) -> None:
        """Update which replicas of small pools are alive, by calling `is_alive` for each."""
        for name in self._seen.pools.keys() & {*map(pool_of, itertools.chain(*self._models.values()))}:
            running = self._seen.pools[name].running
            self._lives[name] = len(running) > _LARGEST_ASKED or any(map(is_alive, running))

    def read_starts(self, get_note: Callable[[str], bytes | None], *, running: bool) -> None:
        """Read the note of the latest start of each model that runs (it may be asleep), or of each that does not."""
        for model, (talkers, _) in self._models.items():
            if self.is_running(model) is running:
                self._starts[model] = Start.read(get_note(start_key(self._app_name, talkers)))


class PoolWatch(KnownPools):
    """Follows the pools on a separate thread: one replica asks the controller for all, every two seconds.

    This replica is the ingress of rank 0. It writes each answer to the cluster's control store for the others. Once it
    has been silent for three looks the others ask for themselves, until a replica of rank 0 writes an answer. With more
    than 400 replicas looks are less frequent; while one of the pools is dead they are more frequent. Each ingress asks
    the control store five times a second whether the few replicas of a small pool are alive.
    """

    def __init__(self, app_name: str, models: Mapping[str, tuple[str, str]]) -> None:
        super().__init__(app_name, models)
        self._own_note: Callable[[], bytes] | None = None
        self._note_key = f"pools of {app_name}"
        self._asked = 0  # consecutive looks for which it asked itself
        threading.Thread(target=self._watch, name="pool-watch", daemon=True).start()

    def share_note(self, make: Callable[[], bytes]) -> None:
        """At each look, write the note that `make` returns for the other ingress replicas."""
        self._own_note = make

    def notes(self) -> list[bytes]:
        """Notes of the other ingress replicas, including some that have ended. Blocks."""
        pool, own = self._seen.pools.get("ingress"), _rank()
        ranks = (rank for rank in range(pool.wanted if pool else 0) if rank != own)
        notes = (ray_private.get_note(_note_of(self._app_name, rank)) for rank in ranks)
        return [note for note in notes if note is not None]

    def _watch(self) -> None:
        pause, next_look = threading.Event(), 0
        for number in itertools.count():
            try:
                if number >= next_look:
                    replicas = sum(pool.wanted for pool in self._seen.pools.values())
                    next_look = number + turns_per_look(replicas, is_running=all(map(self.is_running, self._models)))
                    self._look()
                    self.read_starts(ray_private.get_note, running=True)
                self.ask_who_lives(ray_private.is_alive)
                self.read_starts(ray_private.get_note, running=False)
            except (RayError, RayServeException, TimeoutError, ConnectionError) as error:  # controller or store is down
                logger.info("the pools cannot be seen now: %s", error)
            except Exception:  # else looks would end and the last answer stay
                logger.exception("the pools cannot be seen now")
            pause.wait(_TURN_S)

    def _look(self) -> None:
        """Ask the controller if this replica asks for all, else take the asking replica's note, or ask if that is
        silent.
        """
        if self._own_note is not None and (own := _rank()) is not None:
            ray_private.put_note(_note_of(self._app_name, own), self._own_note())
        if _asks_for_all():
            self.use(seen := self._ask())
            ray_private.put_note(self._note_key, seen.note())
        elif self.hear(ray_private.get_note(self._note_key)):
            self.use(self._ask())
        else:
            self._asked = 0

    def _ask(self) -> Seen:
        pools = {pool_of(name): pool for name, pool in ray_private.pools(self._app_name).items()}
        deaths = self._count_deaths() if self._asked % _LOOKS_PER_COUNT == 0 else self._seen.deaths
        self._asked += 1
        return Seen(pools, deaths)

    def _count_deaths(self) -> dict[str, int]:
        """Count deaths from outside, because a replica that dies does not report it."""
        counts = ray_private.count_deaths(self._app_name)
        named = {pool_of(name): counts[name] for name in ("Ingress", *itertools.chain(*self._models.values()))}
        return named | {ray_private.PROXY: counts[ray_private.PROXY]}


def pool_of(deployment: str) -> str:
    """The pool's name in metrics, with its model's name if there are several: "talker", "talker base"."""
    kind, _, model = deployment.partition("-")
    return f"{POOLS[kind]} {model}".rstrip()


def turns_per_look(replicas: int, *, is_running: bool) -> int:
    """Turns of 0.2 s between two looks: more with many replicas, fewer while a pool is dead, so that its successor is
    used as soon as it is ready.
    """
    return max(_TURNS_PER_LOOK if is_running else 1, replicas // _REPLICAS_PER_TURN)


def _asks_for_all() -> bool:
    """Whether this is the ingress of rank 0. If an ingress dies, Serve gives its rank to its successor."""
    return serve.get_replica_context().deployment == "Ingress" and _rank() == 0


def _rank() -> int | None:
    rank = serve.get_replica_context().rank
    return None if rank is None else rank.rank


def _note_of(app_name: str, rank: int) -> str:
    """The key of an ingress replica's note. A replica's successor has the same rank and overwrites the note."""
    return f"ingress {rank} of {app_name}"


def scrape() -> bytes:
    """Metrics of all processes on this node, as Ray's agent exports them in Prometheus' text format."""
    node_id = ray.get_runtime_context().get_node_id()
    node = next(node for node in ray.nodes() if node["NodeID"] == node_id)
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with open_direct(url, timeout_s=_SCRAPE_TIMEOUT_S) as answer:
        content: bytes = answer.read()
    return content
