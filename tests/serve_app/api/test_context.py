"""What stands outermost, where no server is needed to see it; tests/faults/test_hostile_clients.py sees the rest."""

import asyncio
from collections.abc import Callable

import pytest
from ray.serve._private.direct_ingress_http_util import ASGIDIReceiveProxy
from starlette.types import Message, Receive, Scope, Send

from serve_app.api import context
from serve_app.api.context import SANE_ID, RequestContext, with_sane_id, without_read_ahead

pytestmark = pytest.mark.anyio


async def id_after(*offered: bytes) -> str:
    """The only id that is left of those."""
    seen: list[bytes] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend(value for name, value in scope["headers"] if name == b"x-request-id")

    headers = [(b"x-request-id", value) for value in offered]
    await with_sane_id(app)({"type": "http", "headers": headers}, nothing, ignore)
    [chosen] = seen
    return chosen.decode()


async def nothing() -> Message:
    return {"type": "http.disconnect"}


async def ignore(message: Message) -> None:
    pass


@pytest.mark.parametrize(
    "offered", [(), (b"",), (b"x" * 129,), (b"a b",), (b"<b>",), (b"\xff",), (b"a", b"b"), (b"a\n",)]
)
async def test_only_a_sane_id_stays(offered: tuple[bytes, ...]) -> None:
    assert await id_after(b"mine:1.2-3") == "mine:1.2-3"
    chosen = await id_after(*offered)
    assert SANE_ID.fullmatch(chosen)
    assert chosen.encode() not in offered


async def test_serve_reads_no_further_ahead_than_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, woken = asyncio.get_running_loop(), list[Callable[[], object]]()
    monkeypatch.setattr(loop, "call_soon_threadsafe", lambda call: woken.append(call) or loop.call_soon(call))
    parts = iter([{"type": "http.request", "body": b"x", "more_body": True}] * 9 + [{"type": "http.request"}])
    received = 0

    async def body() -> Message:
        nonlocal received
        received += 1
        return next(parts, {"type": "http.disconnect"})

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for taken in range(9):
            for _ in range(9):
                await asyncio.sleep(0)
            assert received == taken + 1
            await receive()
        assert (await receive())["type"] == "http.request"
        assert (await receive())["type"] == "http.disconnect"

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        proxy = ASGIDIReceiveProxy(scope, receive, asyncio.get_running_loop())
        reading = proxy.fetch_until_disconnect_task()
        await RequestContext(app, echo_request_id=True, on_end=id, dialects={})(scope, proxy, send)
        await reading

    await without_read_ahead(serve)({"type": "http", "method": "POST", "headers": []}, body, ignore)
    assert len(woken) == 9, "the application may run in its own event loop"


async def closing(status: int, *, length: str, read: bool) -> str | None:
    """What is said of a connection with an answer to a request, whose body comes or does not."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})

    async def body() -> Message:
        if not read:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": b"x", "more_body": False}

    sent: list[Message] = []

    async def collect(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "headers": [(b"content-length", length.encode())]}
    await RequestContext(app, echo_request_id=True, on_end=id, dialects={})(scope, body, collect)
    headers = dict(sent[0]["headers"])
    assert (headers.get(b"connection") == b"close") == (b"x-talkray-close" in headers)
    return headers[b"x-talkray-close"].decode() if b"x-talkray-close" in headers else None


@pytest.mark.parametrize(
    ("status", "length", "read", "expected"),
    [
        (200, "1", False, None), (400, "1", True, None), (429, "1", True, None), (429, "1", False, "unread"),
        (404, "1", False, "unread"), (404, "0", False, None), (401, "1", False, "unread"), (401, "0", False, "read"),
        (413, "1", True, "read"),
    ],
)  # fmt: skip
async def test_which_answers_end_a_connection(
    status: int, length: str, read: bool, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "_READ_ON_S", 0.01)
    assert await closing(status, length=length, read=read) == expected
