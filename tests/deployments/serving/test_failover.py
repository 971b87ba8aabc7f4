"""A stream that several replicas bring, one after the other."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deployments import listener
from deployments.errors import CodecLost, InvalidRequest, Moved, NotReady, Overloaded, ReplicaLost, TalkerLost
from deployments.protocol import FinishReason, FrameChunk
from deployments.serving import failover
from deployments.serving.failover import Attempts, ReplicaStream, with_failover
from tests.clock import Clock

pytestmark = pytest.mark.anyio

BEAT = FrameChunk(np.zeros((0, 2), np.int16), 0)
LOST = TalkerLost("gone")


def frame(number: int, *, last: bool = False) -> FrameChunk:
    return FrameChunk(np.full((1, 2), number, np.int16), 3, FinishReason.STOP if last else None)


class Asking(ReplicaStream[FrameChunk, FrameChunk]):
    def __init__(
        self, call: Callable[[], AsyncGenerator[FrameChunk, None]], *,
        receive: Callable[[FrameChunk], FrameChunk] = lambda chunk: chunk, lost: type[ReplicaLost] = TalkerLost,
    ) -> None:  # fmt: skip
        super().__init__("r", lost, is_background=False)
        self._call, self._receive = call, receive

    def call(self) -> AsyncGenerator[FrameChunk, None]:
        return self._call()

    def receive(self, chunk: FrameChunk) -> FrameChunk:
        return self._receive(chunk)


class Replicas:
    """Each attempt meets the next replica's script; goes on behind what the reader has."""

    def __init__(self, *scripts: list[FrameChunk | Exception]) -> None:
        self._scripts = list(scripts)
        self.asked: list[int] = []  # frames the reader had, at each attempt
        self.closed = self.played = 0
        self.was_closed = asyncio.Event()
        self.have: list[int] = []
        self.trail: list[str] = []

    def call(self) -> AsyncGenerator[FrameChunk, None]:
        self.asked.append(len(self.have))
        return self._play(self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0])

    async def _play(self, script: list[FrameChunk | Exception]) -> AsyncGenerator[FrameChunk, None]:
        try:
            for step in script:
                self.played += step is script[-1]
                if isinstance(step, Exception):
                    raise step
                yield step
        finally:
            self.closed += 1
            self.was_closed.set()

    async def read(self, lost: type[ReplicaLost] = TalkerLost) -> list[int]:
        async with aclosing(with_failover(Asking(self.call, lost=lost))) as chunks:
            async for chunk in chunks:
                self.have += chunk.codes[:, 0].tolist()
                self.trail += [stage for stage, _ in chunk.trail]
        return self.have


@pytest.mark.parametrize("loss", [LOST, Moved("leaving")])
async def test_lost_streams_go_on_behind_what_the_reader_has(loss: Exception, caplog: pytest.LogCaptureFixture) -> None:
    replicas = Replicas([BEAT, frame(1), frame(2), loss], [BEAT, frame(3), loss], [BEAT, frame(4, last=True)])
    assert await replicas.read() == [1, 2, 3, 4]
    assert (replicas.asked, replicas.closed, replicas.trail) == ([0, 2, 3], 3, ["TalkerLost"] * 2)
    assert ["request r continues" in each and str(loss) in each for each in caplog.messages] == [True, True]


def test_others_are_asked_ever_later_and_losses_are_told(monkeypatch: pytest.MonkeyPatch, fed: list[Any]) -> None:
    clock = Clock(100.0)
    monkeypatch.setattr(failover, "time", SimpleNamespace(monotonic=clock, time_ns=lambda: round(clock() * 1e9)))
    attempts = Attempts(TalkerLost, "r")
    for _ in range(2):
        attempts.record_progress(frame(1))
        assert attempts.delay_after(LOST) == 0.0
        assert [attempts.delay_after(Overloaded("full", 1.0)) for _ in range(3)] == [0.02, 0.04, 0.08]
        clock.now_s += 0.5
    assert [attempts.delay_after(Overloaded("full", 1.0)) for _ in range(4)] == [0.16, 0.32, 0.5, 0.5]
    attempts.record_progress(frame(2))
    losses = ("TalkerLost", 100_000_000_000), ("TalkerLost", 100_500_000_000)
    assert attempts.with_losses(frame(3)).trail == losses, "also if no item was passed on between them"
    assert attempts.with_losses(frame(4)).trail == ()
    of = {"reason": "TalkerLost"}
    assert fed == [("failovers_total", 1, of), ("failover_gap_seconds", 0.5, of)] * 2


async def test_a_stream_that_its_reader_ends_is_left_there() -> None:
    replicas = Replicas([frame(1), frame(2), frame(3, last=True)])

    def until_two(chunk: FrameChunk) -> FrameChunk:
        return replace(chunk, finish_reason=FinishReason.SILENCE) if chunk.codes[0, 0] == 2 else chunk

    chunks = [chunk async for chunk in with_failover(Asking(replicas.call, receive=until_two))]
    assert [chunk.finish_reason for chunk in chunks] == [None, FinishReason.SILENCE]
    assert (replicas.closed, replicas.played) == (1, 0)


@pytest.mark.parametrize("behind", [[], [BEAT], [LOST]])
async def test_the_call_behind_the_last_chunk_ends_by_itself(behind: list[FrameChunk | Exception]) -> None:
    """Cancelling one would make Serve cancel others that the same HTTP request led to."""
    replicas = Replicas([frame(1, last=True), *behind])
    assert await replicas.read() == [1]
    assert (replicas.asked, replicas.played) == ([0], 1)


@pytest.mark.parametrize(("scripts", "heard"), [
    ([[frame(1)], [frame(2, last=True)]], [1, 2]),  # it ends without its last chunk
    ([[LOST], [BEAT, LOST], [frame(1, last=True)]], [1]),  # before the first frame
    ([[frame(1), LOST], [Overloaded("full")], [Overloaded("full")], [frame(2, last=True)]], [1, 2]),
    ([[frame(1), LOST], [NotReady("loading")], [NotReady("loading")], [frame(2, last=True)]], [1, 2]),
])  # fmt: skip
async def test_a_loss_is_made_up_for(scripts: list[list[FrameChunk | Exception]], heard: list[int]) -> None:
    assert await Replicas(*scripts).read() == heard


@pytest.mark.parametrize("refusal", [Overloaded("full"), NotReady("loading"), InvalidRequest("no"), KeyError("bug")])
async def test_a_refusal_from_the_start_is_an_answer(refusal: Exception) -> None:
    replicas = Replicas([BEAT, refusal])
    with pytest.raises(type(refusal)):
        await replicas.read()
    assert len(replicas.asked) == 1


@pytest.mark.parametrize(
    ("scripts", "stage", "message", "asked"),
    [
        ([[frame(1), LOST]], CodecLost, "gone", [0]),  # it was lost further behind
        ([[frame(1), LOST], [BEAT, LOST]], TalkerLost, "given up after 4 losses", [0, 1, 1, 1]),
        ([[frame(1), LOST]], TalkerLost, "given up after 12 losses", [*range(12)]),  # losses of the whole stream count
    ],
)
async def test_a_request_that_kills_its_replicas_is_given_up(
    scripts: list[list[FrameChunk | Exception]], stage: type[ReplicaLost], message: str, asked: list[int]
) -> None:
    replicas = Replicas(*scripts)
    with pytest.raises(TalkerLost, match=message):
        await replicas.read(lost=stage)
    assert replicas.asked == asked


async def test_moves_and_calls_that_nobody_took_are_not_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover, "_MAX_LOSSES", 2)
    others: list[list[FrameChunk | Exception]] = [[BEAT, Moved("leaving")], [LOST]]  # one leaves, one takes no call
    replicas = Replicas([frame(1), LOST], *others * 2, [frame(2, last=True)])
    assert await replicas.read() == [1, 2]


async def test_without_a_replica_patience_ends_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover, "_GIVE_UP_S", 0.05)
    replicas = Replicas([frame(1), LOST], [NotReady("none")])
    with pytest.raises(TalkerLost) as caught:
        await replicas.read()
    assert isinstance(caught.value.__cause__, NotReady)


async def test_cancelling_ends_the_wait() -> None:
    replicas = Replicas([frame(1), LOST], [NotReady("none")])
    reading = asyncio.create_task(replicas.read())
    while len(replicas.asked) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that waits for anything else is one that takes nothing."""
    monkeypatch.setattr(listener, "UNREAD_S", 0.0)
    monkeypatch.setattr(failover, "_MAX_LOSSES", 1)  # leaving it is none


async def persisted(replicas: Replicas, *, pause_behind: int) -> list[int]:
    """What a reader has that takes nothing behind so many frames until their replica was left."""
    async with aclosing(with_failover(Asking(replicas.call))) as chunks:
        async for chunk in chunks:
            replicas.have += chunk.codes[:, 0].tolist()
            replicas.trail += [stage for stage, _ in chunk.trail]
            if len(replicas.have) == pause_behind:
                pause_behind = 0
                await asyncio.wait_for(replicas.was_closed.wait(), 5.0)
    return replicas.have


@pytest.mark.usefixtures("impatient")
async def test_a_reader_that_takes_nothing_leaves_its_replica_and_goes_on_from_its_codes() -> None:
    replicas = Replicas([frame(1), frame(2), frame(9)], [Overloaded("full", 1)], [BEAT, frame(3), frame(4, last=True)])
    assert await persisted(replicas, pause_behind=2) == [1, 2, 3, 4]
    assert (replicas.asked, replicas.trail) == ([0, 2, 2], [])
    assert replicas.played == 2  # the first one was left before its end


@pytest.mark.usefixtures("impatient")
async def test_what_was_whole_when_its_reader_paused_is_not_asked_for_again() -> None:
    replicas = Replicas([frame(1), frame(2, last=True)])
    assert await persisted(replicas, pause_behind=2) == [1, 2]
    assert replicas.asked == [0]


@pytest.mark.usefixtures("impatient")
async def test_who_leaves_while_away_leaves_nothing_behind() -> None:
    replicas = Replicas([frame(1), frame(2), frame(3)])
    async with aclosing(with_failover(Asking(replicas.call))) as chunks:
        await anext(chunks)
        await anext(chunks)
        await asyncio.wait_for(replicas.was_closed.wait(), 5.0)
    assert (replicas.asked, replicas.closed) == ([0], 1)


@pytest.mark.usefixtures("impatient")
async def test_what_was_only_asked_for_ahead_of_time_is_kept() -> None:
    replicas = Replicas([frame(1), frame(2), frame(3, last=True)])
    async with aclosing(with_failover(Asking(replicas.call))) as chunks:
        await anext(chunks)
        for _ in range(10):
            await asyncio.sleep(0)
        assert replicas.closed == 0


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


async def test_leaving_closes_what_is_behind() -> None:
    replicas = Replicas([frame(1), frame(2)])
    async with aclosing(with_failover(Asking(replicas.call))) as chunks:
        await anext(chunks)
    assert replicas.closed == 1
