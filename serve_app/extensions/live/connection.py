"""Base classes for WebSocket connections. A connection reads while it speaks, because only reads detect disconnects."""

import asyncio
import logging
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import ClassVar

from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect

from deployments.errors import InvalidRequest, Overloaded, PayloadTooLarge, TalkrayError
from serve_app.api.bounded_websocket import LEAVING, MAX_MESSAGE_BYTES
from serve_app.api.context import state_of
from serve_app.api.error_replies import (
    INTERNAL,
    POLICY_VIOLATION,
    TRY_AGAIN_LATER,
    ErrorReply,
    Unauthorized,
    close_reason,
    translate,
)
from serve_app.api.parsing.client_input import MAX_BODY_BYTES, parse_object
from serve_app.api.resolve.speech_request import SpeechRequest, disclosure
from serve_app.api.routing import refuse_handshake
from serve_app.api.speech_service import SpeechService
from serve_app.extensions.continuity.tails import PREVIOUS, Continuation
from serve_app.extensions.live.session import Session
from serve_app.extensions.live.turns import Done, Event, Failed

logger = logging.getLogger(__name__)

IDLE_TIMEOUT_S = 600.0  # the server closes any socket on which no message has been sent for this long
_ENGINE_FAILED = 1011
_SERVICE_RESTART = 1012
_REPLACED = "this server is being replaced, please reconnect"
# During a shutdown, the server closes a socket without pending speech. The server first waits until neither side has
# sent anything for `quiet_s`, because an active client would send its next message in this time. After _PATIENCE_S,
# the server closes active sockets between turns. After MAX_LEAVING_S, close to `LONGEST_STREAM_S`, it cuts speech off.
_QUIET_S = 1.0
_PATIENCE_S, MAX_LEAVING_S = 60.0, 540.0
_LEAVING_POLL_S = 0.1
_STOP_POLL_S = 0.5
_RECORDING = re.compile(r'"(ref_audio|reference_audio)"\s*+:\s*+("(?:[^"\\]|\\.)*+")')


class Connection(ABC):
    """WebSocket connection that reads messages and sends speech until the client leaves or `end` is called."""

    subprotocol: ClassVar[str | None] = None  # name in the handshake
    text_fields: ClassVar[tuple[str, ...]] = ("text", "transcript")  # fields that may end within a surrogate pair
    takes_recordings: ClassVar[bool] = False  # whether messages may contain `ref_audio`

    def __init__(self, socket: WebSocket, service: SpeechService) -> None:
        self.socket, self.service = socket, service
        self.request_id = state_of(socket).record.request_id
        self._speaking: set[asyncio.Task[None]] = set()
        self._sessions: set[Session] = set()
        self._leaving: asyncio.Task[None] | None = None
        self._num_untold = 0  # session events that have not been sent to the client
        self._num_ids = 0
        self._is_ending = False
        self._ended = asyncio.Event()
        self._active_s = asyncio.get_running_loop().time()  # time of the last message in either direction

    def next_id(self) -> str:
        """Return a request ID for the next utterance of this connection."""
        self._num_ids += 1
        return f"{self.request_id}-{self._num_ids}"

    @classmethod
    async def run(cls, socket: WebSocket, service: SpeechService) -> None:
        """Accept and serve a client."""
        await cls(socket, service).serve()

    @abstractmethod
    async def obey(self, fields: dict[str, object]) -> None:
        """Handle a message from the client. Raises InvalidRequest, which `refuse` reports to the client."""

    async def tell_error(self, reply: ErrorReply) -> None:
        """Send an error message to the client, after an invalid message or failed speech."""
        await self.send("error", request_id=None, **reply.envelope())

    async def refuse(self, error: InvalidRequest) -> None:
        """Report an invalid message to the client, and keep the socket open."""
        await self.tell_error(translate(error))

    @property
    def is_busy(self) -> bool:
        """Whether the connection is speaking."""
        return bool(self._speaking)

    @property
    def owes_speech(self) -> bool:
        """Whether the connection has unspoken text or unsent events."""
        is_speaking = any(session.is_speaking or session.is_writing for session in self._sessions)
        return is_speaking or self._num_untold > 0 or len(self._speaking) > len(self._sessions)

    async def opened(self) -> None:  # noqa: B027, an optional hook
        """Send the first messages. `serve` calls this method after the handshake."""

    async def stop(self) -> None:
        """Cancel all speech."""
        speaking = tuple(self._speaking)
        for task in speaking:
            task.cancel()
        if speaking:
            await asyncio.wait(speaking)

    async def serve(self, headers: Mapping[str, str] | None = None) -> None:
        """Handle messages until the client leaves, the socket is idle for too long, or the server cancels the handler.

        Then stop all speech. `headers` are added to the handshake.
        """
        named = {**disclosure(self.service.settings.disclose_synthetic), **(headers or {})}
        encoded = [(name.encode(), value.encode("latin-1")) for name, value in named.items()]
        self._leave_when_asked()
        try:
            await self.socket.accept(self.subprotocol, encoded)
            await self.opened()
            while (message := await self._receive())["type"] != "websocket.disconnect":
                await self._answer(message.get("text"))
        except TimeoutError:
            await self.socket.close(reason="idle")
        except WebSocketDisconnect:
            logger.info("connection %s: the client left", self.request_id)
        except RuntimeError:  # Starlette raises this if we already closed the socket
            if not self._is_ending:
                raise
            logger.info("connection %s: closed before its last message was answered", self.request_id)
        finally:
            if self._leaving is not None:
                self._leaving.cancel()
            await self.stop()

    async def send(self, kind: str, **fields: object) -> None:
        """Send a JSON message with a type."""
        await self.socket.send_json({"type": kind, **fields})

    def start(self, speaking: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run `speaking` in parallel with reading, until `stop` is called or the connection ends."""
        task = asyncio.create_task(self._guarded(speaking))
        self._speaking.add(task)
        task.add_done_callback(lambda done: self._stopped(done, speaking))
        return task

    def new_continuation(self) -> Continuation:
        """Create the state of a conversation, in which each utterance continues the previous one."""
        return Continuation(self.service.opened_by("continuity"))

    def new_session(
        self, speech: SpeechRequest, *, request_id: str, live: bool = True, continuation: Continuation | None = None
    ) -> Session:
        """Create a session. If `live` is set, it speaks text while the client is still writing it. See `Session`.

        Pass the same `continuation` to several sessions of one conversation.
        """
        return Session(
            self.service.resolver,
            speech,
            handshake=state_of(self.socket),
            request_id=request_id,
            continuation=continuation or self.new_continuation(),
            live_texts=self.service.opened_by("live") if live else None,
        )

    async def pass_on(self, session: Session, say: Callable[[Event], Awaitable[None]]) -> None:
        """Pass the events of a session to `say` until the session ends."""
        self._sessions.add(session)
        try:
            async with session:
                async for event in session:
                    self._num_untold += 1
                    try:
                        await say(event)
                    finally:
                        self._num_untold -= 1
                    self._touch()
        finally:
            self._sessions.discard(session)

    async def end(self, code: int = 1000, reason: str = "") -> None:
        """Close the socket, and end `serve`."""
        self._is_ending = True
        try:
            await self.socket.close(code, reason)
        except (WebSocketDisconnect, RuntimeError):
            logger.info("connection %s: the client left before it was closed", self.request_id)
        self._ended.set()

    async def end_for(self, error: Exception) -> None:
        """Close the socket with the code for `error`, so that clients know whether to reconnect."""
        if isinstance(error, Overloaded):  # the client may reach a server with free capacity when it reconnects
            await self.end(TRY_AGAIN_LATER, close_reason(error))
        else:
            code = POLICY_VIOLATION if isinstance(error, Unauthorized | InvalidRequest) else _ENGINE_FAILED
            await self.end(code, translate(error).code)

    def _leave_when_asked(self) -> None:
        loop = asyncio.get_running_loop()

        def leave() -> None:
            self._leaving = self._leaving or loop.create_task(self._leave())

        if (tell := self.socket.scope.get(LEAVING)) is not None:
            tell(lambda: loop.call_soon_threadsafe(leave))
        else:  # the socket came through Serve's proxy, because HAProxy had no replica
            self._leaving = loop.create_task(self._leave_with_replica())

    async def _leave_with_replica(self) -> None:
        await wait_until_stopping()
        await self._leave()

    async def _leave(self) -> None:
        """Close the socket as soon as all speech has ended, at the latest after MAX_LEAVING_S seconds."""
        clock = asyncio.get_running_loop().time
        began_s = clock()
        while self.owes_speech or clock() < self._quiet_from_s(began_s):
            if clock() >= began_s + MAX_LEAVING_S:
                break
            await asyncio.sleep(_LEAVING_POLL_S)
        await self.end(_SERVICE_RESTART, _REPLACED)

    @property
    def quiet_s(self) -> float:
        """Seconds without messages after which a server that is shutting down closes the socket."""
        return _QUIET_S

    def _quiet_from_s(self, began_s: float) -> float:
        """Return when a server that is shutting down may close the socket, provided that no more messages are sent."""
        return min(self._active_s + self.quiet_s, max(self._active_s, began_s + _PATIENCE_S))

    def failure(self, error: Exception, request_id: str) -> ErrorReply:
        """Return the reply to send for an error that ended the speech. Log internal errors."""
        reply = translate(error)
        if reply.status == INTERNAL.status:
            logger.error("request %s failed", request_id, exc_info=error)
        return reply

    async def _guarded(self, speaking: Coroutine[None, None, None]) -> None:
        try:
            await speaking
        except (WebSocketDisconnect, RuntimeError):
            logger.info("connection %s: the client left", self.request_id)
        except Exception:
            logger.exception("connection %s failed", self.request_id)
            await self.end(_ENGINE_FAILED)

    def _stopped(self, task: asyncio.Task[None], speaking: Coroutine[None, None, None]) -> None:
        speaking.close()  # a task cancelled before its start does not close its coroutine
        self._speaking.discard(task)
        self._touch()

    async def _receive(self) -> Message:
        """Return the next message. Raises TimeoutError if the socket is idle for too long."""
        if self._ended.is_set():
            return {"type": "websocket.disconnect"}
        receiving, ending = asyncio.create_task(self.socket.receive()), asyncio.create_task(self._ended.wait())
        try:
            while not receiving.done():
                remaining_s = self._remaining_s()
                if remaining_s <= 0:
                    raise TimeoutError
                await asyncio.wait((receiving, ending), timeout=remaining_s, return_when=asyncio.FIRST_COMPLETED)
                if ending.done():
                    return {"type": "websocket.disconnect"}
            self._touch()
            return receiving.result()
        finally:
            receiving.cancel()
            ending.cancel()

    def _remaining_s(self) -> float:
        """Return the seconds until the socket's idle timeout."""
        if self.is_busy:
            return IDLE_TIMEOUT_S
        return self._active_s + IDLE_TIMEOUT_S - asyncio.get_running_loop().time()

    def _touch(self) -> None:
        self._active_s = asyncio.get_running_loop().time()

    async def _answer(self, text: str | None) -> None:
        try:
            await self.obey(_parse(text, recordings=self.takes_recordings, text_fields=self.text_fields))
        except InvalidRequest as error:
            connection = state_of(self.socket).record
            replace(connection, error=error.code).publish()
            await self.refuse(error)
        except TalkrayError as error:
            await self.tell_error(self.failure(error, self.request_id))
            await self.end_for(error)


class HandshakeConnection(Connection):
    """Connection whose handshake contains the request without its text. If it is invalid, the handshake fails."""

    reason_header: ClassVar[str | None] = None  # response header with the reason for a failed handshake
    speech: SpeechRequest  # set after the handshake

    @classmethod
    @abstractmethod
    async def speech_request(cls, socket: WebSocket, service: SpeechService) -> SpeechRequest:
        """Return the request of a handshake. Raises InvalidRequest."""

    @classmethod
    async def run(cls, socket: WebSocket, service: SpeechService) -> None:
        try:
            speech = await cls.speech_request(socket, service)
        except TalkrayError as error:
            await refuse_handshake(socket, error, reason_header=cls.reason_header)
        else:
            connection = cls(socket, service)
            connection.speech = speech
            await connection.serve(speech.headers())


class ConversationConnection(Connection):
    """Connection with one session. The connection and the session end together."""

    first_message: ClassVar[str] = ""  # the type of message that opens the session
    _session: Session | None = None

    @abstractmethod
    async def say(self, event: Event) -> None:
        """Send the message for an event to the client. The base class handles the end of the session."""

    @property
    def is_busy(self) -> bool:
        """Whether the session has complete turns that have not been spoken, or unread events."""
        return self._session is not None and self._session.is_speaking

    @property
    def session(self) -> Session:
        """The open session. Raises InvalidRequest before the first message, which opens the session."""
        if self._session is None:
            raise InvalidRequest(f"The first message must be {self.first_message}.", "type")
        return self._session

    def converse(self, speech: SpeechRequest) -> Session:
        """Open the session, which speaks while `serve` reads."""
        self._session = self.new_session(speech, request_id=self.request_id)
        self.start(self.pass_on(self._session, self._say_or_end))
        return self._session

    async def finish(self) -> None:
        """Close the connection after the client has closed the session and all its text has been spoken."""
        await self.end()

    async def _say_or_end(self, event: Event) -> None:
        match event:
            case Failed(error):
                await self.tell_error(self.failure(error, self.request_id))
                await self.end_for(error)
            case Done():
                await self.finish()
            case InvalidRequest() as refused:
                await self.refuse(refused)
            case _:
                await self.say(event)


def unknown_type(*valid: str) -> InvalidRequest:
    """Return the error for a message whose type is not in `valid`."""
    return InvalidRequest(f"type must be {', '.join(valid[:-1])} or {valid[-1]}.", "type")


def _parse(text: str | None, *, recordings: bool, text_fields: tuple[str, ...]) -> dict[str, object]:
    """Parse the JSON object in a message. Check the size first, because parsed objects can take thirty times as much
    memory. If `recordings` is set, `ref_audio` does not count toward MAX_MESSAGE_BYTES.
    """
    if text is None:
        raise InvalidRequest("Messages must be JSON text. Send no binary messages.", None, "invalid_json")
    size = len(text.encode())
    if size <= MAX_MESSAGE_BYTES:
        return parse_object(text, cut_fields=text_fields)
    recording = _RECORDING.search(text) if recordings and size <= MAX_BODY_BYTES else None
    if recording is None or size - (recording.end(2) - recording.start(2)) > MAX_MESSAGE_BYTES:
        limits = f"{MAX_MESSAGE_BYTES} bytes" + (f", {MAX_BODY_BYTES} with ref_audio" if recordings else "")
        raise PayloadTooLarge(f"The message is larger than {limits}.")
    stand_in = secrets.token_hex(16)
    without = f'{text[: recording.start(2)]}"{stand_in}"{text[recording.end(2) :]}'
    fields = parse_object(without, cut_fields=text_fields)
    if fields.get(recording[1]) != stand_in:
        raise PayloadTooLarge(f"The message is larger than {MAX_MESSAGE_BYTES} bytes without its ref_audio.")
    return fields | parse_object(f'{{"{recording[1]}": {recording[2]}}}')


async def wait_until_stopping() -> None:
    """Return when Serve stops this replica. Outside a replica, never return."""
    from deployments.serving.ray_private import is_stopping, this_replica  # imported late, because commands avoid Ray

    replica = this_replica()
    while replica is None or not is_stopping(replica):  # noqa: ASYNC110, Serve has no event for it
        await asyncio.sleep(_STOP_POLL_S)


def always_streamed(fields: Mapping[str, object]) -> dict[str, str]:
    """Return the SpeechBody fields of `fields` that have no effect on a WebSocket, and why."""
    is_whole = str(fields.get("stream")).strip().lower() == "false"
    wants_whole = {"stream": is_whole, "stream_format": str(fields.get("stream_format")).strip().lower() == "sse"}
    reasons = {name: "a WebSocket always streams audio" for name, is_asked in wants_whole.items() if is_asked}
    return reasons | ({PREVIOUS: "only for HTTP and Talkray's WebSocket"} if fields.get(PREVIOUS) is not None else {})
