import asyncio
import gc
import pickle
import time
import weakref
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from grpc import RpcError
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from deployments.errors import InvalidRequest, Moved, NotReady, Overloaded, TalkerLost
from deployments.limits import Rate
from deployments.serving.handles import ItemReader, call_all_replicas, call_replica, from_ray_error, stream_from_replica

pytestmark = pytest.mark.anyio


def from_replica(cause: Exception) -> Exception:
    """What a caller gets for an exception that a replica raised: of the exception's own class and Ray's."""
    error = RayTaskError("generate", "Traceback of the replica", cause, proctitle="replica", pid=1, ip="10.0.0.1")
    received: Exception = pickle.loads(pickle.dumps(error)).as_instanceof_cause()
    return received


class Response:
    def __init__(self, items: list[object]) -> None:
        self._items = items
        self.cancelled = 0

    async def __aiter__(self) -> AsyncGenerator[object, None]:
        for item in self._items:
            if isinstance(item, asyncio.Event):
                await item.wait()
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item

    def __await__(self):  # type: ignore[no-untyped-def]
        yield from asyncio.sleep(0).__await__()
        (item,) = self._items
        if isinstance(item, asyncio.Event):
            yield from item.wait().__await__()
        if isinstance(item, BaseException):
            raise item
        return item

    def cancel(self) -> None:
        self.cancelled += 1


class Handle:
    def __init__(self, *items: object, name: str = "Talker") -> None:
        self.deployment_name = name
        self.response = Response(list(items))
        self.calls: list[tuple[object, ...]] = []

    def options(self, *, method_name: str, stream: bool = False) -> "Handle":
        self.calls.append((method_name, stream))
        return self

    def remote(self, *arguments: object) -> Response:
        self.calls.append(arguments)
        return self.response


class Request:
    """May be megabytes."""


async def collect(chunks: AsyncGenerator[object, None]) -> list[object]:
    async with aclosing(chunks):
        return [chunk async for chunk in chunks]


@pytest.mark.parametrize("cause", [
    InvalidRequest("too long", "input", "some_code"), Overloaded("full", 3.0), TalkerLost("gone"),
    KeyError("a bug in the replica"),
])  # fmt: skip
def test_what_the_method_raised_comes_back_as_itself(cause: Exception) -> None:
    translated = from_ray_error(from_replica(cause), TalkerLost, Rate())
    assert type(translated) is type(cause)
    assert translated.args == cause.args
    assert vars(translated) == vars(cause)


def test_other_exceptions_stay_what_they_are() -> None:
    error = ValueError("ours")
    assert from_ray_error(error, TalkerLost, Rate()) is error


async def test_a_call_that_has_ended_holds_its_request_no_more() -> None:
    request = Request()
    held = weakref.ref(request)
    gc.disable()
    try:
        await collect(stream_from_replica(Handle("a"), "generate", request, lost=TalkerLost))
        del request
        assert held() is None
    finally:
        gc.enable()


async def test_a_call_is_cancelled_once_it_has_been_taken() -> None:
    taken = asyncio.Event()
    handle = Handle(taken, 1, asyncio.Event())
    reading = asyncio.create_task(collect(stream_from_replica(handle, "generate", "request", lost=TalkerLost)))
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait((reading,))
    assert reading.cancelled()
    assert handle.response.cancelled == 0
    taken.set()
    async with asyncio.timeout(10):
        while not handle.response.cancelled:  # noqa: ASYNC110, somebody else's event loop tells no one
            await asyncio.sleep(0)


async def test_a_plain_call_returns_or_raises_one_of_ours() -> None:
    handle = Handle("info")
    assert await call_replica(handle, "describe", lost=TalkerLost) == "info"
    assert handle.calls == [("describe", False), ()]
    for raised, ours in ((ActorDiedError(), TalkerLost), (asyncio.CancelledError(), Moved)):
        with pytest.raises(ours):
            await call_replica(Handle(raised), "describe", lost=TalkerLost)
    with pytest.raises(TimeoutError):  # its own cancellation stays one
        await asyncio.wait_for(call_replica(Handle(asyncio.Event()), "describe", lost=TalkerLost), 0.01)


class Everybody:
    """A handle whose replicas all answer, or one of them fails."""

    deployment_name = "Talker"

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.asked: list[object] = []

    def broadcast(self, *call: object) -> "Everybody":
        self.asked.append(call)
        return self

    async def results_async(self, *, timeout_s: float) -> list[int]:
        if self.error is not None:
            raise self.error
        return [1, 2]


async def test_all_replicas_answer_or_it_is_not_ready() -> None:
    handle = Everybody()
    assert await call_all_replicas(handle, "forget", "voices") == [1, 2]
    assert handle.asked == [("forget", "voices")]
    unavailable = DeploymentUnavailableError(DeploymentID("Talker", "default"))
    for error in (TimeoutError(), ActorDiedError(), from_replica(KeyError("a bug")), RpcError(), unavailable):
        with pytest.raises(NotReady, match="Talker: not every replica has answered forget"):
            await call_all_replicas(Everybody(error), "forget", "voices")


async def test_what_came_while_this_process_could_not_run_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.serving.handles._PEER_TIMEOUT_S", 0.05)
    came = asyncio.Event()
    async with aclosing(stream_from_replica(Handle("a", came, "b"), "generate", "request", lost=TalkerLost)) as items:
        assert await anext(items) == "a"
        reading = asyncio.create_task(anext(items))
        await asyncio.sleep(0)
        time.sleep(0.1)  # noqa: ASYNC251, the whole process stands still
        for _ in range(3):
            await asyncio.sleep(0)
        came.set()
        assert await reading == "b"


async def test_an_item_is_asked_for_when_its_reader_waits_for_it() -> None:
    asked = list[int]()

    async def count() -> AsyncGenerator[int, None]:
        for number in range(3):
            asked.append(number)
            yield number

    async with aclosing(count()) as numbers:
        items = ItemReader(numbers)
        for number in range(3):
            assert await items.wait(10.0)
            assert await items.wait(10.0)  # the same one
            assert items.get_nowait() == number
            await asyncio.sleep(0)
            assert asked == list(range(number + 1))
        assert await items.wait(10.0)
        with pytest.raises(StopAsyncIteration):
            items.get_nowait()
        await items.aclose()


async def test_what_does_not_come_in_time_may_come_later() -> None:
    gate = asyncio.Event()
    items = ItemReader(aiter(Response([gate, "a", ValueError("broken")])))
    assert not await items.wait(0.001)
    gate.set()
    assert await items.wait(10.0)
    assert items.get_nowait() == "a"
    assert await items.wait(10.0)
    with pytest.raises(ValueError, match="broken"):
        items.get_nowait()
    await items.aclose()


async def test_the_time_of_one_wait_does_not_end_the_next() -> None:
    came = asyncio.Event()
    items = ItemReader(aiter(Response(["a", came, "b"])))
    assert await items.wait(0.05)
    assert items.get_nowait() == "a"
    asyncio.get_running_loop().call_later(0.1, came.set)
    assert await items.wait(10.0)
    assert items.get_nowait() == "b"
    await items.aclose()


async def test_a_reader_that_leaves_ends_what_it_waits_for() -> None:
    left = asyncio.Event()

    async def silence() -> AsyncGenerator[int, None]:
        try:
            await asyncio.Event().wait()
            yield 1
        finally:
            left.set()

    items = ItemReader(silence())
    waiting = asyncio.create_task(items.wait(10.0))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not left.is_set()
    await items.aclose()
    assert left.is_set()
