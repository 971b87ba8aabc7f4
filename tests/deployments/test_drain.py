"""Outside Serve, with what it would say put in its place; tests/faults has the real thing."""

import asyncio
from types import SimpleNamespace

import pytest

from deployments import drain
from deployments.drain import Departure, end_process
from deployments.errors import Moved

pytestmark = pytest.mark.anyio


class Serve:
    def __init__(self) -> None:
        self.replica = SimpleNamespace(_shutting_down=False)
        self.others = False


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    serve = Serve()
    monkeypatch.setattr(drain, "_replica_impl", lambda: serve.replica)
    monkeypatch.setattr(drain, "_others_run", lambda: serve.others)
    monkeypatch.setattr(drain, "_POLL_S", 0.001)
    return serve


async def speak(departure: Departure) -> None:
    async with asyncio.timeout(10):
        while True:
            departure.check()
            await asyncio.sleep(0.001)


async def test_a_stopped_replica_hands_over_once_another_runs(serve: Serve) -> None:
    departure = Departure()
    departure.check()
    serve.replica._shutting_down = True
    for _ in range(20):
        departure.check()
        await asyncio.sleep(0.001)
    serve.others = True
    with pytest.raises(Moved):
        await speak(departure)


async def test_a_running_replica_keeps_its_streams(serve: Serve) -> None:
    departure = Departure()
    serve.others = True
    for _ in range(20):
        departure.check()
        await asyncio.sleep(0.001)


async def test_outside_serve_there_is_no_departure_and_no_end() -> None:
    departure = Departure()
    departure.check()
    await asyncio.sleep(0)
    departure.check()
    await end_process("it hangs")


async def test_a_broken_replica_ends(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(drain.os, "_exit", ended.append)
    await end_process("it hangs")
    assert ended == [1]
