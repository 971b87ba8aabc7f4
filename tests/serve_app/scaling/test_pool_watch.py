"""What a replica makes of the controller's answers and of notes; and that the watch asks, notes and goes on."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from deployments.serving import metrics
from deployments.serving.ray_private import PROXY, Pool
from deployments.serving.reports import Start, start_key
from serve_app.scaling import pool_watch
from serve_app.scaling.pool_watch import KnownPools, PoolSnapshot, PoolWatch, turns_per_look
from serve_app.speech.model_state import ModelStatus

ONE_MODEL = {"": ("Talker", "Codec")}
ONE, NONE, STARTING = Pool(1, ("a",)), Pool(0, ()), Pool(1, ())
CODEC = Pool(1, ("b",))


def known(pools: dict[str, Pool], *dead: str, models: dict[str, tuple[str, str]] = ONE_MODEL) -> KnownPools:
    pools_now = KnownPools("talkray", models)
    pools_now.apply(PoolSnapshot(pools, {}))
    pools_now.update_liveness(lambda actor: actor not in dead)
    return pools_now


@pytest.mark.parametrize(
    ("talkers", "codecs", "dead", "running", "ready"),
    [
        (ONE, CODEC, "", True, True),
        (Pool(2, ("a", "c")), CODEC, "c", True, True),
        (ONE, CODEC, "a", False, False),  # the controller has not noticed yet
        (STARTING, CODEC, "", False, False),
        (NONE, CODEC, "", False, True),  # the first request starts one
        (ONE, CODEC, "b", False, False),
        (ONE, NONE, "", True, True),  # no stream passes a codec replica
    ],
)
def test_speech_needs_live_replicas(talkers: Pool, codecs: Pool, dead: str, running: bool, ready: bool) -> None:
    pools = known({"talker": talkers, "codec": codecs}, dead)
    assert (pools.is_running(""), pools.is_ready()) == (running, ready)
    assert pools.sizes()["talker"] == (talkers.wanted, len(talkers.running))


def test_an_only_model_may_have_a_name() -> None:
    models = {"clones": ("Talker-clones", "Codec")}
    assert KnownPools("talkray", models).state("clones").status is ModelStatus.READY, "before the first answer"
    for talkers, is_ready in ((NONE, True), (ONE, False)):
        assert known({"talker clones": talkers, "codec": NONE}, "a", models=models).is_ready() is is_ready


@pytest.mark.parametrize(("running", "asked"), [(16, 1), (17, 0)])
def test_whether_any_of_many_lives_is_not_asked(running: int, asked: int) -> None:
    questions: list[str] = []
    pools = known({"talker": Pool(running, tuple(map(str, range(running)))), "codec": NONE})
    pools.update_liveness(lambda actor: not questions.append(actor))
    assert (len(questions), pools.is_running("")) == (asked, True)


def note(replicas: int) -> bytes:
    return PoolSnapshot({"talker": Pool(replicas, tuple(map(str, range(replicas))))}, {}).note()


def test_a_replica_asks_itself_while_the_one_that_asks_for_all_is_silent() -> None:
    pools, former, first, second, third = known({"talker": ONE}), note(9), note(2), note(3), note(4)
    told = [
        (None, True, 1), (former, True, 1), (former, True, 1),  # of a former application: not believed
        (first, False, 2), (first, False, 2), (first, False, 2), (first, True, 2), (first, True, 2),
        (second, False, 3), (third, False, 4), (None, False, 4), (third, False, 4), (third, True, 4), (third, True, 4),
    ]  # fmt: skip
    for number, (heard, asks, wanted) in enumerate(told):
        assert (pools.receive_note(heard), pools.sizes()["talker"][0]) == (asks, wanted), number


@pytest.mark.parametrize(
    ("replicas", "is_running", "turns"),
    [(0, True, 10), (400, True, 10), (1900, True, 47), (3, False, 1), (400, False, 10), (1900, False, 47)],
)
def test_a_large_cluster_is_looked_at_less_often(replicas: int, is_running: bool, turns: int) -> None:
    """And a dead pool five times a second: `/ready` shall not lag behind the first speech of its successor."""
    assert turns_per_look(replicas, is_running=is_running) == turns


def test_a_model_without_a_talker_is_told_apart_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Start(time.time() - 5.0, "compiling", usual_s=10.0)
    notes = {start_key("talkray", "Talker-base"): start.note()}
    recorded = {each: list[tuple[float, str, str]]() for each in (metrics.DIED, metrics.WANTED, metrics.RUNNING)}
    for each, records in recorded.items():
        monkeypatch.setattr(
            each, "record", lambda value, *, pool, model, records=records: records.append((value, pool, model))
        )
    models = {name: (f"Talker-{name}", "Codec") for name in ("custom", "base", "design")}
    pools = KnownPools("talkray", models)
    seen = {"talker custom": ONE, "talker base": STARTING, "talker design": NONE, "codec": CODEC}
    pools.apply(PoolSnapshot(seen, {"talker base": 2, "codec": 1}))
    assert recorded[metrics.DIED] == [(2, "talker", "base"), (1, "codec", "")]
    for each, counts in (
        (metrics.WANTED, [pool.wanted for pool in seen.values()]),
        (metrics.RUNNING, [len(pool.running) for pool in seen.values()]),
    ):
        names = [("talker", "custom"), ("talker", "base"), ("talker", "design"), ("codec", "")]
        assert recorded[each] == [(count, *name) for count, name in zip(counts, names, strict=True)]
    pools.update_liveness(lambda actor: True)
    pools.read_starts(notes.get, running=False)
    assert [pools.is_running(name) for name in models] == [True, False, False]
    states = {name: pools.state(name) for name in models}
    assert [state.status for state in states.values()] == [ModelStatus.READY, ModelStatus.LOADING, ModelStatus.AT_ZERO]
    assert (states["base"].percent, states["base"].stage) == (50, "compiling")
    notes[start_key("talkray", "Talker-custom")] = replace(start.ended(time.time()), is_asleep=True).note()
    pools.read_starts(notes.get, running=True)
    assert pools.state("custom").status is ModelStatus.ASLEEP


class Cluster:
    """The controller and the control store, and which ingress replica asks them now."""

    PROXY = PROXY

    def __init__(self) -> None:
        self.rank, self.talkers, self.answers = 0, ONE, list[Exception]()
        self.deployment = "Ingress"
        self.asked, self.counted = Counter[int](), Counter[int]()
        notes: dict[str, bytes] = {}
        self.put_note, self.get_note = notes.__setitem__, notes.get

    def get_replica_context(self) -> SimpleNamespace:
        return SimpleNamespace(deployment=self.deployment, rank=SimpleNamespace(rank=self.rank))

    def pools(self, app_name: str) -> dict[str, Pool]:
        if self.answers:
            raise self.answers.pop(0)
        self.asked[self.rank] += 1
        return {"Talker": self.talkers, "Ingress": Pool(3, ("x", "y"))}

    def count_deaths(self, app_name: str) -> Counter[str]:
        self.counted[self.rank] += 1
        return Counter({"Talker": 2, PROXY: 1})


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()
    monkeypatch.setattr(pool_watch, "ray_private", cluster)
    monkeypatch.setattr(pool_watch, "serve", cluster)
    return cluster


@pytest.fixture
def look(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Callable[..., PoolWatch]:
    """One look of the replicas of these ranks: the last one's watch."""
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)
    watches = [PoolWatch("talkray", ONE_MODEL) for _ in range(3)]
    for rank, watch in enumerate(watches):
        watch.share_note(lambda rank=rank: b"note %d" % rank)  # type: ignore[misc]

    def look(*ranks: int) -> PoolWatch:
        for cluster.rank in ranks:
            watches[cluster.rank]._look()
        return watches[cluster.rank]

    return look


def test_one_replica_asks_for_all(cluster: Cluster, look: Callable[..., PoolWatch]) -> None:
    for _ in range(10):
        look(0, 1, 2)
    assert cluster.asked == {0: 10, 1: 1, 2: 1}  # a new replica asks at once
    assert cluster.counted == {0: 2, 1: 1, 2: 1}  # seldom: the list of the dead may be long
    cluster.talkers = Pool(2, ("a", "c"))
    watch = look(0, 1, 2)
    assert watch.sizes() == {"talker": (2, 2), "ingress": (3, 2)}
    assert watch._snapshot.deaths == {"talker": 2, "codec": 0, "ingress": 0, PROXY: 1}
    assert look(0).notes() == [b"note 1", b"note 2"]
    cluster.rank, cluster.deployment = 0, "Jobs"
    assert not pool_watch._is_leader()


def test_the_others_ask_while_it_is_away_and_recount_the_dead(cluster: Cluster, look: Callable[..., PoolWatch]) -> None:
    for _ in range(2):
        look(0, 1)
    for _ in range(7):
        look(1)
    assert (cluster.asked[1], cluster.counted[1]) == (1 + 5, 1 + 1)
    look(0, 1)
    for _ in range(3):
        look(1)
    assert (cluster.asked[1], cluster.counted[1]) == (7, 3)


@pytest.mark.parametrize(("dead", "looks"), [("", 3), ("c", 12)])
def test_the_watch_outlasts_errors(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, dead: str, looks: int) -> None:
    """What was seen last would stand for good: a talker that was dead then, for one."""
    turns, answer, now_s = iter(range(40)), cluster.pools, time.time()

    def wait(_: float) -> None:
        if next(turns) == 39:
            cluster.put_note(start_key("talkray", "Talker-design"), Start(now_s, "warming up").note())

    pause = SimpleNamespace(wait=wait)
    monkeypatch.setattr(pool_watch, "threading", SimpleNamespace(Event=lambda: pause, Thread=Mock()))
    monkeypatch.setattr(cluster, "is_alive", lambda actor: actor != dead, raising=False)
    seen = {"Talker-base": ONE, "Talker-design": Pool(1, ("c",)), "Codec": CODEC}
    monkeypatch.setattr(cluster, "pools", lambda app_name: answer(app_name) and seen)
    cluster.answers = [KeyError("actor_id"), ConnectionError("the controller is away")]
    for name, start in (("base", Start(now_s, took_s=1.0, is_asleep=True)), ("design", Start(now_s, "compiling"))):
        cluster.put_note(start_key("talkray", f"Talker-{name}"), start.note())
    watch = PoolWatch("talkray", {name: (f"Talker-{name}", "Codec") for name in ("base", "design")})
    with pytest.raises(StopIteration):
        watch._watch()
    assert cluster.asked == {0: looks}
    assert (watch.state("base").status, watch.is_running("design")) == (ModelStatus.ASLEEP, not dead)
    assert not dead or watch.state("design").stage == "warming up"


def test_the_metrics_are_those_of_this_node(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [{"NodeID": name, "NodeManagerAddress": f"10.0.0.{name}", "MetricsExportPort": 8080} for name in "12"]
    here = SimpleNamespace(get_node_id=lambda: "2")
    ray = SimpleNamespace(nodes=lambda: nodes, get_runtime_context=lambda: here)
    monkeypatch.setattr(pool_watch, "ray", ray)
    monkeypatch.setattr(pool_watch, "open_direct", lambda url, timeout_s: BytesIO(url.encode()))
    assert pool_watch.scrape() == b"http://10.0.0.2:8080/metrics"
