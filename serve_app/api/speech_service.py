"""What every dialect needs: from a `Wish` to speech, as an HTTP response or as a session."""

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from deployments.errors import InvalidRequest, PayloadTooLarge
from deployments.protocol import ModelInfo, PcmChunk, Stretch, SynthesisRequest
from serve_app.api import ignored_fields
from serve_app.api.client_json import MAX_BODY_BYTES, parse_object
from serve_app.api.context import state_of
from serve_app.api.errors import BodyTooSlow, translate
from serve_app.api.request import build_request
from serve_app.api.request_log import RequestRecord, Usage
from serve_app.api.response import AnswerAttempt, SpeechResponse, WholeResponse, audio_body, event_body, start_marks
from serve_app.api.session import Session
from serve_app.api.whole_answer import Kept
from serve_app.api.wish import Wish, speech_headers
from serve_app.audio.formats import AudioFormat
from serve_app.config import ApiSettings
from serve_app.speech.characters import is_speakable
from serve_app.speech.dialogue import DialogueTimes, in_turns, turns_of
from serve_app.speech.joints import Continuation, Tails
from serve_app.speech.live_text import LiveTexts
from serve_app.speech.models import Models
from serve_app.speech.redraw import draw_seed, redraw
from serve_app.speech.segments import Segments
from serve_app.speech.synthesizer import silence
from serve_app.speech.word_times import WordTimes
from serve_app.voices.library import Voices
from serve_app.voices.record import VISITOR
from serve_app.voices.store import StoreFailed

if TYPE_CHECKING:  # it plans jobs with what is here
    from serve_app.jobs.desk import Jobs

StreamBody = Callable[[AsyncGenerator[bytes, None], WordTimes | None], AsyncGenerator[bytes, None]]
WholeBody = Callable[[bytes, WordTimes | None], Iterable[bytes]]

TIMING_HEADER = "x-server-timing"  # of a request that wants a Server-Timing header
_LONGEST_KEY = 255  # of an Idempotency-Key
BODY_TIMEOUT_S = 30.0  # for a whole body to arrive
NO_TAIL = "no finished request of yours in this voice that is kept has this id"


class SpeechService:
    """What every dialect goes through to speech: limits, checks and the log are the same for all of them."""

    def __init__(
        self,
        models: Models,
        settings: ApiSettings,
        *,
        live_texts: LiveTexts,
        voices: Voices,
        tails: Tails,
        jobs: "Jobs | None" = None,
    ) -> None:
        """`live_texts` holds the texts that are still being written, `voices` the stored voices, `tails` the ends of
        finished requests.
        """
        self.models, self.settings, self.live_texts, self.voices = models, settings, live_texts, voices
        self._tails, self.jobs = tails, jobs

    async def infos(self) -> Sequence[ModelInfo]:
        """All models, the default first. Raises NotReady."""
        return await self.models.infos()

    async def ask_jobs(self, what: str, *arguments: object) -> Any:
        """A method of the desk of jobs, on behalf of the caller. Raises as that does."""
        if self.jobs is None:
            raise StoreFailed("This server makes no jobs.")
        return await self.jobs.call(what, VISITOR.get(), *arguments)

    def segments(self, wish: Wish) -> list[Stretch]:
        """The parts in which the text will be asked for, each with the silence before it."""
        spoken = wish.spoken
        wanted = spoken.rules.max_segment_chars
        asked = SynthesisRequest("", spoken.text, stretches=spoken.stretches, max_segment_chars=wanted)
        return Segments.of(asked, wish.info.max_segment_chars).plan()

    def continuation(self) -> Continuation:
        """What the utterances of one conversation go on from."""
        return Continuation(self._tails, joins=self.settings.text.joints)

    def session(
        self,
        connection: HTTPConnection,
        wish: Wish,
        *,
        request_id: str,
        live: bool = True,
        continuation: Continuation | None = None,
    ) -> Session:
        """Speech of one conversation, while it is written if `live`; see `Session`. `continuation`: of a conversation
        that has several sessions.
        """
        return Session(
            self.models,
            self.settings,
            wish,
            asker=state_of(connection),
            request_id=request_id,
            continuation=continuation or self.continuation(),
            live_texts=self.live_texts if live else None,
            voices=self.voices,
        )

    async def respond(
        self,
        request: Request,
        wish: Wish,
        *,
        turns: Sequence[Wish] = (),
        stream_body: StreamBody | None = None,
        whole_body: WholeBody | None = None,
        content_type: str | None = None,
        previous: str = ignored_fields.PREVIOUS,
    ) -> Response:
        """`wish.body.input` over HTTP, or in its place the `turns` of a dialogue, which have the same form.

        `stream_body` makes the body of audio and words as they come, `whole_body` one of all audio and words;
        `content_type` is that body's. `previous` is the dialect's name of `previous_request_id`.
        """
        utterance = await self.utterance(request, wish)
        if (previous_id := wish.body.previous_request_id) is not None:
            utterance = replace(utterance, tail=self._tails.find(utterance, previous_id))
            if utterance.tail is None:
                wish = replace(wish, ignored={**wish.ignored, previous: NO_TAIL})
        spoken = [utterance] if not turns else await self._turns(request, utterance, turns)
        usage = state_of(request).record.usage
        usage.ignored = ignored_fields.entries(wish.ignored)
        headers = {**speech_headers(wish.delivery, wish.info), **wish.headers()}
        if content_type is not None:
            headers["content-type"] = content_type
        if whole_body is None and not wish.delivery.whole:
            audio, times = self._audio(spoken, turns or [wish], usage)
            return SpeechResponse(audio if stream_body is None else stream_body(audio, times), headers, usage=usage)
        kept = Kept(state_of(request).caller.name)
        kept.expect(wish.body, wish.delivery, wish.info)

        def attempt(spoken: Sequence[SynthesisRequest], usage: Usage) -> AnswerAttempt:
            audio, times = self._audio(spoken, turns or [wish], usage, kept)
            finish = None if whole_body is None else lambda content: whole_body(content, times)
            return AnswerAttempt(audio, usage, finish, forget=partial(self._tails.drop, utterance))

        def retry() -> AnswerAttempt:
            other = redraw(utterance, usage.finish_reason, draw_seed(), model=wish.info.route)
            return attempt([other], Usage(seed=other.seed, ignored=usage.ignored))

        may_retry = utterance.redraws and not utterance.ignore_eos and not turns
        return WholeResponse(attempt(spoken, usage), headers, kept=kept, retry=retry if may_retry else None)

    async def _turns(
        self, request: Request, utterance: SynthesisRequest, turns: Sequence[Wish]
    ) -> list[SynthesisRequest]:
        """The turns of a dialogue, whose text and first voice `utterance` has."""
        client, request_id = state_of(request).caller.name, utterance.request_id
        first, *later = [
            await build_request(turn, self.settings, self.voices, request_id=request_id, client=client)
            for turn in turns
        ]
        return turns_of([replace(first, seed=utterance.seed, tail=utterance.tail, marks=utterance.marks), *later])

    def _audio(
        self,
        spoken: Sequence[SynthesisRequest],
        wishes: Sequence[Wish],
        usage: Usage,
        kept: Kept | None = None,
    ) -> tuple[AsyncGenerator[bytes, None], WordTimes | None]:
        """The body of an answer as it is wished, and its words where they are; of each turn a request and a wish."""
        wish, info = wishes[0], wishes[0].info
        make = event_body if wish.delivery.events else audio_body
        times = None
        if wish.body.word_timestamps:
            texts, speed = [each.spoken for each in wishes], wish.body.speed
            times = DialogueTimes(texts, info, speed=speed) if texts[1:] else WordTimes(texts[0], info, speed=speed)
        chunks = in_turns(spoken, lambda turn: self.chunks(turn, info)) if spoken[1:] else self.chunks(spoken[0], info)
        return make(chunks, wish.delivery.rendering(info), usage, times, kept), times

    async def utterance(
        self, request: HTTPConnection, wish: Wish, *, record: RequestRecord | None = None
    ) -> SynthesisRequest:
        """The utterance of a request, or of a socket's message with its own `record`. Raises InvalidRequest."""
        record = record or state_of(request).record
        client = state_of(request).caller.name
        asked = await build_request(wish, self.settings, self.voices, request_id=record.request_id, client=client)
        state_of(request).upload.release()
        record.begin(
            asked.voice if wish.stored is None else wish.stored.id, wish.info.sample_rate * wish.delivery.speed
        )
        is_timed = self.settings.server_timing or TIMING_HEADER in request.headers
        return start_marks(asked, record.received_ns) if is_timed else asked

    def chunks(self, utterance: SynthesisRequest, info: ModelInfo) -> AsyncGenerator[PcmChunk, None]:
        """The utterance's audio; a moment of silence where its text has nothing to speak."""
        return self.models.synthesize(utterance, info) if is_speakable(utterance.text) else _silent(info)


def idempotency_key(request: Request) -> str | None:
    """Raises InvalidRequest."""
    key = request.headers.get("idempotency-key")
    if key is not None and not 0 < len(key) <= _LONGEST_KEY:
        raise InvalidRequest(f"Idempotency-Key has 1 to {_LONGEST_KEY} characters.", "Idempotency-Key")
    return key


async def read_body(request: Request) -> bytes:
    """The body, given up as soon as it is too large or too slow, whatever its Content-Length says."""
    body, upload = bytearray(), state_of(request).upload
    try:
        async with upload.arriving(BODY_TIMEOUT_S):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise PayloadTooLarge(f"The body is larger than {MAX_BODY_BYTES} bytes.")
                await upload.grow(len(body))
    except TimeoutError:
        if upload.is_stalled:
            raise BodyTooSlow("The body stalled while others waited to send theirs: send it again.") from None
        raise BodyTooSlow(f"The body did not arrive within {BODY_TIMEOUT_S:g} seconds.") from None
    return bytes(body)


async def read_object(request: Request) -> dict[str, object]:
    """The JSON object that is the body. Raises InvalidRequest."""
    return parse_object(await read_body(request))


async def read_speech(request: Request, service: SpeechService) -> dict[str, object]:
    """The JSON object that asks for speech. Raises InvalidRequest, and Overloaded where parsing it would be in vain."""
    content = await read_body(request)
    service.models.check_room(state_of(request).caller.name)
    return parse_object(content)


async def _silent(info: ModelInfo) -> AsyncGenerator[PcmChunk, None]:
    yield silence(info)


async def refuse_handshake(socket: WebSocket, error: Exception, *, reason_header: str | None = None) -> None:
    """Answers the handshake of a WebSocket with a status; `reason_header` says why where clients show a header."""
    reply = translate(error)
    state_of(socket).record.error = reply.code
    response = reply.response()
    if reason_header is not None:
        response.headers[reason_header] = reply.message.encode("ascii", "replace").decode().replace("\n", " ")
    await socket.send_denial_response(response)


def text_of(fields: Mapping[str, object], name: str = "text") -> str:
    """The text of a message or a body. Raises InvalidRequest."""
    text = fields.get(name)
    if not isinstance(text, str):
        raise InvalidRequest(f"{name} is required, as a string.", name, "missing_required_parameter")
    return text


def format_named(param: str, value: str, choices: Mapping[str, AudioFormat]) -> AudioFormat:
    """The format that a dialect names `value`. Raises InvalidRequest with the valid names."""
    if value not in choices:
        raise InvalidRequest(f"{param}: {value[:40]!r} is none of {', '.join(choices)}.", param)
    return choices[value]
