import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from deployments.errors import Overloaded
from serve_app.api.parsing import uploads
from serve_app.api.parsing.uploads import Upload, Uploads
from tests.clock import Clock

pytestmark = pytest.mark.anyio


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(uploads, "time", clock)
    return clock


class Sender:
    """Of one large body; its task says how taking it in has ended."""

    def __init__(self, uploads: Uploads, caller: str) -> None:
        self.upload = Upload(uploads, caller)
        self._parts: asyncio.Queue[int | None] = asyncio.Queue()
        self.taken = asyncio.Event()
        self.task = asyncio.create_task(self._take_in())

    def send(self, num_bytes: int | None) -> None:
        """So much is there in all; None: that was all of it."""
        self.taken.clear()
        self._parts.put_nowait(num_bytes)

    async def _take_in(self) -> str:
        try:
            async with self.upload.time_limit(30.0):
                while (num_bytes := await self._parts.get()) is not None:
                    await self.upload.wait_for_slot(num_bytes)
                    self.taken.set()
            self.taken.set()
            await asyncio.Event().wait()
        except TimeoutError:
            return "stalled" if self.upload.is_stalled else "slow"
        except Overloaded:
            return "overloaded"
        finally:
            self.upload.release()
        raise AssertionError


MIB = 1 << 20


@pytest.fixture
async def senders(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> AsyncIterator[Callable[[str], Sender]]:
    monkeypatch.setattr(uploads, "_UPLOAD_WAIT_S", 0.1)
    monkeypatch.setattr(uploads, "_LOOK_S", 0.001)
    places, made = Uploads(), list[Sender]()

    def make(caller: str) -> Sender:
        made.append(Sender(places, caller))
        made[-1].send(MIB)
        return made[-1]

    yield make
    for sender in made:
        sender.task.cancel()
    await asyncio.wait([sender.task for sender in made])
    assert not places._places._held


async def test_bodies_that_stall_keep_no_other_out(senders: Callable[[str], Sender], clock: Clock) -> None:
    holders = [senders(f"caller {number}") for number in range(uploads.MAX_UPLOADS)]
    await asyncio.gather(*(holder.taken.wait() for holder in holders))
    late = senders("late")
    assert await late.task == "overloaded"  # while all of them come on
    clock.now_s += 1.5
    late = senders("late")
    holders[0].send(2 * MIB)
    await holders[0].taken.wait()
    clock.now_s += 1.0
    await late.taken.wait()
    assert [await holder.task for holder in holders[1:]] == ["stalled", "stalled"]
    assert not holders[0].task.done()
    holders[0].send(3 * MIB)
    await holders[0].taken.wait()
    clock.now_s += 1.5  # the late one has had its place for this time
    await senders("third").taken.wait()
    assert await senders("fourth").task == "overloaded"
    assert not late.task.done()


async def test_a_whole_body_is_not_ended_while_it_is_decoded(senders: Callable[[str], Sender], clock: Clock) -> None:
    holders = [senders(f"caller {number}") for number in range(uploads.MAX_UPLOADS)]
    await asyncio.gather(*(holder.taken.wait() for holder in holders))
    for holder in holders:
        holder.send(None)
    await asyncio.gather(*(holder.taken.wait() for holder in holders))
    clock.now_s += 60.0
    assert await senders("late").task == "overloaded"


async def test_one_caller_leaves_a_place_to_the_others(senders: Callable[[str], Sender]) -> None:
    greedy = [senders("greedy") for _ in range(uploads.MAX_UPLOADS)]
    other = senders("other")
    await asyncio.gather(*(sender.taken.wait() for sender in (*greedy[:2], other)))
    assert await greedy[2].task == "overloaded"
