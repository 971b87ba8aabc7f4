import asyncio
import signal
import socket
import subprocess
import threading
from queue import SimpleQueue
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deployments.codec.batch import DecodeTask, decode_batch
from deployments.codec.decoder_state import DecoderState
from deployments.codec.pool.workers import Workers, _stop, out_of_memory
from deployments.errors import CodecLost, EngineError

pytestmark = pytest.mark.anyio


async def test_calls_return_and_raise() -> None:
    workers = Workers(1, on_gpu=False)
    assert await workers.run(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await workers.run(divmod, 7, 0)
    assert not workers.hang


@pytest.mark.parametrize("on_gpu", [False, True])
async def test_a_call_that_hangs_ends_itself_and_those_behind_it(on_gpu: bool) -> None:
    workers, freed = Workers(1, on_gpu=on_gpu), threading.Event()
    asyncio.get_running_loop().call_later(20, freed.set)
    outcomes = await asyncio.gather(workers.run(freed.wait), workers.run(divmod, 7, 2), return_exceptions=True)
    freed.set()
    assert [type(outcome) for outcome in outcomes] == [CodecLost, CodecLost]
    assert workers.hang
    with pytest.raises(CodecLost):
        await workers.run(freed.wait)


async def test_a_call_that_works_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.codec.pool.workers._LONGEST_IDLENESS_S", 0.3)
    monkeypatch.setattr("deployments.codec.pool.workers._CHECK_S", 0.05)
    workers, checks = Workers(1, on_gpu=False), 0

    def work() -> None:
        while checks < 20:
            pass

    working = asyncio.create_task(workers.run(work))
    for _ in range(20):
        await asyncio.wait((working,), timeout=0.05)
        checks += 1
    await working


@pytest.mark.parametrize(("error", "is_memory"), [
    (MemoryError(), True), (torch.OutOfMemoryError("CUDA out of memory"), True),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 24 bytes"), True),
    (RuntimeError("shapes do not fit"), False),
])  # fmt: skip
async def test_without_memory_another_replica_may_have_some(error: Exception, is_memory: bool) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(CodecLost if is_memory else RuntimeError):
        await Workers(1, on_gpu=False).run(fail)
    decoder = SimpleNamespace(decode=lambda codes, states: fail())
    tasks = [DecodeTask(np.zeros((1, 16), np.int16), DecoderState(0, ()), 0.0)] * 2
    outcomes = decode_batch(decoder, tasks)  # type: ignore[arg-type]
    assert [type(outcome) for outcome in outcomes] == [CodecLost if is_memory else EngineError] * 2


def test_a_process_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.codec.pool.workers._STOP_S", 0.01)
    control, other_end = socket.socketpair()
    with other_end, subprocess.Popen(["sleep", "10"]) as process:
        _stop(control, process, SimpleQueue())
        assert process.returncode == -signal.SIGKILL


def test_memory_can_really_run_out() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.zeros(1 << 60)
    assert isinstance(out_of_memory(caught.value), CodecLost)
