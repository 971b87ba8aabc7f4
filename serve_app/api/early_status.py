"""Early status lines, which keep HAProxy from retrying a request that a replica has accepted.

If a request has received no response bytes, HAProxy retries it on the next replica (RAY_SERVE_HAPROXY_RETRY_ON),
because the connection may have closed at that moment. A request that crashes its replica would therefore crash one
replica after another. To prevent this, a replica writes the start of the status line, which is the same in all
responses, when it accepts a request. HAProxy stops retrying after the first response byte, and forwards nothing to the
client until it has all headers.
"""

from asyncio import AbstractEventLoop, TimerHandle
from asyncio.transports import BaseTransport, Transport
from typing import Any, cast

from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

_BEGINNING = b"HTTP/1.1 "
_CONTINUE = b"HTTP/1.1 100 "  # precedes the final status line
# Seconds after which a client that reads nothing is disconnected. Paused players and pages stay connected: see
# `UNREAD_S` (listener.py).
MAX_UNREAD_S = 600.0


class ReaderClock:
    """Timer that aborts a connection whose client has read nothing for MAX_UNREAD_S even though data is waiting."""

    def __init__(self, transport: Transport, loop: AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._timer: TimerHandle | None = None

    def start(self) -> None:
        """Start the timer, because data is waiting for the client."""
        if self._timer is None:
            unread = self._transport.get_write_buffer_size()
            self._timer = self._loop.call_later(MAX_UNREAD_S, self._look, unread)

    def stop(self) -> None:
        """Stop the timer, because the client has read the data or has disconnected."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, unread: int) -> None:
        self._timer = None
        if self._transport.get_write_buffer_size() < unread:
            self.start()
        else:
            self._transport.abort()


class _EarlyAnswers:
    """Transport that can write the beginning of a response before the status is known."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._beginning_is_written = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write_beginning(self) -> None:
        """Write the prefix that all responses share."""
        if not self._beginning_is_written:
            self._beginning_is_written = True
            self._transport.write(_BEGINNING)

    def write(self, data: bytes) -> None:
        """Write `data`, minus the bytes that have already been written."""
        if not self._beginning_is_written or not data:
            self._transport.write(data)
            return
        assert data.startswith(_BEGINNING)
        self._beginning_is_written = data.startswith(_CONTINUE)
        self._transport.write(data[len(_BEGINNING) :] + (_BEGINNING if self._beginning_is_written else b""))


class EarlyStatusProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, extended to begin the response as soon as a request is accepted, and to disconnect
    clients that do not read.
    """

    def connection_made(self, transport: BaseTransport) -> None:
        self._answers = _EarlyAnswers(cast("Transport", transport))
        self._reader = ReaderClock(cast("Transport", transport), self.loop)
        super().connection_made(cast("Transport", self._answers))

    def connection_lost(self, exc: Exception | None) -> None:
        self._reader.stop()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reader.start()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reader.stop()

    def handle_websocket_upgrade(self) -> None:
        """Begin the response to a handshake."""
        self._answers.write_beginning()
        super().handle_websocket_upgrade()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answers.write_beginning()
        super()._start_asgi_task(cycle, _until_close(cycle, app) if cycle.scope["http_version"] == "1.0" else app)


def _until_close(cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
    """Wrap `app` for an HTTP/1.0 client, which cannot read chunked responses. Closing the connection ends the body."""
    cycle.chunked_encoding = False

    async def unframed_app(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        async def send_unframed(message: ASGISendEvent) -> None:
            if message["type"] == "http.response.body":
                cycle.expected_content_length = len(message.get("body", b""))  # uvicorn counts this number down to zero
            await send(message)

        await app(scope, receive, send_unframed)

    return unframed_app
