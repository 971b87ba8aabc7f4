"""Whatever happens to a replica, no listener can tell."""

import resource
import signal
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from deployments.protocol import Reference
from tests.faults.conftest import AT_ONCE, STREAMS
from tools.experiments.faults.kills import speak
from tools.suites.listening import Heard, Speaking, requests, wrong
from tools.suites.pools import CODEC, ENGINE, TALKER, Service, config, redeploy, serving, tiny_model

CONTROLLER = "ServeController"
_WORD_S = 0.3
_FRAMES = 150  # more than the text has tokens: what is written behind the last one is spoken in another segment


def disturb(fault: Callable[[], None]) -> list[Heard]:
    """All streams, with a fault once they have all begun."""
    speaking = Speaking(STREAMS, at_once=AT_ONCE)
    speaking.go_on(may_begin=True)
    speaking.begun()
    fault()
    return speaking.finish()


def test_kills_of_every_kind(service: Service, undisturbed: list[Heard]) -> None:
    speaking, killer = speak(service, STREAMS * 2, at_once=AT_ONCE, kills=6)
    assert wrong(speaking.heard, undisturbed) == []
    assert {kill.what for kill in killer.kills} == {TALKER, CODEC, ENGINE}


@pytest.fixture
def cloning(tmp_path: Path) -> Iterator[Service]:
    with serving(config(tiny_model(tmp_path / "base", "Base"))) as service:
        yield service


@pytest.mark.parametrize("inline", [False, True])
def test_clones_outlive_all_who_have_read_their_recording(cloning: Service, inline: bool) -> None:
    """Samples are sent once; replicas that never had them go on with streams, and speak new ones, as the first did."""
    hiss = np.random.default_rng(inline).normal(0, 0.1, 240_000).astype(np.float32)
    streams = [each.changed(voice=None, reference=Reference(hiss, "Hiss.")) for each in requests(5, frames=60)]
    speaking = Speaking(streams[:1], at_once=4, inline=inline)
    speaking.finish()
    speaking.add(streams)
    expected = [*speaking.finish()[1:]]
    beside = "talker prompt" if inline else "codec prompt"
    assert speaking.recordings() == ["codec samples", *[beside] * len(streams)]
    speaking.heard.clear()
    speaking.add(streams)
    speaking.go_on(may_begin=True)
    speaking.begun()
    lost = [(pool, cloning.processes(pool)) for pool in (TALKER, CODEC)]
    for _, replicas in lost:
        for victim in replicas:
            cloning.kill(victim)
    heard = speaking.finish()
    for pool, replicas in lost:
        cloning.replaces(replicas, pool, replicas[0])
        cloning.wait_for(pool, 2)
    assert wrong(heard, expected) == []
    speaking.heard.clear()
    speaking.add(streams)
    assert wrong(speaking.finish(), expected) == []
    recordings = speaking.recordings()
    assert {*recordings[1:]} == {beside}
    assert len(recordings) > 1 + 3 * len(streams)  # some were asked for again, and none by samples


@pytest.mark.parametrize("what", [ENGINE, TALKER, CODEC])
def test_a_process_that_stands_still(service: Service, undisturbed: list[Heard], what: str) -> None:
    pool = CODEC if what is CODEC else TALKER
    victim, replicas = service.processes(what)[0], service.processes(pool)
    heard = disturb(lambda: service.kill(victim, signal.SIGSTOP))
    service.replaces(replicas, pool, victim)
    assert wrong(heard, undisturbed) == []


@pytest.mark.parametrize("what", [ENGINE, TALKER, CODEC])
def test_a_death_while_the_text_is_being_written(service: Service, what: str) -> None:
    """The next replica reads the text again, and goes on with the words that come."""
    streams = requests(6, frames=_FRAMES)
    expected = Speaking(streams, at_once=6, word_s=_WORD_S).finish()
    assert [each.error for each in expected] == [None] * len(streams)
    assert [len(each.codes) for each in expected] == [_FRAMES] * len(streams)
    pool = CODEC if what is CODEC else TALKER
    replicas = service.processes(pool)
    speaking = Speaking(streams, at_once=6, word_s=_WORD_S)
    speaking.go_on(may_begin=True)
    speaking.begun()
    victim = service.processes(what)[0]
    service.kill(victim)
    heard = speaking.finish()
    service.replaces(replicas, pool, victim)
    gap_s, usual_s = (max(map(_longest_gap, streams)) for streams in (heard, expected))
    print(f"longest gap in any stream: {gap_s:.2f} s with the death of {what}, {usual_s:.2f} s without")
    assert wrong(heard, expected) == []


def _longest_gap(heard: Heard) -> float:
    return max(later - before for before, later in pairwise(heard.arrivals_s))


def test_a_codec_replica_out_of_memory(service: Service, undisturbed: list[Heard]) -> None:
    victim, *others = service.processes(CODEC)

    def starve() -> None:
        with open(f"/proc/{victim}/statm") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
        resource.prlimit(victim, resource.RLIMIT_AS, (used, used))

    heard = disturb(starve)
    service.replaces([victim, *others], CODEC, victim)
    assert wrong(heard, undisturbed) == []


def test_the_controller_dies_and_then_a_replica(service: Service, undisturbed: list[Heard]) -> None:
    def fault() -> None:
        service.kill(service.processes_titled(CONTROLLER)[0])
        service.kill(service.processes(TALKER)[0])

    assert wrong(disturb(fault), undisturbed) == []


def test_a_rolling_redeploy(service: Service, undisturbed: list[Heard]) -> None:
    before = {*service.processes(TALKER), *service.processes(CODEC)}
    talker = service.app.talker.model_copy(update={"max_num_waiting": 65})
    speaking = Speaking(STREAMS * 20, at_once=AT_ONCE)
    speaking.go_on(may_begin=True)
    speaking.begun()
    redeploy(service.app.model_copy(update={"talker": talker}), {TALKER: 2, CODEC: 2})
    while before & {*service.processes(TALKER), *service.processes(CODEC)}:
        speaking.go_on(may_begin=True)
    speaking.drop_rest()
    assert wrong(speaking.finish(), undisturbed) == []


def test_scaling_down_waits_for_nobody(service: Service) -> None:
    """Streams that would go on for a long time leave the replicas that are to go."""
    redeploy(service.app, {TALKER: 2, CODEC: 2})
    for pool in (TALKER, CODEC):
        service.wait_for(pool, 2)
    lasting = requests(6, frames=700)
    expected = Speaking(lasting, at_once=6).finish()
    speaking = Speaking(lasting * 20, at_once=6)
    speaking.go_on(may_begin=True)
    speaking.begun()
    redeploy(service.app, {TALKER: 1, CODEC: 1})
    while len(service.processes(TALKER)) + len(service.processes(CODEC)) > 2:
        assert not speaking.done, "the streams ended before the replicas did"
        speaking.go_on(may_begin=True)
    speaking.drop_rest()
    heard = speaking.finish()
    redeploy(service.app, {TALKER: 2, CODEC: 2})
    assert wrong(heard, expected) == []
