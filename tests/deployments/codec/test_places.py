"""Streams enter a codec replica while it can decode them in real time."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from deployments.codec.places import Places

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def places(*, workers: int = 1, cost: float = 0.25) -> Places:
    """Places of a replica that has learned that a stream takes `cost` of a worker."""
    made = Places(workers, max_use=0.9)
    for _ in range(50):
        made.decoded(cost, 1.0)
    return made


class Stream:
    """Holds a place until it is told to leave."""

    def __init__(self, line: Places, *, at_once: bool = False) -> None:
        self.entered = asyncio.Event()
        self.leave = asyncio.Event()
        self.task = asyncio.create_task(self._run(line, at_once=at_once))

    async def _run(self, line: Places, *, at_once: bool) -> None:
        async with line.take(at_once=at_once):
            self.entered.set()
            await self.leave.wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def end(streams: list[Stream]) -> None:
    for stream in streams:
        stream.leave.set()
    await asyncio.gather(*(stream.task for stream in streams))


@pytest.mark.parametrize(
    ("workers", "cost", "capacity"), [(1, 0.25, 3), (4, 0.25, 14), (1, 0.11, 8), (1, 3.0, 1), (8, 0.0101, 712)]
)
def test_capacity_follows_what_decoding_costs(workers: int, cost: float, capacity: int) -> None:
    assert places(workers=workers, cost=cost).capacity == capacity


def test_nothing_is_known_before_some_audio() -> None:
    fresh = Places(1, max_use=0.9)
    assert fresh.capacity is None
    fresh.decoded(5.0, 0.5)
    assert fresh.capacity is None


def test_old_costs_are_forgotten() -> None:
    line = places(cost=0.9)
    for _ in range(300):
        line.decoded(0.1, 1.0)
    assert line.capacity == 8


async def test_streams_enter_in_order_while_there_is_a_place() -> None:
    line = places(cost=0.4)
    streams = [Stream(line) for _ in range(4)]
    await settle()
    assert [stream.entered.is_set() for stream in streams] == [True, True, False, False]
    assert line.num_waiting == 2
    streams[1].leave.set()
    await settle()
    assert [stream.entered.is_set() for stream in streams] == [True, True, True, False]
    await end(streams)
    assert line.num_waiting == 0


async def test_everybody_enters_while_nothing_is_known() -> None:
    line = Places(1, max_use=0.9)
    async with AsyncExitStack() as opened:
        for _ in range(100):
            await opened.enter_async_context(line.take(at_once=False))


async def test_a_stream_that_is_heard_already_does_not_wait() -> None:
    line = places(cost=0.9)
    first, heard, waiting = Stream(line), Stream(line, at_once=True), Stream(line)
    await settle()
    assert (heard.entered.is_set(), waiting.entered.is_set()) == (True, False)
    first.leave.set()
    await settle()
    assert not waiting.entered.is_set()  # the heard one holds the only place
    await end([first, heard, waiting])


async def test_a_cheaper_decoder_lets_more_in() -> None:
    line = places(cost=0.9)
    streams = [Stream(line) for _ in range(3)]
    await settle()
    assert line.num_waiting == 2
    for _ in range(300):
        line.decoded(0.1, 1.0)
    await settle()
    assert line.num_waiting == 0
    await end(streams)


async def test_who_leaves_the_line_or_its_place_leaves_nothing_behind() -> None:
    line = places(cost=0.9)
    first, waiting, last = (Stream(line) for _ in range(3))
    await settle()
    waiting.task.cancel()
    await settle()
    assert line.num_waiting == 1
    first.leave.set()
    last.task.cancel()  # while its turn is on its way
    await settle()
    follower = Stream(line)
    await settle()
    assert follower.entered.is_set()
    await end([first, follower])


async def test_a_turn_and_a_cancellation_at_once_pass_the_place_on() -> None:
    line = places(cost=0.9)
    first, second, third = (Stream(line) for _ in range(3))
    await settle()
    first.leave.set()
    await asyncio.sleep(0)  # the place is given to the second, which has not run yet
    await asyncio.sleep(0)
    second.task.cancel()
    await settle()
    assert third.entered.is_set()
    await end([first, third])
