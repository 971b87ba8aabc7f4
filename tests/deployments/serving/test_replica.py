"""Outside Serve, with what it would say put in its place; tests/faults has the real thing."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import SimpleNamespace

import numpy as np
import pytest

from deployments.errors import InvalidRequest, Overloaded, TalkerLost
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


async def test_leaving_closes_what_waits() -> None:
    source = Items()
    async with aclosing(healthy().with_heartbeats(source(), HEARTBEAT, "from-engine")) as items:
        await anext(items)
        waiting = asyncio.ensure_future(anext(items))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait((waiting,))
    assert source.closed


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
