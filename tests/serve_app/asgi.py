"""An ASGI connection driven by hand, so that a test decides what happens in which order."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from starlette.types import ASGIApp, Message, Scope

Headers = dict[str, str]
_BOUND_S = 30.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One whole response."""

    status: int
    headers: Headers
    content: bytes

    @property
    def content_type(self) -> str:
        return self.headers["content-type"]


class Connection:
    """One call of the app. `next()` is its next message; while `stall()` holds, what it sends is not taken."""

    def __init__(self, app: ASGIApp, scope: Scope) -> None:
        self._app = app
        self._scope = scope
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        self._outgoing: asyncio.Queue[Message] = asyncio.Queue()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.sending = asyncio.Event()  # the app is inside a send that is stalled
        self.send_error: OSError | None = None

    async def __aenter__(self) -> Self:
        self.task = asyncio.create_task(self._app(self._scope, self._incoming.get, self._send))
        return self

    async def __aexit__(self, *error: object) -> None:
        self.task.cancel()
        await asyncio.wait((self.task,))

    def receive(self, message: Message) -> None:
        self._incoming.put_nowait(message)

    async def next(self) -> Message:
        """The app's next message. Fails if the app ends without one, or sends none for half a minute."""
        getting = asyncio.create_task(self._outgoing.get())
        done, _ = await asyncio.wait((getting, self.task), timeout=_BOUND_S, return_when=asyncio.FIRST_COMPLETED)
        if getting.done():
            return getting.result()
        getting.cancel()
        if not done:
            raise AssertionError(f"the app sends no message, and does not end, within {_BOUND_S:g} s")
        if self._outgoing.empty():
            raise AssertionError(f"the app ended without another message: {self.task}")
        return self._outgoing.get_nowait()

    async def answer(self) -> Answer:
        """The whole response. Raises what the app raises; fails if it ends before its end."""
        await self.task
        start, *parts = (self._outgoing.get_nowait() for _ in range(self._outgoing.qsize()))
        assert not parts[-1].get("more_body", False)
        headers = {name.decode(): value.decode() for name, value in start["headers"]}
        return Answer(start["status"], headers, b"".join(part.get("body", b"") for part in parts))

    @property
    def has_sent(self) -> bool:
        """Whether `next()` has a message already."""
        return self.num_sent > 0

    @property
    def num_sent(self) -> int:
        """How many messages `next()` has."""
        return self._outgoing.qsize()

    def stall(self) -> None:
        self._flowing.clear()

    def flow(self) -> None:
        self.sending.clear()
        self._flowing.set()

    async def _send(self, message: Message) -> None:
        if self.send_error is not None:
            raise self.send_error
        if not self._flowing.is_set():
            self.sending.set()
            await self._flowing.wait()
        self._outgoing.put_nowait(message)


async def post(app: ASGIApp, path: str, content: bytes, *, content_type: str = "application/json") -> Answer:
    """What a request is answered with, within half a minute."""
    async with http(app, "POST", path, body=content, headers={"content-type": content_type}) as connection:
        async with asyncio.timeout(_BOUND_S):
            return await connection.answer()


def http(app: ASGIApp, method: str, path: str, *, body: object = None, headers: Headers | None = None) -> Connection:
    """A request whose body has arrived; None: nothing has."""
    connection = Connection(app, _scope("http", path, headers or {}) | {"method": method})
    if body is not None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.receive({"type": "http.request", "body": content, "more_body": False})
    return connection


def websocket(
    app: ASGIApp, path: str, *, headers: Headers | None = None, subprotocols: Sequence[str] = (), denial: bool = True
) -> Connection:
    """A socket that asks to be accepted; `denial`: the server may refuse it with an HTTP response."""
    extensions: Scope = {"websocket.http.response": {}} if denial else {}
    scope = _scope("websocket", path, headers or {})
    connection = Connection(app, scope | {"subprotocols": list(subprotocols), "extensions": extensions})
    connection.receive({"type": "websocket.connect"})
    return connection


def _scope(kind: str, path: str, headers: Headers) -> Scope:
    path, _, query = path.partition("?")
    return {
        "type": kind,
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "scheme": "http" if kind == "http" else "ws",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 1),
        "server": ("testserver", 80),
    }
