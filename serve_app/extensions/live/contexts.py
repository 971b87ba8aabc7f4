"""WebSocket connections with several parallel sessions, named by the client. ElevenLabs calls a session a context."""

import asyncio
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Generic, TypeVar

from starlette.websockets import WebSocket

from deployments.errors import InvalidRequest, Overloaded
from serve_app.api.context import state_of
from serve_app.api.resolve import ignored_fields
from serve_app.api.resolve.speech_request import SpeechRequest
from serve_app.api.speech_service import SpeechService
from serve_app.extensions.live.connection import Connection
from serve_app.extensions.live.session import Session
from serve_app.extensions.live.turns import Event, Failed

MAX_CONTEXTS = 16  # per socket
MAX_NAME_CHARS = 128  # per context name
_CONTEXT_QUIET_S = 20.0


@dataclass(slots=True, eq=False)
class NamedSession:
    """A session on a socket, and the notes for its next message: the ignored fields and the voice."""

    name: str
    session: Session
    reasons: ignored_fields.Reasons
    voice: dict[str, object]

    def notes(self) -> dict[str, object]:
        """Return the fields to add to the next message, and clear them."""
        notes = {**self.voice, **ignored_fields.in_message(self.reasons)}
        self.voice, self.reasons = {}, {}
        return notes


C = TypeVar("C", bound=NamedSession)


class ContextConnection(Connection, Generic[C]):
    """Connection with several contexts. Every context after the first counts as an additional stream."""

    kind: type[C]  # class of the contexts

    def __init__(self, socket: WebSocket, service: SpeechService) -> None:
        super().__init__(socket, service)
        self._contexts: dict[str, C] = {}
        # If a context held its task, it would form a reference cycle with the traceback of the task's error.
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @abstractmethod
    async def say_in(self, context: C, event: Event) -> None:
        """Send the message for an event of a context to the client."""

    @property
    def quiet_s(self) -> float:
        """Seconds of silence before a shutdown closes the socket. ElevenLabs' timeout applies to open contexts."""
        return _CONTEXT_QUIET_S if self._contexts else super().quiet_s

    @property
    def is_busy(self) -> bool:
        return any(context.session.is_speaking for context in self._contexts.values())

    def name_of(self, fields: Mapping[str, object], default: str) -> str:
        """Return the context name in a message, or `default`. Raises InvalidRequest if the name is invalid."""
        name = default if (sent := fields.get("context_id")) is None else sent
        if not isinstance(name, str) or len(name) > MAX_NAME_CHARS:
            message = f"context_id must be a string of at most {MAX_NAME_CHARS} characters."
            raise InvalidRequest(message, "context_id")
        return name

    def find(self, name: str) -> C | None:
        """Return the context with this name if it still accepts text, or None."""
        context = self._contexts.get(name)
        return None if context is None or context.session.has_ended else context

    async def open(self, name: str, speech: SpeechRequest, reasons: ignored_fields.Reasons) -> C:
        """Open a context. Its first message contains `reasons`. Raises InvalidRequest if MAX_CONTEXTS are open."""
        await self._end_of(name)  # an ended context with this name may still be sending its last events
        if len(self._contexts) >= MAX_CONTEXTS:
            message = f"{MAX_CONTEXTS} contexts are open. Close one before you open another."
            raise InvalidRequest(message, "context_id", "too_many_contexts")
        session = self.new_session(speech, request_id=f"{self.request_id}-{name[:40]}")
        voice = {note: told for note, told in speech.notes().items() if note in ("voice", "voice_take")}
        task = self._tasks[name] = self.start(self._speak(name, session, is_first=not self._contexts))
        context = self._contexts[name] = self.kind(name, session, reasons, voice)
        task.add_done_callback(lambda _: self._remove(context))
        return context

    async def cancel(self, name: str) -> None:
        """Stop the context with this name immediately, if the context is open."""
        if name in self._contexts:
            self._tasks[name].cancel()
            await self._end_of(name)

    async def _end_of(self, name: str) -> None:
        if (context := self._contexts.get(name)) is not None:
            await asyncio.wait((self._tasks[name],))
            self._remove(context)

    def _remove(self, context: C) -> None:
        if self._contexts.get(context.name) is context:
            del self._contexts[context.name], self._tasks[context.name]

    async def _speak(self, name: str, session: Session, *, is_first: bool) -> None:
        async def say(event: Event) -> None:
            await self.say_in(self._contexts[name], event)

        try:
            with nullcontext() if is_first else state_of(self.socket).caller.stream():
                await self.pass_on(session, say)
        except Overloaded as error:
            await session.aclose()
            await say(Failed(error))
