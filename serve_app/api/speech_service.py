"""What the routes and sockets of all dialects share. A server has one `SpeechService`, and each of them is given it.

| part | who uses it |
|---|---|
| `read_body`, `read_fields` | routes that ask for speech, before they make a `SpeechRequest` |
| `offer` | `strict_request` and `lenient_request`, which make it |
| `begin_utterance` | `respond` (responses/respond.py), and routes that read the chunks of speech themselves |
| `session`, `continuation` | sockets |
| `models`, `settings`, `voices` | routes that list or change them; `offer` holds the same |
| `opened` | routes of an extension, for what its `open` returned |
| `tails` | `respond`, and `continuation` |
"""

from collections.abc import Mapping

from starlette.requests import HTTPConnection, Request

from serve_app.api.context import state_of
from serve_app.api.headers import TIMING_HEADER
from serve_app.api.parsing.client_input import object_of, read_body
from serve_app.api.request_record import RequestRecord, start_marks
from serve_app.api.resolve.build_utterance import build_utterance
from serve_app.api.resolve.speech_request import Offer, SpeechRequest
from serve_app.config import ApiSettings
from serve_app.extensions.continuity.joints import Continuation, Tails
from serve_app.extensions.live.live_text import LiveTexts
from serve_app.extensions.live.session import Session
from serve_app.extensions.voices.library import Voices
from serve_app.speech.segments import Utterance
from serve_app.speech.speech_models import SpeechModels


class SpeechService:
    """What every dialect goes through to speech: limits, checks and the log are the same for all of them."""

    def __init__(
        self,
        models: SpeechModels,
        settings: ApiSettings,
        *,
        live_texts: LiveTexts,
        voices: Voices,
        tails: Tails,
        opened: Mapping[str, object] | None = None,
    ) -> None:
        """`live_texts` holds the texts that are still being written, `voices` the stored voices, `tails` the ends of
        finished requests.
        """
        self.offer = Offer(models, settings, voices)
        self.models, self.settings, self.voices, self.tails = models, settings, voices, tails
        self._live_texts, self.opened = live_texts, opened or {}

    async def read_body(self, request: Request) -> bytes:
        """The body of a request for speech. Raises Overloaded if no stream has room, whatever the body says."""
        content = await read_body(request)
        self.models.check_room(state_of(request).caller.name)
        return content

    async def read_fields(self, request: Request) -> dict[str, object]:
        """The JSON object that asks for speech. Raises as `read_body` does, and InvalidRequest."""
        return object_of(request, await self.read_body(request))

    async def begin_utterance(
        self, request: HTTPConnection, speech: SpeechRequest, *, record: RequestRecord | None = None
    ) -> Utterance:
        """The utterance of a request, or of a socket's message with its own `record`. Raises InvalidRequest.

        An utterance without an error has two side effects. The room that the request's body took is free for others.
        The record has the utterance's characters, voice and seed.
        """
        state = state_of(request)
        record = record or state.record
        utterance = await build_utterance(self.offer, speech, request_id=record.request_id, client=state.caller.name)
        state.upload.release()
        record.characters += len(speech.body.input)
        tells_timing = self.settings.server_timing or TIMING_HEADER in request.headers
        speed = speech.delivery.speed
        record.note_speech(utterance, speech.info, speech.voice_id, speed=speed, tells_timing=tells_timing)
        return start_marks(utterance, record.received_ns)

    def continuation(self) -> Continuation:
        """What the utterances of one conversation go on from."""
        return Continuation(self.tails, joins=self.settings.text.joints)

    def session(
        self,
        connection: HTTPConnection,
        speech: SpeechRequest,
        *,
        request_id: str,
        live: bool = True,
        continuation: Continuation | None = None,
    ) -> Session:
        """Speech of one conversation, while it is written if `live`; see `Session`. `continuation`: of a conversation
        that has several sessions.
        """
        return Session(
            self.offer,
            speech,
            handshake=state_of(connection),
            request_id=request_id,
            continuation=continuation or self.continuation(),
            live_texts=self._live_texts if live else None,
        )
