import threading
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from ray import serve

from deployments.serving import metrics, ray_private
from deployments.serving.ray_private import PROXY, Pool
from deployments.serving.reports import Start, start_key
from serve_app.scaling import pool_watch
from serve_app.scaling.pool_watch import PoolWatch, Seen, turns_per_look
from serve_app.speech.model_state import ModelStatus

ONE_MODEL = {"": ("Talker", "Codec")}


def watching(monkeypatch: pytest.MonkeyPatch, pools: dict[str, Pool], dead: set[str]) -> PoolWatch:
    """A watch after its first turn, by what Serve says of the pools, and the control store of the actors in them."""
    monkeypatch.setattr(PoolWatch, "_watch", lambda watch: None)
    monkeypatch.setattr(ray_private, "is_alive", lambda actor: actor not in dead)
    watch = PoolWatch("talkray", ONE_MODEL)
    watch._pools = pools
    watch._ask_who_lives()
    return watch


ONE, NONE, STARTING = Pool(1, ("a",)), Pool(0, ()), Pool(1, ())


@pytest.mark.parametrize(
    ("talkers", "codecs", "dead", "running", "ready"),
    [
        (ONE, Pool(1, ("b",)), set(), True, True),
        (Pool(2, ("a", "c")), Pool(1, ("b",)), {"c"}, True, True),
        (ONE, Pool(1, ("b",)), {"a"}, False, False),  # the controller has not noticed yet
        (STARTING, Pool(1, ("b",)), set(), False, False),
        (NONE, Pool(1, ("b",)), set(), False, True),  # the first request starts one
        (ONE, Pool(1, ("b",)), {"b"}, False, False),
        (ONE, NONE, set(), True, True),  # no stream passes a codec replica
    ],
)
def test_speech_needs_live_replicas(
    monkeypatch: pytest.MonkeyPatch, talkers: Pool, codecs: Pool, dead: set[str], running: bool, ready: bool
) -> None:
    watch = watching(monkeypatch, {"talker": talkers, "codec": codecs}, dead)
    assert (watch.is_running(""), watch.is_ready()) == (running, ready)


def test_an_only_model_may_have_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PoolWatch, "_watch", lambda watch: None)
    monkeypatch.setattr(ray_private, "is_alive", lambda actor: False)
    watch = PoolWatch("talkray", {"clones": ("Talker-clones", "Codec")})
    watch._pools = {"talker clones": NONE, "codec": NONE}
    assert watch.is_ready()
    watch._pools = {"talker clones": ONE, "codec": NONE}
    watch._ask_who_lives()
    assert not watch.is_ready()


@pytest.mark.parametrize(("running", "asked"), [(16, 1), (17, 0)])
def test_whether_any_of_many_lives_is_not_asked(monkeypatch: pytest.MonkeyPatch, running: int, asked: int) -> None:
    questions: list[str] = []
    talkers = Pool(running, tuple(map(str, range(running))))
    watch = watching(monkeypatch, {"talker": talkers, "codec": NONE}, set())
    monkeypatch.setattr(ray_private, "is_alive", lambda actor: not questions.append(actor))
    watch._ask_who_lives()
    assert (len(questions), watch.is_running("")) == (asked, True)


class Cluster:
    """A controller that is asked, and the control store in which one replica leaves the answer for the others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.talkers, self.rank, self.asked_by, self.deaths_asked = ONE, 0, Counter[int](), Counter[int]()
        notes: dict[str, bytes] = {}
        monkeypatch.setattr(PoolWatch, "_watch", lambda watch: None)
        monkeypatch.setattr(ray_private, "pools", self.ask)
        monkeypatch.setattr(ray_private, "count_deaths", self.count)
        monkeypatch.setattr(ray_private, "put_note", notes.__setitem__)
        monkeypatch.setattr(ray_private, "get_note", notes.get)
        context = SimpleNamespace(deployment="Ingress")
        monkeypatch.setattr(serve, "get_replica_context", lambda: context)
        self._context = context
        self.watches = [PoolWatch("talkray", ONE_MODEL) for _ in range(3)]

    def ask(self, app_name: str) -> dict[str, Pool]:
        self.asked_by[self.rank] += 1
        return {"Talker": self.talkers}

    def count(self, app_name: str) -> Counter[str]:
        self.deaths_asked[self.rank] += 1
        return Counter({"Talker": 2, PROXY: 1})

    def look(self, *ranks: int) -> None:
        """One look of each of these replicas."""
        for self.rank in ranks:
            self._context.rank = SimpleNamespace(rank=self.rank)
            self.watches[self.rank]._look()

    def seen(self, rank: int) -> Pool:
        return self.watches[rank]._pools["talker"]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


def test_one_replica_asks_for_all(cluster: Cluster) -> None:
    for _ in range(10):
        cluster.look(0, 1, 2)
    assert cluster.asked_by == {0: 10, 1: 1, 2: 1}  # who starts waits for nobody
    cluster.talkers = Pool(2, ("a", "c"))
    cluster.look(0, 1, 2)
    assert cluster.seen(1) == cluster.seen(2) == Pool(2, ("a", "c"))
    assert cluster.watches[2]._deaths == {"talker": 2, "codec": 0, "ingress": 0, PROXY: 1}


def test_the_others_ask_themselves_while_the_first_is_silent(cluster: Cluster) -> None:
    cluster.look(0, 1, 2)
    cluster.look(0, 1, 2)
    cluster.asked_by.clear()
    cluster.talkers = NONE  # as the replica of rank 0 dies
    for _ in range(2):
        cluster.look(1, 2)
    assert not cluster.asked_by
    assert cluster.seen(1) == ONE
    cluster.look(1, 2)
    assert cluster.asked_by == {1: 1, 2: 1}
    assert cluster.seen(1) == cluster.seen(2) == NONE
    cluster.look(1, 2)
    assert cluster.asked_by == {1: 2, 2: 2}
    assert cluster.deaths_asked == {0: 1, 1: 2, 2: 2}  # who begins to ask counts the dead as well
    cluster.look(0, 1, 2)  # its successor
    cluster.look(0, 1, 2)
    assert cluster.asked_by == {0: 2, 1: 2, 2: 2}


def test_a_replica_that_becomes_the_first_asks_for_all(cluster: Cluster) -> None:
    """Serve hands ranks on, where it removes replicas."""
    cluster.look(0, 1, 2)
    cluster.watches[0], cluster.watches[1] = cluster.watches[1], cluster.watches[0]
    cluster.asked_by.clear()
    for _ in range(5):
        cluster.look(0, 2)
    assert cluster.asked_by == {0: 5}


def test_a_note_of_a_former_application_is_not_believed(cluster: Cluster) -> None:
    ray_private.put_note("pools of talkray", Seen({"talker": NONE}, {}).note())
    for _ in range(2):
        cluster.look(1)
        assert cluster.seen(1) == ONE


@pytest.mark.parametrize(
    ("replicas", "is_running", "turns"),
    [(0, True, 10), (400, True, 10), (1900, True, 47), (3, False, 1), (400, False, 10), (1900, False, 47)],
)
def test_a_large_cluster_is_looked_at_less_often(replicas: int, is_running: bool, turns: int) -> None:
    """And a dead pool five times a second: `/ready` shall not lag behind the first speech of its successor."""
    assert turns_per_look(replicas, is_running=is_running) == turns


def test_a_note_says_what_was_seen() -> None:
    seen = Seen({"talker": Pool(2, ("a", "c")), "codec": NONE}, {"talker": 1})
    assert Seen.read(seen.note()) == seen
    assert seen.note() != seen.note()


def test_an_error_that_nobody_expected_does_not_end_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was seen last would stand for good: a talker that was dead then, for one."""
    answers = iter([KeyError("actor_id"), {"Talker": ONE}])
    seen = threading.Event()

    def pools(app_name: str) -> dict[str, Pool]:
        answer = next(answers, SystemExit())  # ends the thread, which would go on beside all later tests
        if isinstance(answer, BaseException):
            raise answer
        seen.set()
        return answer

    monkeypatch.setattr(pool_watch, "_TURN_S", 0.01)
    monkeypatch.setattr(ray_private, "pools", pools)
    monkeypatch.setattr(ray_private, "is_alive", lambda actor: True)
    monkeypatch.setattr(PoolWatch, "_count_deaths", lambda watch: {})
    monkeypatch.setattr(pool_watch, "_asks_for_all", lambda: True)
    monkeypatch.setattr(ray_private, "put_note", lambda key, note: None)
    PoolWatch("talkray", ONE_MODEL)
    assert seen.wait(30.0)


def test_a_model_without_a_talker_is_told_apart_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Start(time.time() - 5.0, "compiling", usual_s=10.0)
    notes = {start_key("talkray", "Talker-base"): start.note()}
    monkeypatch.setattr(PoolWatch, "_watch", lambda watch: None)
    monkeypatch.setattr(ray_private, "is_alive", lambda actor: True)
    monkeypatch.setattr(ray_private, "get_note", notes.get)
    recorded, died = list[tuple[str, str]](), list[tuple[str, int, str]]()
    monkeypatch.setattr(metrics, "died", lambda pool, count, *, model: died.append((pool, count, model)))
    monkeypatch.setattr(metrics, "replicas", lambda pool, *, wanted, running, model: recorded.append((pool, model)))
    models = {name: (f"Talker-{name}", "Codec") for name in ("custom", "base", "design")}
    watch = PoolWatch("talkray", models)
    pools = {"talker custom": ONE, "talker base": STARTING, "talker design": NONE, "codec": Pool(1, ("b",))}
    watch._use(Seen(pools, {"talker base": 2, "codec": 1}))
    assert died == [("talker", 2, "base"), ("codec", 1, "")]
    watch._ask_who_lives()
    watch._read_starts(running=False)
    assert recorded == [("talker", "custom"), ("talker", "base"), ("talker", "design"), ("codec", "")]
    assert [watch.is_running(name) for name in models] == [True, False, False]
    states = {name: watch.state(name) for name in models}
    assert [state.status for state in states.values()] == [ModelStatus.READY, ModelStatus.LOADING, ModelStatus.AT_ZERO]
    assert states["base"].percent == 50
    assert states["base"].stage == "compiling"
    notes[start_key("talkray", "Talker-custom")] = replace(start.ended(time.time()), is_asleep=True).note()
    watch._read_starts(running=True)
    assert watch.state("custom").status is ModelStatus.ASLEEP


@pytest.mark.parametrize(
    ("deployment", "pool"),
    [("Talker", "talker"), ("Codec", "codec"), ("Talker-1.7B-Base", "talker 1.7B-Base")],
)
def test_a_deployment_names_its_pool_and_its_model(deployment: str, pool: str) -> None:
    assert pool_watch.pool_of(deployment) == pool


def test_each_ingress_leaves_its_own_note_and_reads_those_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    store: dict[str, bytes] = {}
    monkeypatch.setattr(PoolWatch, "_watch", lambda watch: None)
    monkeypatch.setattr(PoolWatch, "_ask", lambda watch: Seen({"ingress": Pool(3, ("a", "b"))}, {}))
    monkeypatch.setattr(ray_private, "put_note", store.__setitem__)
    monkeypatch.setattr(ray_private, "get_note", store.get)
    watches = []
    for rank in (0, 1):
        context = SimpleNamespace(deployment="Ingress", rank=SimpleNamespace(rank=rank))
        monkeypatch.setattr(serve, "get_replica_context", lambda context=context: context)
        watch = PoolWatch("talkray", ONE_MODEL)
        watch.share_note(lambda rank=rank: b"note %d" % rank)  # type: ignore[misc]
        watch._look()
        watches.append(watch)
    assert watches[0].sizes() == {"ingress": (3, 2)}
    watches[1]._pools = watches[0]._pools
    assert watches[1].notes() == [b"note 0"]
