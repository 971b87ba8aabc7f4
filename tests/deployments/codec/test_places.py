"""Streams enter a codec replica while it can decode them in real time."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from deployments.codec.places import Places

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def places(limit: int | None) -> Places:
    """Places for so many streams, as if chunks had been late with more."""
    made = Places(max_late_s=0.25)
    made.limit = limit
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


async def held(line: Places, count: int) -> list[Stream]:
    streams = [Stream(line, at_once=True) for _ in range(count)]
    await settle()
    return streams


async def test_late_chunks_take_places_away_and_chunks_in_time_give_them_back() -> None:
    line = Places(max_late_s=0.25)
    streams = await held(line, 10)
    line.decoded(0.2, now_s=1.0)
    assert line.limit is None
    line.decoded(0.3, now_s=2.0)
    assert line.limit == 8
    await end(streams[:2])
    for tick in range(31):
        line.decoded(-1.0, now_s=2.5 + tick / 10)
        if tick % 10 == 9:
            streams += await held(line, 1)
    assert line.limit == 11
    await end(streams[2:])


async def test_a_change_is_given_time_to_show() -> None:
    line = Places(max_late_s=0.25)
    streams = await held(line, 10)
    for tick in range(50):
        line.decoded(5.0, now_s=1.0 + tick)  # ten streams are still there
    assert line.limit == 8
    await end(streams[:2])
    line.decoded(5.0, now_s=50.5)
    assert line.limit == 8
    line.decoded(5.0, now_s=51.5)
    assert line.limit == 6
    await end(streams[2:])


async def test_places_that_nobody_takes_do_not_grow_in_number() -> None:
    line = places(4)
    streams = await held(line, 3)
    for tick in range(100):
        line.decoded(-1.0, now_s=float(tick))
    assert line.limit == 4
    await end(streams)


async def test_one_stream_may_always_be_decoded() -> None:
    line = Places(max_late_s=0.25)
    streams = await held(line, 1)
    for tick in range(10):
        line.decoded(9.0, now_s=2.0 * tick)
    assert line.limit == 1
    await end(streams)


async def test_streams_enter_in_order_while_there_is_a_place() -> None:
    line = places(2)
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
    line = places(None)
    async with AsyncExitStack() as opened:
        for _ in range(100):
            await opened.enter_async_context(line.take(at_once=False))


async def test_a_stream_that_is_heard_already_does_not_wait() -> None:
    line = places(1)
    first, heard, waiting = Stream(line), Stream(line, at_once=True), Stream(line)
    await settle()
    assert (heard.entered.is_set(), waiting.entered.is_set()) == (True, False)
    first.leave.set()
    await settle()
    assert not waiting.entered.is_set()  # the heard one holds the only place
    await end([first, heard, waiting])


async def test_a_new_place_goes_to_the_line() -> None:
    line = places(1)
    streams = [Stream(line) for _ in range(3)]
    await settle()
    assert line.num_waiting == 2
    line.decoded(-1.0, now_s=10.0)
    await settle()
    assert line.num_waiting == 1
    await end(streams)


async def test_who_leaves_the_line_or_its_place_leaves_nothing_behind() -> None:
    line = places(1)
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
    line = places(1)
    first, second, third = (Stream(line) for _ in range(3))
    await settle()
    first.leave.set()
    await asyncio.sleep(0)  # the place is given to the second, which has not run yet
    await asyncio.sleep(0)
    second.task.cancel()
    await settle()
    assert third.entered.is_set()
    await end([first, third])
