"""What befalls the processes that a codec replica of several workers decodes in, no listener can tell."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

from deployments.config import CodecConfig
from tests.faults.conftest import AT_ONCE, STREAMS
from tests.faults.listening import Heard, Speaking, wrong
from tests.faults.pools import CODEC, Service, config, serving, tiny_model

DECODER = "deployments.codec.pool.worker_process"


def spoken(fault: Callable[[], None]) -> list[Heard]:
    """All streams, with a fault once they have all begun."""
    speaking = Speaking(STREAMS, at_once=AT_ONCE)
    speaking.go_on(may_begin=True)
    speaking.begun()
    fault()
    return speaking.finish()


def parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def test_decoder_processes_come_and_go(tmp_path: Path) -> None:
    app = config(tiny_model(tmp_path / "tiny")).model_copy(update={"codec": CodecConfig(workers=2)})
    with serving(app) as service:
        expected = Speaking(STREAMS, at_once=AT_ONCE).finish()
        assert [each.error for each in expected] == [None] * len(STREAMS)
        replicas = service.processes(CODEC)
        for number in (signal.SIGKILL, signal.SIGSTOP):
            victims = decoder_processes(service)
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


def decoder_processes(service: Service) -> list[int]:
    decoders = service.processes_titled(DECODER)
    return [process for process in decoders if parent(process) in decoders]
