"""A stream that several replicas bring, one after the other."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import numpy as np
import pytest

from deployments import listener
from deployments.errors import NotReady, TalkerLost
from deployments.protocol import FrameChunk
from deployments.serving import failover
from deployments.serving.failover import ReplicaStream, with_failover

pytestmark = pytest.mark.anyio

LOST = TalkerLost("gone")


def frame(number: int) -> FrameChunk:
    return FrameChunk(np.full((1, 2), number, np.int16), 3)


class Asking(ReplicaStream[FrameChunk, FrameChunk]):
    def __init__(self, call: Callable[[], AsyncGenerator[FrameChunk, None]]) -> None:
        super().__init__("r", TalkerLost)
        self._call = call

    def call(self) -> AsyncGenerator[FrameChunk, None]:
        return self._call()

    def receive(self, chunk: FrameChunk) -> FrameChunk:
        return chunk


class Replicas:
    """Each attempt meets the next replica's script."""

    def __init__(self, *scripts: list[FrameChunk | Exception]) -> None:
        self._scripts = list(scripts)
        self.asked = self.closed = 0
        self.was_closed = asyncio.Event()

    def call(self) -> AsyncGenerator[FrameChunk, None]:
        self.asked += 1
        return self._play(self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0])

    async def _play(self, script: list[FrameChunk | Exception]) -> AsyncGenerator[FrameChunk, None]:
        try:
            for step in script:
                if isinstance(step, Exception):
                    raise step
                yield step
        finally:
            self.closed += 1
            self.was_closed.set()


async def read(stream: Asking) -> None:
    async with aclosing(with_failover(stream)) as chunks:
        async for _ in chunks:
            pass


async def test_cancelling_ends_the_wait() -> None:
    replicas = Replicas([frame(1), LOST], [NotReady("none")])
    reading = asyncio.create_task(read(Asking(replicas.call)))
    while replicas.asked < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that waits for anything else is one that takes nothing."""
    monkeypatch.setattr(listener, "UNREAD_S", 0.0)
    monkeypatch.setattr(failover, "_MAX_LOSSES", 1)  # leaving it is none


@pytest.mark.usefixtures("impatient")
async def test_who_leaves_while_away_leaves_nothing_behind() -> None:
    replicas = Replicas([frame(1), frame(2), frame(3)])
    async with aclosing(with_failover(Asking(replicas.call))) as chunks:
        await anext(chunks)
        await anext(chunks)
        await asyncio.wait_for(replicas.was_closed.wait(), 5.0)
    assert (replicas.asked, replicas.closed) == (1, 1)


@pytest.mark.usefixtures("impatient")
async def test_a_reader_that_is_cancelled_while_its_replica_is_being_left() -> None:
    is_closing = asyncio.Event()

    async def call() -> AsyncGenerator[FrameChunk, None]:
        try:
            for number in range(9):
                yield frame(number)
        finally:
            is_closing.set()
            await asyncio.Event().wait()

    async def read() -> None:
        async with aclosing(with_failover(Asking(call))) as chunks:
            async for chunk in chunks:
                if chunk.codes[0, 0]:
                    await asyncio.wait_for(is_closing.wait(), 5.0)

    reading = asyncio.create_task(read())
    await is_closing.wait()
    for _ in range(3):
        await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait((reading,), timeout=5.0)
    assert reading.cancelled()
