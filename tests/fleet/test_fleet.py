"""The production config on nodes that join, are drained, die; on a head that dies; under streams of three minutes.

One fleet for all tests, in this order: a head whose store is in Redis, and a node of each kind to begin with.
"""

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from tests.fleet.listeners import Listeners, different, summary, undisturbed
from tests.serve_app.nodes.metadata import ACTION, interruption, serving
from tools.experiments.faults.polite import BYTES_PER_S
from tools.experiments.fleet.fleet import (
    CODEC,
    CODECS,
    INGRESS,
    METRICS_PORT,
    PER_NODE,
    ROOT,
    TALKER,
    TALKERS,
    Fleet,
    fleet,
    scaled_down,
)
from tools.experiments.fleet.namespaces import Machine

AT_ONCE = 4
GONE_S = 900.0
NOTICE_S = 60.0
LONG_SENTENCES, LONG_S = 50, 180.0  # of text, and at least so long spoken
ONE_BY_ONE = 6  # streams
MOSTLY = 0.7  # of the work; without preference a third to two thirds
SETTLED_S = 15.0
SIZES = {TALKER: 2, CODEC: 2, INGRESS: 2}
AWAY_S = 90.0  # Ray's nodes by themselves would give up after 60: `ray_settings.CLUSTER`


@dataclass(slots=True)
class Running:
    fleet: Fleet
    expected: dict[int, bytes]

    def listeners(self, *doors: Machine) -> Listeners:
        return Listeners(self.fleet.open_doors(doors), self.fleet.key, at_once=AT_ONCE)

    def nodes(self, pool: str = "") -> list[Machine]:
        """Workers that run, the oldest first."""
        return [each for each in self.fleet.workers if each.is_running and each.name.startswith(pool)]

    def on(self, machine: Machine, deployment: str) -> int:
        return sum(each.node == machine.address for each in self.fleet.replicas(deployment))


@pytest.fixture(scope="module")
def running(possible: None) -> Iterator[Running]:
    with fleet() as made:
        made.keep_in_redis()
        made.start_head()
        for pool in (TALKERS, CODECS):
            made.add(f"{pool}1", pool)
        made.deploy(scaled_down(made))
        yield Running(made, undisturbed(made.open_doors(made.workers), made.key))


def test_each_pool_runs_where_its_label_is_and_every_node_has_a_door(running: Running) -> None:
    fleet = running.fleet
    pools = {node["address"]: node["labels"].get("pool") for node in fleet.ask("nodes")}
    assert [pools[each.node] for each in fleet.replicas(TALKER)] == [TALKERS] * 2
    assert [pools[each.node] for each in fleet.replicas(CODEC)] == [CODECS] * 2
    assert [pools[each.node] for each in fleet.replicas(INGRESS)] == [CODECS] * 2
    for door in (fleet.head, *running.nodes()):
        listeners = Listeners(fleet.open_doors([door]), fleet.key, at_once=1)
        with listeners.listening():
            listeners.wait_heard(1)
        assert different(listeners.heard, running.expected) == [], door.name


def test_a_head_that_is_away_for_90_s_is_not_missed(running: Running) -> None:
    """A talker replica dies meanwhile: the other one speaks, and a third is there soon after the head."""
    fleet, (talkers,) = running.fleet, running.nodes(TALKERS)
    victim = fleet.replicas(TALKER)[0]
    listeners = running.listeners(*running.nodes())  # a load balancer knows that the head's door is away
    with listeners.listening():
        listeners.wait_under_way(AT_ONCE)
        left_s = time.monotonic()
        fleet.kill_head()
        talkers.kill(victim.pid)
        listeners.wait_heard(AT_ONCE)  # new requests too
        time.sleep(max(0.0, left_s + AWAY_S - time.monotonic()))
        assert len(running.nodes()) == 2
        away_s, back_s = time.monotonic() - left_s, time.monotonic()
        fleet.start_head()
        start_s = time.monotonic() - back_s
        fleet.wait(lambda: _replaced(fleet, victim.id), "another talker")
        replaced_s = time.monotonic() - back_s - start_s
        listeners.wait_heard(AT_ONCE)
    print(f"the head was away for {away_s:.0f} s and started in {start_s:.1f} s; {replaced_s:.1f} s later the talker")
    print(f"that had died was replaced: {summary(listeners.heard)}")
    assert different(listeners.heard, running.expected) == []


def _replaced(fleet: Fleet, victim: str) -> bool:
    ids = [each.id for each in fleet.replicas(TALKER)]
    return len(ids) == 2 and victim not in ids


@pytest.mark.parametrize("pool", [TALKERS, CODECS])
def test_a_node_that_joins_under_load_takes_work(running: Running, pool: str) -> None:
    fleet, deployment = running.fleet, TALKER if pool == TALKERS else CODEC
    listeners = running.listeners(*running.nodes())
    with listeners.listening():
        listeners.wait_under_way(AT_ONCE)
        fleet.ask("deploy", scaled_down(fleet, talkers=PER_NODE + 1, codecs=PER_NODE + 1))  # more than there is room
        joined = fleet.add(f"{pool}2", pool)
        took_s = fleet.wait(lambda: running.on(joined, deployment) > 0, f"a replica on {joined.name}")
        listeners.wait_heard(AT_ONCE)
    print(f"{joined.name}: a replica {took_s:.1f} s after it had joined; {summary(listeners.heard)}")
    assert different(listeners.heard, running.expected) == []


def test_what_comes_in_at_a_node_s_door_is_made_there(running: Running) -> None:
    """One stream at a time, so that all are idle; ingress and codec replicas are on two nodes."""
    fleet, doors = running.fleet, running.nodes(CODECS)
    more = {"talkers": PER_NODE + 1, "codecs": PER_NODE + 1}  # as before
    fleet.deploy(scaled_down(fleet, **more, ingresses=PER_NODE + 1))
    assert all(running.on(door, deployment) for door in doors for deployment in (INGRESS, CODEC))
    for door in doors:
        before = _done(fleet, doors)
        listeners = Listeners(fleet.open_doors([door]), fleet.key, at_once=1, sentences=1)
        with listeners.listening():
            listeners.wait_heard(ONE_BY_ONE)
        assert [each.error for each in listeners.failed] == []
        seconds = sum(len(each.pcm) for each in listeners.heard) / BYTES_PER_S
        after = _done(fleet, doors, at_least=sum(before[INGRESS].values()) + 0.99 * seconds)
        for deployment in (INGRESS, CODEC):
            done = {node: after[deployment][node] - before[deployment][node] for node in after[deployment]}
            share = done[door.name] / sum(done.values())
            print(f"{door.name}: {share:.0%} of what its door asked of {deployment} was made there")
            assert share >= MOSTLY
    fleet.deploy(scaled_down(fleet, **more))


def _done(fleet: Fleet, nodes: list[Machine], at_least: float = 0.0) -> dict[str, dict[str, float]]:
    """Seconds of audio that each node's ingress replicas have sent, and chunks that its codec replicas have decoded.

    `at_least`: seconds of all nodes. Replicas tell of them every ten seconds: what is returned has stayed for longer.
    """
    done: dict[str, dict[str, float]] = {}
    since_s = time.monotonic()

    def settled() -> bool:
        nonlocal done, since_s
        now = {name: {node.name: _counted(node, name) for node in nodes} for name in (INGRESS, CODEC)}
        if now != done:
            done, since_s = now, time.monotonic()
        return sum(done[INGRESS].values()) >= at_least and time.monotonic() - since_s > SETTLED_S

    fleet.wait(settled, "metrics", 300)
    return done


def _counted(node: Machine, deployment: str) -> float:
    with urllib.request.urlopen(f"http://{node.address}:{METRICS_PORT}/metrics", timeout=60) as answer:
        words = [line.decode().split() for line in answer]
    wanted = {INGRESS: ("ray_talkray_audio_seconds_total{", ""), CODEC: ("ray_talkray_batch_size_sum{", 'pool="codec"')}
    name, label = wanted[deployment]
    return sum(float(each[1]) for each in words if len(each) == 2 and each[0].startswith(name) and label in each[0])


def test_a_node_whose_end_its_cloud_announces_hands_its_streams_over(running: Running) -> None:
    """By what `cluster/aws.yaml` starts beside Ray. Streams outlast the notice: they go on by their codes."""
    fleet, leaving = running.fleet, running.nodes(TALKERS)[0]
    listeners = running.listeners(*[each for each in running.nodes() if each is not leaving])
    with serving(fleet.net.gateway) as metadata, listeners.listening():
        address = f"AWS_EC2_METADATA_SERVICE_ENDPOINT=http://{metadata.host}"
        watcher = leaving.inside(
            "env", address, f"PYTHONPATH={ROOT}", sys.executable, "-m", "serve_app.nodes.notices", "aws"
        )
        environment = os.environ | fleet.environment
        with leaving.log.open("ab") as log, subprocess.Popen(watcher, stdout=log, stderr=log, env=environment):
            listeners.wait_under_way(AT_ONCE)
            metadata.answers[ACTION] = interruption(NOTICE_S)
            took_s = fleet.wait(lambda: not running.on(leaving, TALKER), f"no replica on {leaving.name}", GONE_S)
            listeners.wait_heard(AT_ONCE)
            leaving.kill()
    print(f"announced {NOTICE_S:.0f} s ahead: empty after {took_s:.1f} s; {summary(listeners.heard)}")
    assert different(listeners.heard, running.expected) == []


def test_a_node_that_is_told_to_end_finishes_what_passes_it(running: Running) -> None:
    """`SIGTERM` to `ray start --block`, on a node with a door, ingress and codec replicas."""
    fleet, leaving = running.fleet, running.nodes(CODECS)[0]
    others = [each for each in running.nodes() if each is not leaving]
    listeners = running.listeners(leaving, *others)
    with listeners.listening():
        listeners.wait_under_way(AT_ONCE)
        listeners.urls = [fleet.url(each) for each in others]  # a load balancer sends nobody there any more
        leaving.terminate()
        took_s = fleet.wait(lambda: not leaving.is_running, f"the end of {leaving.name}", GONE_S)
        listeners.wait_heard(AT_ONCE)
    print(f"told to end: gone after {took_s:.1f} s; {summary(listeners.heard)}")
    assert different(listeners.heard, running.expected) == []


def test_a_node_that_dies_takes_no_stream_with_it(running: Running) -> None:
    """All talkers there are: the streams wait for a node that joins."""
    fleet, (victim,) = running.fleet, running.nodes(TALKERS)
    doors = running.nodes(CODECS)
    listeners = running.listeners(*doors)
    joined = fleet.add(f"{TALKERS}3", TALKERS)
    fleet.wait(lambda: running.on(joined, TALKER) > 0, f"a replica on {joined.name}")
    with listeners.listening():
        listeners.wait_under_way(AT_ONCE)
        victim.kill()
        listeners.wait_heard(2 * AT_ONCE)
    print(f"{victim.name} died: {summary(listeners.heard)}")
    assert different(listeners.heard, running.expected) == []


def test_a_stream_of_three_minutes_survives_scale_events_and_a_rolling_update(running: Running) -> None:
    """Ingress replicas too: each change of theirs starts another HAProxy. Those that speak end with their streams."""
    fleet = running.fleet
    fleet.deploy(_sized(fleet))
    doors = fleet.open_doors(running.nodes())
    fleet.add(f"{CODECS}3", CODECS)  # room for replicas beside those that end later
    expected = undisturbed(doors, fleet.key, sentences=LONG_SENTENCES, seeds=1)
    assert len(expected[0]) >= LONG_S * BYTES_PER_S
    listeners = Listeners(doors, fleet.key, at_once=len(doors), sentences=LONG_SENTENCES, seeds=1, plays=True)
    changes = [{INGRESS: 1}, {TALKER: 1}, {CODEC: 1}, {}, {INGRESS: 1, CODEC: 1}]
    with listeners.listening():
        listeners.wait_under_way(len(doors))
        first = list(listeners.under_way)
        for change in changes:
            sizes = SIZES | change
            fleet.ask("deploy", _sized(fleet, change))
            fleet.wait(lambda: {name: len(fleet.replicas(name)) for name in SIZES} == sizes, f"replicas: {sizes}")  # noqa: B023
        before = {each.id for name in (TALKER, CODEC) for each in fleet.replicas(name)}
        updated = _sized(fleet, api={"max_input_chars": 4095})
        fleet.ask("deploy", updated)
        fleet.wait(lambda: not before & {each.id for name in (TALKER, CODEC) for each in fleet.replicas(name)}, "new")
        assert not listeners.heard, "the streams ended before the last change"
        fleet.wait(lambda: len(listeners.heard) >= len(doors), "the end of the streams", 900)
    fleet.deploy(updated)
    print(f"{len(changes)} scale events and a rolling update: {summary(first)}")
    assert different(first, expected) == []


def _sized(fleet: Fleet, change: Mapping[str, int] | None = None, **args: Mapping[str, Any]) -> dict[str, Any]:
    """Pools of given sizes. Serve changes these by themselves where it does not scale them: with other `args` it
    replaces all replicas."""
    config = scaled_down(fleet, **args)
    (application,) = config["applications"]
    sizes = SIZES | (change or {})
    application["deployments"] = [{"name": name, "num_replicas": count} for name, count in sizes.items()]
    return config
