"""Functions that the routes and sockets of all dialects share. A server has one `SpeechService`.

| part | used by |
|---|---|
| `read_body`, `read_fields` | routes for speech, before they build a `SpeechRequest` |
| `resolver` | routes and sockets of all dialects, to build the `SpeechRequest` |
| `prepare_utterance` | `respond` (responses/respond.py), and routes that read the chunks of speech themselves |
| `models`, `settings` | routes that list or change them; `resolver` refers to the same objects |
| `opened_by` | routes and sockets of extensions, to get the result of their `open` |
"""

from collections.abc import Mapping
from typing import Any

from starlette.requests import HTTPConnection, Request

from serve_app.api.context import state_of
from serve_app.api.headers import TIMING_HEADER
from serve_app.api.parsing.client_input import object_of, read_body
from serve_app.api.request_record import RequestRecord, start_marks
from serve_app.api.resolve.make_utterance import build_utterance
from serve_app.api.resolve.resolver import Resolver
from serve_app.api.resolve.speech_request import SpeechRequest
from serve_app.speech.segments import Utterance


class SpeechService:
    """The common path from all dialects to speech, with shared limits, checks and logs."""

    def __init__(self, resolver: Resolver, opened: Mapping[str, object]) -> None:
        """Create the service. `opened`: states of extensions, by extension name."""
        self.resolver, self._opened = resolver, opened
        self.models, self.settings = resolver.models, resolver.settings

    def opened_by(self, extension: str) -> Any:
        """Return the state that the extension's `open` returned, or None."""
        return self._opened.get(extension)

    async def read_body(self, request: Request) -> bytes:
        """Read a speech request's body. Raises Overloaded if the stream limit is reached."""
        content = await read_body(request)
        self.models.check_room(state_of(request).caller.name)
        return content

    async def read_fields(self, request: Request) -> dict[str, object]:
        """Read a speech request's JSON object. Raises the errors of `read_body`, and InvalidRequest."""
        return object_of(request, await self.read_body(request))

    async def prepare_utterance(
        self, request: HTTPConnection, speech: SpeechRequest, *, record: RequestRecord | None = None
    ) -> Utterance:
        """Build the utterance for a request, or for a socket message that has its own `record`. Raises InvalidRequest.

        On success, releases the upload slot of the request's body, and adds the utterance's characters, voice and seed
        to the record.
        """
        state = state_of(request)
        record = record or state.record
        utterance = await build_utterance(self.resolver, speech, request_id=record.request_id, client=state.caller.name)
        state.upload.release()
        record.characters += len(speech.body.input)
        record.usage.tells_timing = self.settings.server_timing or TIMING_HEADER in request.headers
        record.note_speech(utterance, speech.info, stored=speech.voice.stored, speed=speech.delivery.speed)
        return start_marks(utterance, record.received_ns)
