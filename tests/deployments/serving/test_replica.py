"""Outside Serve, with what it would say put in its place; tests/faults has the real thing."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import SimpleNamespace

import numpy as np
import pytest

from deployments.errors import InvalidRequest, Moved, Overloaded, TalkerLost
from deployments.protocol import FrameChunk
from deployments.serving import ray_private
from deployments.serving import replica as module
from deployments.serving.replica import Replica

pytestmark = pytest.mark.anyio


class Serve:
    def __init__(self) -> None:
        self.replica = SimpleNamespace(_shutting_down=False)
        self.others = False


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    serve = Serve()
    monkeypatch.setattr(ray_private, "this_replica", lambda: serve.replica)
    monkeypatch.setattr(module, "_others_run", lambda: serve.others)
    monkeypatch.setattr(module, "_POLL_S", 0.001)
    return serve


def healthy() -> Replica:
    return Replica(TalkerLost, lambda: None)


async def speak(replica: Replica) -> None:
    async with asyncio.timeout(10):
        while True:
            replica.check()
            await asyncio.sleep(0.001)


async def test_a_replica_hands_over_once_it_is_stopped_and_another_runs(serve: Serve) -> None:
    replica = healthy()
    for serve.replica._shutting_down, serve.others in ((False, True), (True, False)):
        for _ in range(20):
            replica.check()
            await asyncio.sleep(0.001)
    serve.others = True
    with pytest.raises(Moved):
        await speak(replica)


@pytest.mark.parametrize(("application", "states", "others"), [
    ("talkray", {"RUNNING": 2}, True), ("talkray", {"RUNNING": 1, "STOPPING": 1}, True),
    ("talkray", {"STARTING": 1, "STOPPING": 2}, False), ("talkray", None, False),
    ("another", {"RUNNING": 2}, False),
])  # fmt: skip
def test_others_run_where_serve_counts_one(
    monkeypatch: pytest.MonkeyPatch, application: str, states: dict[str, int] | None, others: bool
) -> None:
    deployments = {} if states is None else {"Talker": SimpleNamespace(replica_states=states)}
    status = SimpleNamespace(applications={application: SimpleNamespace(deployments=deployments)})
    context = SimpleNamespace(app_name="talkray", deployment="Talker")
    monkeypatch.setattr(module.serve, "status", lambda: status)
    monkeypatch.setattr(module.serve, "get_replica_context", lambda: context)
    assert module._others_run() is others


async def test_outside_serve_there_is_no_departure_and_no_end() -> None:
    replica = healthy()
    replica.check()
    await asyncio.sleep(0)
    replica.check()
    with pytest.raises(TalkerLost, match="hangs"):
        Replica(TalkerLost, lambda: "it hangs").check_health()


async def test_a_broken_replica_ends(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(module.os, "_exit", ended.append)
    monkeypatch.setattr(module, "_LAST_WORDS_S", 0.001)
    replica = Replica(TalkerLost, lambda: "it hangs")
    for _ in range(2):
        with pytest.raises(TalkerLost, match="hangs"):
            replica.check()
    async with asyncio.timeout(10):
        while not ended:  # noqa: ASYNC110, the end tells nobody
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)
    assert ended == [1]


NO_CODES = np.zeros((0, 16), np.int16)
HEARTBEAT, A, B = FrameChunk(NO_CODES, 0), FrameChunk(NO_CODES, 1), FrameChunk(NO_CODES, 2)


class Items:
    def __init__(self) -> None:
        self.queue: asyncio.Queue[FrameChunk | Exception | None] = asyncio.Queue()
        self.closed = False

    async def __call__(self) -> AsyncGenerator[FrameChunk, None]:
        try:
            while (item := await self.queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.closed = True


async def test_heartbeats_come_first_and_whenever_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.serving.replica._HEARTBEAT_S", 0.01)
    source = Items()
    async with aclosing(healthy().with_heartbeats(source(), HEARTBEAT, "from-engine")) as items:
        assert [await anext(items) for _ in range(3)] == [HEARTBEAT] * 3
        source.queue.put_nowait(A)
        source.queue.put_nowait(B)
        assert [item async for item in until(B, items)] == [A, B]
        assert await anext(items) == HEARTBEAT
        source.queue.put_nowait(None)
        assert [item async for item in items if item is not HEARTBEAT] == []
    assert source.closed


async def until(last: FrameChunk, items: AsyncGenerator[FrameChunk, None]) -> AsyncGenerator[FrameChunk, None]:
    """Without the heartbeats, up to `last`."""
    async for item in items:
        if item is not HEARTBEAT:
            yield item
        if item is last:
            return


async def test_an_error_after_the_heartbeats_is_raised() -> None:
    source = Items()
    source.queue.put_nowait(A)
    source.queue.put_nowait(InvalidRequest("no"))
    with pytest.raises(InvalidRequest):
        async for _ in healthy().with_heartbeats(source(), HEARTBEAT, "from-engine"):
            pass
    assert source.closed


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_stream_that_has_to_leave_is_told_so(monkeypatch: pytest.MonkeyPatch, at_once: bool) -> None:
    monkeypatch.setattr("deployments.serving.replica._HEARTBEAT_S", 0.01)
    source, leaving = Items(), [at_once]

    class Leaving(Replica):
        def __init__(self) -> None:
            super().__init__(TalkerLost, lambda: None)

        def check(self) -> None:
            if leaving[0]:
                raise Moved("leaving")

    seen: list[FrameChunk] = []

    async def read() -> None:
        async with aclosing(Leaving().with_heartbeats(source(), HEARTBEAT, "from-engine")) as items:
            async for item in items:
                seen.append(item)
                leaving[0] = len(seen) == 3

    with pytest.raises(Moved):
        await read()
    assert seen == ([] if at_once else [HEARTBEAT] * 3)
    assert at_once or source.closed


async def test_leaving_closes_what_waits() -> None:
    source = Items()
    async with aclosing(healthy().with_heartbeats(source(), HEARTBEAT, "from-engine")) as items:
        await anext(items)
        waiting = asyncio.ensure_future(anext(items))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait((waiting,))
    assert source.closed


async def test_marked_chunks_say_that_they_have_come_here() -> None:
    source = Items()
    source.queue.put_nowait(FrameChunk(NO_CODES, 1, marks=(("codes", 1),)))
    async with aclosing(healthy().with_heartbeats(source(), HEARTBEAT, "from-engine")) as items:
        heartbeat, chunk = [await anext(items) for _ in range(2)]
    assert heartbeat is HEARTBEAT
    assert [stage for stage, _ in chunk.marks] == ["codes", "from-engine"]


async def test_the_first_chunk_names_the_replicas_that_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_private, "replica_name", lambda: "Codec#1")
    source = Items()
    for trail in ((("Talker#1", 1),), ()):
        source.queue.put_nowait(FrameChunk(NO_CODES, 1, trail=trail))
    async with aclosing(healthy().with_heartbeats(source(), HEARTBEAT, "codec")) as items:
        trails = [[stage for stage, _ in (await anext(items)).trail] for _ in range(3)]
    assert trails == [[], ["Talker#1", "Codec#1"], []]


@pytest.mark.parametrize(
    ("error", "logged"),
    [(Overloaded("full"), False), (InvalidRequest("too long"), False), (RuntimeError("broken"), True), (None, True)],
)
def test_serve_logs_no_refusals(error: Exception | None, logged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    serve, records = logging.getLogger("ray.serve"), list[logging.LogRecord]()
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", records.append)
    serve.addHandler(handler)
    for _ in range(2):
        healthy()
    serve.error("Request failed.", exc_info=error)
    serve.removeHandler(handler)
    assert len(records) == logged
