"""What every dialect needs: from a `SpeechRequest` to speech, as an HTTP response or as a session."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from deployments.protocol import SynthesisRequest
from serve_app.api.bodies.client_json import parse_object
from serve_app.api.bodies.http_request import read_body
from serve_app.api.context import state_of
from serve_app.api.headers import TIMING_HEADER
from serve_app.api.records.request_log import RequestRecord, Usage, start_marks
from serve_app.api.requests import ignored_fields
from serve_app.api.requests.build_utterance import build_utterance
from serve_app.api.requests.speech_request import Offer, SpeechRequest, speech_headers
from serve_app.api.responses.speech_response import (
    AnswerAttempt,
    SpeechResponse,
    StreamedBody,
    WholeBody,
    WholeResponse,
    audio_body,
    event_body,
)
from serve_app.api.responses.whole_audio import ByteQuota
from serve_app.api.sockets.session import Session
from serve_app.config import ApiSettings
from serve_app.jobs.desk import AskDesk
from serve_app.speech.dialogue import DialogueTimes, as_dialogue, one_after_another
from serve_app.speech.joints import Continuation, Tails
from serve_app.speech.live_text import LiveTexts
from serve_app.speech.model_admissions import ModelAdmissions
from serve_app.speech.segments import Segments, Utterance
from serve_app.speech.word_times import WordTimes
from serve_app.text.spoken_text import Stretch
from serve_app.visitor import VISITOR
from serve_app.voices.library import Voices
from serve_app.voices.voice_store import NoStore

NO_TAIL = "no finished request of yours in this voice that is kept has this id"


class SpeechService:
    """What every dialect goes through to speech: limits, checks and the log are the same for all of them."""

    def __init__(
        self,
        models: ModelAdmissions,
        settings: ApiSettings,
        *,
        live_texts: LiveTexts,
        voices: Voices,
        tails: Tails,
        jobs: AskDesk | None = None,
    ) -> None:
        """`live_texts` holds the texts that are still being written, `voices` the stored voices, `tails` the ends of
        finished requests.
        """
        self.offer = Offer(models, settings, voices)
        self.models, self.settings, self.live_texts, self.voices = models, settings, live_texts, voices
        self._tails, self.jobs = tails, jobs

    async def ask_jobs(self, method: str, *arguments: object) -> Any:
        """A method of the desk of jobs, on behalf of the caller. Raises as that does."""
        if self.jobs is None:
            raise NoStore("This server makes no jobs.")
        return await self.jobs(method, VISITOR.get(), *arguments)

    async def read_body(self, request: Request) -> bytes:
        """The body of a request for speech. Raises Overloaded if no stream has room, whatever the body says."""
        content = await read_body(request)
        self.models.check_room(state_of(request).caller.name)
        return content

    async def read_fields(self, request: Request) -> dict[str, object]:
        """The JSON object that asks for speech. Raises as `read_body` does, and InvalidRequest."""
        return parse_object(await self.read_body(request))

    def segments(self, speech: SpeechRequest) -> list[Stretch]:
        """The parts in which the text will be asked for, each with the silence before it."""
        spoken = speech.spoken
        max_chars = spoken.rules.max_segment_chars
        utterance = Utterance(
            SynthesisRequest("", spoken.text), stretches=spoken.stretches, max_segment_chars=max_chars
        )
        return Segments.of(utterance, speech.info.max_segment_chars).plan()

    def continuation(self) -> Continuation:
        """What the utterances of one conversation go on from."""
        return Continuation(self._tails, joins=self.settings.text.joints)

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
            asker=state_of(connection),
            request_id=request_id,
            continuation=continuation or self.continuation(),
            live_texts=self.live_texts if live else None,
        )

    async def respond(
        self,
        request: Request,
        speech: SpeechRequest,
        body: StreamedBody | WholeBody | None = None,
        *,
        parts: Sequence[SpeechRequest] = (),
    ) -> Response:
        """`speech.body.input` over HTTP, or the `parts` of a dialogue, whose form `speech` has.

        `body`: the dialect's own. None: the audio, sent while it is spoken, or whole if `speech.delivery` says so. A
        text that is sent whole and ends badly is spoken again, once, with another seed; a dialogue is not.

        The response counts in the record's `usage` while it is sent. `RequestContext` publishes the record after it.
        """
        utterance, ignored = self._continued(await self.begin_utterance(request, speech), speech)
        usage = state_of(request).record.usage
        usage.ignored = ignored_fields.entries(ignored)
        own_type = {} if body is None else {"content-type": body.content_type}
        notes = replace(speech, ignored=ignored).headers() | usage.headers()
        headers = {**speech_headers(speech.delivery, speech.info), **notes, **own_type}
        utterances = await self._dialogue(request, utterance, parts) if parts else [utterance]
        if isinstance(body, StreamedBody) or (body is None and not speech.delivery.whole):
            times = _word_times(parts or [speech])
            audio = self._audio(utterances, speech, usage, times)
            return SpeechResponse(audio if body is None else body.make(audio, times), headers, usage=usage)
        return self._whole(request, speech, utterances, headers, body=body, parts=parts)

    def _whole(
        self,
        request: Request,
        speech: SpeechRequest,
        utterances: Sequence[Utterance],
        headers: dict[str, str],
        *,
        body: WholeBody | None,
        parts: Sequence[SpeechRequest],
    ) -> WholeResponse:
        """All audio in one body. A text, not a dialogue of `parts`, is spoken again, once, if it ended badly."""
        first = utterances[0]
        usage = state_of(request).record.usage
        quota = ByteQuota(state_of(request).caller.name)
        quota.expect(speech.body, speech.delivery, speech.info)

        def attempt(utterances: Sequence[Utterance], usage: Usage) -> AnswerAttempt:
            times = _word_times(parts or [speech])
            audio = self._audio(utterances, speech, usage, times, quota)
            return AnswerAttempt(
                audio, usage, whole=body, times=times, drop_tail=partial(self._tails.drop, utterances[0].synthesis)
            )

        def redraw() -> AnswerAttempt:
            second = first.redrawn(usage.finish_reason)
            return attempt([second], usage.another(second.synthesis.seed))

        redraws = first.redraws and not parts
        return WholeResponse(attempt(utterances, usage), headers, quota=quota, redraw=redraw if redraws else None)

    def _audio(
        self,
        utterances: Sequence[Utterance],
        speech: SpeechRequest,
        usage: Usage,
        times: WordTimes | None,
        quota: ByteQuota | None = None,
    ) -> AsyncGenerator[bytes, None]:
        """The audio of one utterance, or of those of a dialogue, in the form that was asked for: bare, or as events."""
        speak = partial(self.models.of(utterances[0]).speak, info=speech.info)  # Admission.speak
        chunks = one_after_another(utterances, speak) if len(utterances) > 1 else speak(utterances[0])
        body = event_body if speech.delivery.events else audio_body
        return body(chunks, speech.delivery.rendering(speech.info), usage, times, quota)

    def _continued(self, utterance: Utterance, speech: SpeechRequest) -> tuple[Utterance, ignored_fields.Reasons]:
        """The utterance, which goes on from the request that `previous_request_id` names, and the request's fields
        without effect.
        """
        if (previous_id := speech.body.previous_request_id) is None:
            return utterance, speech.ignored
        tail = self._tails.find(utterance.synthesis, previous_id)
        no_tail = {speech.previous_field: NO_TAIL} if tail is None else {}
        return utterance.changed(tail=tail), {**speech.ignored, **no_tail}

    async def _dialogue(
        self, request: Request, utterance: Utterance, parts: Sequence[SpeechRequest]
    ) -> list[Utterance]:
        """The parts of a dialogue, whose text and first voice `utterance` has."""
        client = state_of(request).caller.name
        opening = utterance.synthesis
        first, *later = [
            await build_utterance(self.offer, part, request_id=opening.request_id, client=client) for part in parts
        ]
        return as_dialogue([first.changed(seed=opening.seed, tail=opening.tail, marks=opening.marks), *later])

    async def begin_utterance(
        self, request: HTTPConnection, speech: SpeechRequest, *, record: RequestRecord | None = None
    ) -> Utterance:
        """The utterance of a request, or of a socket's message with its own `record`. Raises InvalidRequest.

        An utterance without an error has two side effects. The room that the request's body took is free for others.
        The record has the utterance's characters, voice and seed, and is shown as a request that is being spoken.
        """
        state = state_of(request)
        record = record or state.record
        utterance = await build_utterance(self.offer, speech, request_id=record.request_id, client=state.caller.name)
        state.upload.release()
        record.characters += len(speech.body.input)
        record.usage.tells_timing = self.settings.server_timing or TIMING_HEADER in request.headers
        record.note_speech(utterance, speech.info, speech.stored, speed=speech.delivery.speed)
        is_timed = record.usage.tells_timing or self.settings.records.stages
        return start_marks(utterance, record.received_ns) if is_timed else utterance


def _word_times(parts: Sequence[SpeechRequest]) -> WordTimes | None:
    """The words of one text, or of a dialogue's parts, if their times are wanted."""
    body, info = parts[0].body, parts[0].info
    if not body.word_timestamps:
        return None
    texts = [part.spoken for part in parts]
    return DialogueTimes(texts, info, speed=body.speed) if texts[1:] else WordTimes(texts[0], info, speed=body.speed)
