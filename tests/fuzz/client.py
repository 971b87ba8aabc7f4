"""The cheapest client: it calls the application."""

import asyncio
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message

from tests.fuzz.conftest import BOUND_S


@dataclass(frozen=True, slots=True)
class Answer:
    """One response."""

    status: int
    content_type: str
    content: bytes


async def post(app: ASGIApp, path: str, content: bytes, *, content_type: str = "application/json") -> Answer:
    """Fails where the application hangs, raises, or answers with less than a response."""
    incoming: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]
    sent: list[Any] = []

    async def receive() -> Message:
        return incoming.pop() if incoming else await asyncio.get_running_loop().create_future()

    async def send(message: Message) -> None:
        sent.append(message)

    async with asyncio.timeout(BOUND_S):
        await app(_scope(path, content_type), receive, send)
    start, *parts = sent
    assert not parts[-1].get("more_body", False)
    headers = {name.decode(): value.decode() for name, value in start["headers"]}
    return Answer(start["status"], headers["content-type"], b"".join(part["body"] for part in parts))


def _scope(path: str, content_type: str) -> dict[str, object]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"talkray"), (b"content-type", content_type.encode())],
        "client": ("127.0.0.1", 1),
        "server": ("talkray", 80),
    }
