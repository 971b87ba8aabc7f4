"""Streams enter a codec replica while it can decode them in real time."""

import asyncio

import pytest

from deployments.codec.pool.capacity import Capacity

pytestmark = pytest.mark.anyio


def capacity(limit: int | None) -> Capacity:
    """Capacity for so many streams, as if chunks had been late with more."""
    line = Capacity(max_late_s=0.25)
    line.limit.streams = limit
    return line


class Stream:
    def __init__(self, line: Capacity, client: str = "", *, at_once: bool = False) -> None:
        self.entered = asyncio.Event()
        self.leave = asyncio.Event()
        self.task = asyncio.create_task(self._run(line, client, at_once=at_once))

    async def _run(self, line: Capacity, client: str, *, at_once: bool) -> None:
        async with line.enter(client, at_once=at_once):
            self.entered.set()
            await self.leave.wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def end(streams: list[Stream]) -> None:
    for stream in streams:
        stream.leave.set()
    await asyncio.gather(*(stream.task for stream in streams))


async def coming(line: Capacity, *clients: str, at_once: bool = False) -> list[Stream]:
    streams = [Stream(line, client, at_once=at_once) for client in clients]
    await settle()
    return streams


def entered(streams: list[Stream]) -> list[bool]:
    return [stream.entered.is_set() for stream in streams]


async def test_late_chunks_take_places_away() -> None:
    line = Capacity(max_late_s=0.25)
    streams = await coming(line, *[""] * 10, at_once=True)
    for tick in range(30):
        line.record_call(0.2, now_s=tick / 10)
    [more] = await coming(line, "")
    assert more.entered.is_set()
    for tick in range(30, 60):
        line.record_call(0.3, now_s=tick / 10)
    others = [Stream(line) for _ in range(2)]
    await end(streams[:7])
    await settle()
    assert line.num_waiting == 1  # of eleven streams five may stay
    await end([more, *streams[7:], *others])


async def test_streams_enter_in_order_while_there_is_a_place() -> None:
    line = capacity(2)
    streams = await coming(line, *[""] * 4)
    assert entered(streams) == [True, True, False, False]
    assert line.num_waiting == 2
    streams[1].leave.set()
    await settle()
    assert entered(streams) == [True, True, True, False]
    await end(streams)
    assert line.num_waiting == 0


async def test_a_stream_that_is_heard_already_does_not_wait() -> None:
    line = capacity(1)
    first, heard, waiting = Stream(line), Stream(line, at_once=True), Stream(line)
    await settle()
    assert (heard.entered.is_set(), waiting.entered.is_set()) == (True, False)
    first.leave.set()
    await settle()
    assert not waiting.entered.is_set()  # the heard one holds the only place
    await end([first, heard, waiting])


async def test_a_new_place_goes_to_the_line() -> None:
    line = capacity(1)
    streams = await coming(line, *[""] * 3)
    assert line.num_waiting == 2
    for tick in range(23):
        line.record_call(-1.0, now_s=tick / 10)
    await settle()
    assert line.num_waiting == 1
    await end(streams)


async def test_who_leaves_the_line_or_its_place_leaves_nothing_behind() -> None:
    line = capacity(1)
    first, waiting, last = await coming(line, "", "", "")
    waiting.task.cancel()
    await settle()
    assert line.num_waiting == 1
    first.leave.set()
    last.task.cancel()  # while its turn is on its way
    await settle()
    [follower] = await coming(line, "")
    assert follower.entered.is_set()
    await end([first, follower])


async def test_a_turn_and_a_cancellation_at_once_pass_the_place_on() -> None:
    line = capacity(1)
    first, second, third = await coming(line, "", "", "")
    first.leave.set()
    await asyncio.sleep(0)
    assert (line.num_waiting, second.entered.is_set()) == (1, False)  # it has the place, and has not run yet
    second.task.cancel()
    await settle()
    assert third.entered.is_set()
    await end([first, third])


async def test_one_client_cannot_hold_the_only_place() -> None:
    line = capacity(1)
    hog, *streams = await coming(line, "hog", "hog", "ada", "ada", "bob")
    assert hog.entered.is_set()
    assert entered(streams) == [False, True, False, False]
    streams[1].leave.set()
    await settle()
    assert entered(streams) == [False, True, True, False]  # in order
    streams[2].leave.set()
    await settle()
    assert entered(streams) == [False, True, True, True]
    await end([hog, *streams])
    assert line.num_waiting == 0


async def test_each_client_has_a_place_before_one_has_them_all() -> None:
    line = capacity(3)
    hog = [Stream(line, "hog") for _ in range(4)]
    others = [Stream(line, client) for client in ("ada", "bob", "bob", "eve")]
    await settle()
    assert entered(hog) == [True, True, True, False]
    assert entered(others) == [True, True, False, False]  # three clients, which the limit allows
    await end([*hog, *others])


async def test_no_more_enter_than_the_workers_carry() -> None:
    carried = 3.5
    line = Capacity(max_late_s=0.25, worker_capacity=lambda: carried)
    streams = await coming(line, *[""] * 5)
    assert entered(streams) == [True, True, True, False, False]
    carried = 4.0
    line.record_call(0.0, now_s=0.0)
    await settle()
    assert entered(streams) == [True, True, True, True, False]
    carried = 0.1
    streams[0].leave.set()
    await settle()
    assert not streams[4].entered.is_set()
    await end(streams)
    [alone] = await coming(line, "")
    assert alone.entered.is_set()  # somebody may always speak
    await end([alone])
