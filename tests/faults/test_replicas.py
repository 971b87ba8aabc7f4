"""Whatever happens to a replica, no listener can tell."""

import resource
import signal
from collections.abc import Callable

import pytest

from tests.faults.conftest import AT_ONCE, STREAMS
from tests.faults.kills import speak
from tests.faults.listener import Heard
from tests.faults.pools import CODEC, ENGINE, TALKER, Service, redeploy
from tests.faults.speaking import Speaking, requests, wrong

CONTROLLER = "ServeController"


def disturb(fault: Callable[[], None]) -> list[Heard]:
    """All streams, with a fault once they have all begun."""
    speaking = Speaking(STREAMS, at_once=AT_ONCE)
    speaking.go_on(may_begin=True)
    speaking.begun()
    fault()
    return speaking.finish()


def test_kills_of_every_kind(service: Service, undisturbed: list[Heard]) -> None:
    speaking, killer = speak(service, STREAMS * 3, at_once=AT_ONCE, kills=6)
    assert wrong(speaking.heard, undisturbed) == []
    assert {kill.what for kill in killer.kills} == {TALKER, CODEC, ENGINE}


@pytest.mark.parametrize("what", [ENGINE, TALKER, CODEC])
def test_a_process_that_stands_still(service: Service, undisturbed: list[Heard], what: str) -> None:
    [victim, _] = service.processes(what)
    heard = disturb(lambda: service.kill(victim, signal.SIGSTOP))
    if victim in service.processes(what):
        service.kill(victim)
    assert wrong(heard, undisturbed) == []


def test_a_codec_replica_out_of_memory(service: Service, undisturbed: list[Heard]) -> None:
    [victim, _] = service.processes(CODEC)

    def starve() -> None:
        with open(f"/proc/{victim}/statm") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
        resource.prlimit(victim, resource.RLIMIT_AS, (used, used))

    heard = disturb(starve)
    if victim in service.processes(CODEC):
        service.kill(victim)
    assert wrong(heard, undisturbed) == []


def test_the_controller_dies_and_then_a_replica(service: Service, undisturbed: list[Heard]) -> None:
    def fault() -> None:
        [controller] = service.processes_titled(CONTROLLER)
        service.kill(controller)
        service.kill(service.processes(TALKER)[0])

    assert wrong(disturb(fault), undisturbed) == []


def test_a_rolling_redeploy(service: Service, undisturbed: list[Heard]) -> None:
    app = service.app
    changed = app.model_copy(
        update={
            "talker": app.talker.model_copy(update={"max_num_waiting": 65}),
            "codec": app.codec.model_copy(update={"max_batch_size": 15}),
        }
    )
    before = {*service.processes(TALKER), *service.processes(CODEC)}
    speaking = Speaking(STREAMS * 3, at_once=AT_ONCE)
    speaking.go_on(may_begin=True)
    speaking.begun()
    redeploy(changed, wait=False)
    while before & {*service.processes(TALKER), *service.processes(CODEC)}:
        speaking.go_on(may_begin=True)
    assert wrong(speaking.finish(), undisturbed) == []


def test_scaling_down_waits_for_nobody(service: Service) -> None:
    """Streams that would go on for minutes leave the replicas that are to go."""
    minutes = requests(6, frames=700)
    expected = Speaking(minutes, at_once=6).finish()
    speaking = Speaking(minutes, at_once=6)
    speaking.go_on(may_begin=True)
    speaking.begun()
    pools = {"talker_pool": 1, "codec_pool": 1}
    smaller = {name: getattr(service.app, name).model_copy(update={"replicas": count}) for name, count in pools.items()}
    redeploy(service.app.model_copy(update=smaller), wait=False)
    while len(service.processes(TALKER)) + len(service.processes(CODEC)) > 2:
        assert not speaking.done, "the streams ended before the replicas did"
        speaking.go_on(may_begin=True)
    heard = speaking.finish()
    redeploy(service.app, wait=True)
    assert wrong(heard, expected) == []
