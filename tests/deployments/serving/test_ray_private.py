"""Ray's private names: two files use them, and they are there in the version that it was checked with."""

import inspect
import itertools
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.core.generated.common_pb2 import ActorDeathCause, ActorDiedErrorContext, OomContext
from ray.serve._private import replica
from ray.serve._private.client import ServeControllerClient
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve._private.constants import SERVE_PROXY_NAME

from deployments.errors import StartError
from deployments.serving import ray_private, ray_start
from deployments.serving.ray_private import CHECKED_WITH, PROXY, Pool, deaths
from deployments.serving.ray_start import AGENT_PORTS, ended_part

ROOT = Path(__file__).parents[3]
PRIVATE = re.compile(
    r"\bray\b[\w.]*\._\w+|_internal_kv|_get_global_client|ray\.core\.generated|\b_replica_impl\b|\b_shutting_down\b"
)


def test_this_is_the_version_that_was_checked() -> None:
    assert ray.__version__ == CHECKED_WITH, "read ray_private.py and ray_start.py against this Ray's source first"


def test_two_files_use_private_names_but_for_subclasses() -> None:
    folders = ("serve_app", "deployments", "loadtest", "tools")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    users = {file.relative_to(ROOT).as_posix() for file in files if PRIVATE.search(file.read_text())}
    subclasses = {f"serve_app/{name}.py" for name in ("proxy/kept_proxy", "nodes/aws", "nodes/gcp")}
    schemas = {"tools/cluster_check/machines.py"}  # Ray's own, of a checkout's command
    commands = {"tools/talkray_tools/logs.py"}  # without a token, Ray would abort the command
    suites = {"tools/experiments/fleet/control.py", "tools/suites/pools.py"}
    checked = {f"deployments/serving/{name}.py" for name in ("ray_private", "ray_start")}
    assert users - subclasses - schemas - commands - suites == checked


def test_replicas_say_that_they_stop_where_it_is_read() -> None:
    assert "self._replica_impl" in inspect.getsource(replica.ReplicaActor)
    assert "self._shutting_down = True" in inspect.getsource(replica.Replica._perform_graceful_shutdown)


def dead(name: str, reason: str | None = "WORKER_DIED") -> dict[str, Any]:
    if reason is None:
        return {"Name": name, "DeathCause": ActorDeathCause(oom_context=OomContext())}
    context = ActorDiedErrorContext(reason=ActorDiedErrorContext.Reason.Value(reason))
    return {"Name": name, "DeathCause": ActorDeathCause(actor_died_error_context=context)}


INGRESS, TALKERS = "SERVE_REPLICA::talkray#Ingress#a1", [f"SERVE_REPLICA::talkray#Talker#{name}" for name in "bc"]
OTHERS = ("", "Listener", "SERVE_REPLICA::other#Talker#x", "SERVE_CONTROLLER_ACTOR")


@pytest.mark.parametrize(("actors", "expected"), [
    # As Serve names them.
    ([dead(ReplicaID("b2", DeploymentID("Talker", "talkray")).to_full_id_str())], {"Talker": 1}),
    ([dead(f"{SERVE_PROXY_NAME}-0f")], {PROXY: 1}),
    # By deployment.
    ([dead(INGRESS), dead(TALKERS[0], "NODE_DIED"), dead(TALKERS[1], None)], {"Ingress": 1, "Talker": 2}),
    ([dead(INGRESS, reason) for reason in ("RAY_KILL", "OUT_OF_SCOPE")], {}),  # they were stopped
    ([*map(dead, OTHERS)], {}),
])  # fmt: skip
def test_who_died_is_counted_by_deployment(actors: list[dict[str, Any]], expected: dict[str, int]) -> None:
    assert deaths(actors, "talkray") == expected


def test_of_a_ray_that_was_not_started_no_part_has_ended() -> None:
    assert ended_part(["raylet"]) is None


@pytest.mark.parametrize("waits_for_port", [False, True])
@pytest.mark.parametrize(("failures", "patience_s", "started"), [(0, 0.0, True), (3, 4.5, True), (3, 1.5, False)])
def test_a_node_waits_for_its_parts(
    failures: int, patience_s: float, started: bool, waits_for_port: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = itertools.cycle([*[RuntimeError("not there")] * failures, {"state": "ALIVE"}])

    limits: list[object] = []

    def ask(*_: str, timeout_ms: int | None = None) -> object:
        limits.append(timeout_ms)
        answer = next(answers)
        if isinstance(answer, RuntimeError):
            raise answer
        return answer

    raylet = SimpleNamespace(poll=lambda: 1, returncode=-9, pid=7)
    parts, given_ports = {"raylet": [SimpleNamespace(process=raylet)]}, dict(zip(AGENT_PORTS, range(4), strict=True))
    persisted, stored, meanwhile = dict[str, int](), dict[bytes, bytes](), list[str | None]()
    store = SimpleNamespace(internal_kv_put=lambda key, value, *_: stored.update({key: value}))
    starting = SimpleNamespace(
        all_processes=parts, _ray_params=SimpleNamespace(), _session_dir="", _node_id="id", get_gcs_client=lambda: store
    )
    for owner, name, value in (
        (ray_start, "persist_port", lambda *port: persisted.update([port[2:]])),
        (ray_start.Node, "start_head_processes", lambda _: meanwhile.append(ended_part(["raylet"]))),
        (ray_start.services, "get_node", ask),
        (ray_start.node, "wait_for_persisted_port", ask),
        (ray_start, "_starting", []),
        (ray_start, "time", SimpleNamespace(monotonic=itertools.count().__next__, sleep=lambda _: None)),
        (ray_start.api, "HTTP_PROXY_TIMEOUT", 60), (ray_start.client, "HTTP_PROXY_TIMEOUT", 60),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, value)
    ray_start.extend_start_timeouts(patience_s, [*given_ports.values()])
    assert (patience_s, patience_s) == (ray_start.api.HTTP_PROXY_TIMEOUT, ray_start.client.HTTP_PROXY_TIMEOUT)
    ray_start.Node.start_head_processes(starting)
    assert vars(starting._ray_params) == persisted == given_ports
    assert [ended_part(["raylet"])] == meanwhile == ["Ray's raylet (process 7) was killed by signal 9"]
    assert stored == {b"dashboard": b"127.0.0.1:1"}  # nothing listens there
    given = {"timeout_ms": 30_000} if waits_for_port else {}
    asked = ray_start.node.wait_for_persisted_port if waits_for_port else ray_start.services.get_node
    with nullcontext() if started else pytest.raises(StartError, match="Ray did not start within"):
        assert [asked("address", "id", **given) for _ in range(3)] == [{"state": "ALIVE"}] * 3
    assert set(limits) == {100 if given else None}, "no thread runs while Ray waits for a port"


def test_a_part_that_has_ended_is_named_with_how(monkeypatch: pytest.MonkeyPatch) -> None:
    def part(status: int | None) -> SimpleNamespace:
        return SimpleNamespace(process=SimpleNamespace(poll=lambda: status, returncode=status, pid=7))

    parts = {"gcs_server": [part(None)], "raylet": [part(None), part(-9)], "dashboard": [part(3)]}
    monkeypatch.setattr(ray._private.worker, "_global_node", SimpleNamespace(all_processes=parts))
    ended = [ended_part(names) for names in (["gcs_server"], ["raylet"], ["gcs_server", "dashboard"], ["none"])]
    killed, ended_itself = "Ray's raylet (process 7) was killed by signal 9", "Ray's dashboard (process 7) ended with"
    assert ended == [None, killed, f"{ended_itself} status 3", None]


def test_pools_of_the_application_want_what_does_not_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that starts, or has no actor yet, does not run."""
    migrating = SimpleNamespace(value="PENDING_MIGRATION")
    states = ("RUNNING", "STARTING", "RECOVERING", "STOPPING", migrating, "UPDATING")
    talkers = [{"state": state, "actor_id": f"{number}"} for number, state in enumerate(states)]
    talkers += [{"state": "RUNNING", "actor_id": None}, {"state": "STARTING"}]
    details = {"applications": {"talkray": {"deployments": {"Talker": {"replicas": talkers}}}}}
    client = SimpleNamespace(get_serve_details=lambda: details)
    monkeypatch.setattr(ray_private, "_get_global_client", lambda: client)
    assert ray_private.pools("talkray") == {"Talker": Pool(7, ("0", "2", "4"))}
    assert ray_private.pools("another") == {}


def test_a_note_replaces_the_previous_one(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: dict[tuple[bytes, bytes], bytes] = {}

    def put(key: bytes, note: bytes, overwrite: bool, namespace: bytes) -> int:
        is_new = (namespace, key) not in notes
        if overwrite or is_new:
            notes[namespace, key] = note
        return int(is_new)

    store = SimpleNamespace(internal_kv_put=put, internal_kv_get=lambda key, namespace: notes.get((namespace, key)))
    monkeypatch.setattr(ray_private.internal_kv, "global_gcs_client", store)
    for note in (b"one", b"two"):
        ray_private.put_note("stage", note)
    assert (ray_private.get_note("stage"), ray_private.get_note("another")) == (b"two", None)


@pytest.mark.parametrize(("told", "lives"), [({"State": "ALIVE"}, True), ({"State": "DEAD"}, False), ({}, False)])
def test_a_replica_lives_while_ray_says_so(monkeypatch: pytest.MonkeyPatch, told: dict[str, str], lives: bool) -> None:
    monkeypatch.setattr(ray._private.state, "actors", lambda actor_id: told if actor_id == "a" else None)
    assert ray_private.is_alive("a") is lives


def test_what_is_asked_of_the_controller_is_there() -> None:
    assert isinstance(ServeControllerClient.http_config, property)
    assert callable(ServeControllerClient.get_serve_details)
    assert callable(ray._private.state.actors)
