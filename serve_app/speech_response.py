"""The HTTP response that carries speech, and stops it when the client leaves."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send


class SpeechResponse(Response):
    """Starts with the first bytes of `body`: an error before them is raised before any status has been sent.

    `body` is closed in every case, also when the client leaves while a chunk is awaited or sent, which Starlette's
    own streaming response leaves to the garbage collector. A client that left raises ClientDisconnect. An error after
    the start is raised as well, so that the server breaks the connection off instead of ending the body cleanly.
    """

    def __init__(
        self,
        body: AsyncGenerator[bytes, None],
        headers: Mapping[str, str],
        *,
        whole: bool,
        late_headers: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """`late_headers` are asked for when the response starts."""
        self.status_code = 200
        self.background = None
        self._body = body
        self._whole = whole
        self._late_headers = late_headers
        self.init_headers(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Speaks until the audio ends or the client leaves."""
        speaking = asyncio.create_task(self._send_whole(send) if self._whole else self._send_stream(send))
        leaving = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((speaking, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            speaking.cancel()
            leaving.cancel()
            await asyncio.wait((speaking, leaving))
        if speaking.cancelled():
            raise ClientDisconnect from (None if leaving.cancelled() else leaving.exception())
        speaking.result()

    async def _send_stream(self, send: Send) -> None:
        async with aclosing(self._body) as body:
            first = await anext(body, b"")
            await _deliver(send, self._start())
            await _deliver(send, _part(first))
            async for part in body:
                await _deliver(send, _part(part))
        await _deliver(send, _part(b"", more=False))

    async def _send_whole(self, send: Send) -> None:
        async with aclosing(self._body) as body:
            content = b"".join([part async for part in body])
        self.headers["content-length"] = str(len(content))
        await _deliver(send, self._start())
        await _deliver(send, _part(content, more=False))

    def _start(self) -> Message:
        self.headers.update(self._late_headers())
        return {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}


def _part(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def _deliver(send: Send, message: Message) -> None:
    """Sends; the OSError by which ASGI servers report a closed connection becomes ClientDisconnect."""
    try:
        await send(message)
    except OSError as error:
        raise ClientDisconnect from error


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
