"""uvicorn's WebSocket protocol, with a limit on incomplete messages and with close reasons that reach the client."""

from asyncio.transports import BaseTransport, Transport
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, cast

from starlette.types import Scope
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from serve_app.api.access.access_control import client_address, one_client
from serve_app.api.access.callers import FairShare
from serve_app.api.early_status import ReaderClock
from serve_app.api.error_replies import TRY_AGAIN_LATER
from serve_app.api.parsing.client_input import MAX_BODY_BYTES
from serve_app.api.parsing.uploads import Pace
from serve_app.config import AdmissionSettings

MAX_MESSAGE_BYTES = 128 << 10  # limit for messages without reference audio
# Scope key of a function, set if the client's connection terminates in this process. The function registers a callback,
# which may run in any thread when the server stops.
LEAVING = "talkray.leaving"
# Maximum total bytes of large incomplete messages across all connections; enough for three recordings.
MAX_LARGE_BYTES = 48 << 20
# Seconds that a client is given to read the server's last messages. A client that is still sending would lose these
# messages if the server closed the connection at once.
_LAST_WORDS_S = 2.0
_PONG = b"\x8a"  # first byte of a pong frame
# Input is processed in pieces. After more than _MOST_READING_S, a connection pauses for _REST times as long, because
# one read may contain thousands of pings and block the event loop.
_PIECE_BYTES = 16 << 10
_MOST_READING_S, _REST = 0.005, 4


def uvicorn_settings(admission: AdmissionSettings) -> dict[str, Any]:
    """uvicorn's WebSocket settings for an ingress replica."""
    return {
        "ws": partial(BoundedWebSocket, trusted_proxies=admission.trusted_proxies),
        "ws_max_size": MAX_BODY_BYTES,
        "ws_per_message_deflate": False,
        "ws_ping_timeout": None,  # paused clients do not answer pings; `MAX_UNREAD_S` limits the pause
    }


class BoundedWebSocket(WebSocketsSansIOProtocol):
    """WebSocket protocol whose incomplete messages over `MAX_MESSAGE_BYTES` share `MAX_LARGE_BYTES`. If space runs out,
    stalled messages are dropped. If that is not enough, the client gets `TRY_AGAIN_LATER`.
    """

    _room: ClassVar[FairShare] = FairShare(MAX_LARGE_BYTES)
    _large: ClassVar[list["BoundedWebSocket"]] = []  # connections that are receiving a large message

    def __init__(self, *args: Any, trusted_proxies: int, **kwargs: Any) -> None:
        """Create the protocol. `trusted_proxies`: see `api.admission.trusted_proxies`."""
        super().__init__(*args, **kwargs)
        self._trusted_proxies = trusted_proxies

    def connection_made(self, transport: BaseTransport) -> None:
        self._held = 0
        self._has_failed = False
        self._is_leaving = False
        self._leave: Callable[[], object] | None = None
        self._unread = bytearray()  # bytes received while reading is paused
        self._is_resting = False
        self._pong = b""  # latest pong, kept until the client reads again
        self._reader = ReaderClock(cast("Transport", transport), self.loop)
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.conn.parser.close()  # the parser holds the last frame
        self._reader.stop()
        self._leave = None  # the callback references the application's side of the connection
        self._drop_message()
        super().connection_lost(exc)

    async def run_asgi(self) -> None:
        """Run the application. uvicorn calls this when a client requests a WebSocket."""
        cast("dict[str, Any]", self.scope)[LEAVING] = self._on_leaving
        try:
            await super().run_asgi()
        finally:
            while not self.queue.empty():  # messages that the application has not read
                self.queue.get_nowait()

    def shutdown(self) -> None:
        """Ask the application to close this WebSocket. uvicorn calls this when the server stops, and then waits for its
        connections. uvicorn's own method would close the connection immediately, in mid-utterance.
        """
        self._is_leaving = True
        if self.close_sent or (self.handshake_complete and self._leave is None):
            super().shutdown()
        elif self._leave is not None:
            self._leave()

    def _on_leaving(self, leave: Callable[[], object]) -> None:
        """Register `leave`, which is called when the server stops."""
        self._leave = leave
        if self._is_leaving:
            leave()

    def data_received(self, data: bytes) -> None:
        if self._has_failed:
            return
        self._unread += data
        if self._is_resting:
            self.transport.pause_reading()  # uvicorn has resumed reading for the application
        else:
            self._read()

    def _read(self) -> None:
        began_s = self.loop.time()
        while self._unread and not self.transport.is_closing():
            piece = bytes(self._unread[:_PIECE_BYTES])
            del self._unread[:_PIECE_BYTES]
            self._read_piece(piece)
            spent_s = self.loop.time() - began_s
            if spent_s > _MOST_READING_S and not self._has_failed and not self.transport.is_closing():
                self._is_resting = True
                self.transport.pause_reading()
                self.loop.call_later(_REST * spent_s, self._read_on)
                return

    def _read_on(self) -> None:
        self._is_resting = False
        if self.transport.is_closing():
            return
        self._read()
        if not self._is_resting and not self.read_paused:
            self.transport.resume_reading()

    def _read_piece(self, piece: bytes) -> None:
        super().data_received(piece)
        if self._has_failed:
            return
        unfinished = len(self.conn.reader.buffer) + (self.conn.current_size or 0)
        if not self._hold(unfinished if unfinished > MAX_MESSAGE_BYTES else 0):
            self._refuse("too many large messages, retry after 1 s")

    def handle_ping(self) -> None:
        """Answer a ping. If the client is not reading, keep only the latest pong for later."""
        answers = self.conn.data_to_send()
        if not self.writable.is_set():
            pongs = [answer for answer in answers if answer[:1] == _PONG]
            self._pong = b"".join(pongs[-1:]) or self._pong
            answers = [answer for answer in answers if answer[:1] != _PONG]
        self.transport.write(b"".join(answers))

    def send_keepalive_ping(self) -> None:
        """Send a ping every 20 s. `ReaderClock` ends connections whose client does not read."""
        if self.writable.is_set():
            super().send_keepalive_ping()
        else:
            self.schedule_ping()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reader.start()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reader.stop()
        pong, self._pong = self._pong, b""
        if pong:
            self.transport.write(pong)

    def handle_parser_exception(self) -> None:
        """Send the close reason, then discard input until the client has had time to read the reason."""
        assert self.conn.close_sent is not None
        self._has_failed = True
        code, reason = self.conn.close_sent.code, self.conn.close_sent.reason
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.close_timer = self.loop.call_later(_LAST_WORDS_S, self.transport.close)
        self._drop_message()
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()

    def _drop_message(self) -> None:
        """Drop the received part of a message, because the connection's objects may outlive it in memory."""
        self.frames = []
        self._unread.clear()
        self.conn.reader.buffer.clear()
        self._let_go(0)

    def _refuse(self, reason: str) -> None:
        self.conn.fail(TRY_AGAIN_LATER, reason)
        self.handle_parser_exception()

    def _hold(self, num_bytes: int) -> bool:
        """Reserve space for this many bytes of a message. Return False if there is not enough."""
        if num_bytes <= self._held:
            self._let_go(num_bytes)
            return True
        if not self._held:
            address = client_address(cast("Scope", self.scope), trusted_proxies=self._trusted_proxies)
            self._client, self._pace = one_client(address), Pace()
        self._pace.come(num_bytes)
        while not self._room.claim(self._client, num_bytes - self._held):
            stalled = next((other for other in self._large if other is not self and other._pace.is_stalled), None)
            if stalled is None:
                return False
            stalled._refuse("a large message stalled while others waited, retry after 1 s")
        if not self._held:
            self._large.append(self)
        self._held = num_bytes
        return True

    def _let_go(self, num_bytes: int) -> None:
        if not self._held:
            return
        self._room.release(self._client, self._held - num_bytes)
        self._held = num_bytes
        if not self._held:
            self._large.remove(self)
