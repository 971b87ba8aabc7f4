"""What befalls the processes that a codec replica of several workers decodes in, no listener can tell."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

from deployments.config import CodecConfig
from tests.faults.conftest import AT_ONCE, STREAMS
from tools.suites.listening import Heard, Speaking, wrong
from tools.suites.pools import CODEC, DECODER, config, parent, serving, tiny_model


def spoken(fault: Callable[[], None]) -> list[Heard]:
    """All streams, with a fault once they have all begun."""
    speaking = Speaking(STREAMS, at_once=AT_ONCE)
    speaking.go_on(may_begin=True)
    speaking.begun()
    fault()
    return speaking.finish()


def test_decoder_processes_come_and_go(tmp_path: Path) -> None:
    app = config(tiny_model(tmp_path / "tiny")).model_copy(update={"codec": CodecConfig(workers=2)})
    with serving(app) as service:
        expected = Speaking(STREAMS, at_once=AT_ONCE).finish()
        assert [each.error for each in expected] == [None] * len(STREAMS)
        replicas = service.processes(CODEC)
        for number in (signal.SIGKILL, signal.SIGSTOP):
            victims = service.decoders()
            assert len(victims) == 2 * len(replicas), victims

            def end_half(number: int = number, victims: list[int] = victims) -> None:
                for victim in victims[::2]:
                    os.kill(victim, number)

            assert wrong(spoken(end_half), expected) == []
            assert wrong(spoken(lambda: None), expected) == []  # who died idle is missed when it is needed
            assert service.processes(CODEC) == replicas
        # Without the one that they are forked from a replica could replace none: it is replaced itself.
        (victim, *_) = [process for process in service.processes_titled(DECODER) if parent(process) in replicas]
        heard = spoken(lambda: service.kill(victim))
        service.replaces(replicas, CODEC, victim)
        assert wrong(heard, expected) == []
