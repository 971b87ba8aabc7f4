"""The common part of the routes and sockets of all dialects. A server has one `SpeechService`.

| part | used by |
|---|---|
| `read_body`, `read_fields` | routes that ask for speech, before they make a `SpeechRequest` |
| `resolver` | `strict_request` and `lenient_request`, which make it |
| `begin_utterance` | `respond` (responses/respond.py), and routes that read the chunks of speech themselves |
| `models`, `settings` | routes that list or change them; `resolver` holds the same |
| `opened_by` | routes and sockets of extensions, for what their `open` returned |
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from starlette.requests import HTTPConnection, Request

from serve_app.api.context import state_of
from serve_app.api.headers import TIMING_HEADER
from serve_app.api.parsing.client_input import object_of, read_body
from serve_app.api.request_record import RequestRecord, start_marks
from serve_app.api.resolve.build_utterance import build_utterance
from serve_app.api.resolve.resolver import Draft, Resolver
from serve_app.api.resolve.speech_request import SpeechRequest


class SpeechService:
    """The common path of all dialects to speech, with the same limits, checks and log."""

    def __init__(self, resolver: Resolver, opened: Mapping[str, object]) -> None:
        """`opened`: the states of extensions, by their names."""
        self.resolver, self._opened = resolver, opened
        self.models, self.settings = resolver.models, resolver.settings

    def opened_by(self, extension: str) -> Any:
        """The state that `open` of an extension returned, None if it has none."""
        return self._opened.get(extension)

    async def read_body(self, request: Request) -> bytes:
        """The body of a request for speech. Raises Overloaded if no stream has room, for any body."""
        content = await read_body(request)
        self.models.check_room(state_of(request).caller.name)
        return content

    async def read_fields(self, request: Request) -> dict[str, object]:
        """The JSON object that asks for speech. Raises as `read_body` does, and InvalidRequest."""
        return object_of(request, await self.read_body(request))

    async def begin_utterance(
        self, request: HTTPConnection, speech: SpeechRequest, *, record: RequestRecord | None = None
    ) -> Draft:
        """The utterance of a request, or of a socket's message with its own `record`. Raises InvalidRequest.

        Success has two side effects: the room that the request's body took is free for others, and the record gets the
        utterance's characters, voice and seed.
        """
        state = state_of(request)
        record = record or state.record
        draft = await build_utterance(self.resolver, speech, request_id=record.request_id, client=state.caller.name)
        state.upload.release()
        record.characters += len(speech.body.input)
        tells_timing = self.settings.server_timing or TIMING_HEADER in request.headers
        speed = speech.delivery.speed
        record.note_speech(draft.utterance, speech.info, speech.voice_id, speed=speed, tells_timing=tells_timing)
        return replace(draft, utterance=start_marks(draft.utterance, record.received_ns))
