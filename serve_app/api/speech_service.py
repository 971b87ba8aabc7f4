"""What every dialect needs: from a `SpeechRequest` to speech, as an HTTP response or as a session."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from deployments.protocol import SynthesisRequest
from serve_app.api.context import state_of
from serve_app.api.headers import TIMING_HEADER
from serve_app.api.records.request_log import RequestRecord, Usage, start_marks
from serve_app.api.requests import ignored_fields
from serve_app.api.requests.build_utterance import build_utterance
from serve_app.api.requests.speech_request import Offer, SpeechRequest, speech_headers
from serve_app.api.responses.speech_response import (
    AnswerAttempt,
    SpeechResponse,
    StreamBody,
    WholeBody,
    WholeResponse,
    audio_body,
    event_body,
)
from serve_app.api.responses.whole_audio import Kept
from serve_app.api.sockets.session import Session
from serve_app.config import ApiSettings
from serve_app.jobs.desk import AskDesk
from serve_app.speech.dialogue import DialogueTimes, as_dialogue, one_after_another
from serve_app.speech.joints import Continuation, Tails
from serve_app.speech.live_text import LiveTexts
from serve_app.speech.model_admissions import ModelAdmissions
from serve_app.speech.segments import Segments, UtteranceRequest
from serve_app.speech.word_times import WordTimes
from serve_app.text.spoken_text import Stretch
from serve_app.visitor import VISITOR
from serve_app.voices.library import Voices
from serve_app.voices.voice_store import StoreFailed

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

    async def ask_jobs(self, what: str, *arguments: object) -> Any:
        """A method of the desk of jobs, on behalf of the caller. Raises as that does."""
        if self.jobs is None:
            raise StoreFailed("This server makes no jobs.")
        return await self.jobs(what, VISITOR.get(), *arguments)

    def segments(self, speech: SpeechRequest) -> list[Stretch]:
        """The parts in which the text will be asked for, each with the silence before it."""
        spoken = speech.spoken
        wanted = spoken.rules.max_segment_chars
        asked = UtteranceRequest(
            SynthesisRequest("", spoken.text), stretches=spoken.stretches, max_segment_chars=wanted
        )
        return Segments.of(asked, speech.info.max_segment_chars).plan()

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
        *,
        parts: Sequence[SpeechRequest] = (),
        make_body: StreamBody | None = None,
        make_whole_body: WholeBody | None = None,
        content_type: str | None = None,
        previous: str = ignored_fields.PREVIOUS,
    ) -> Response:
        """`speech.body.input` over HTTP, or the `parts` of a dialogue, whose form `speech` has.

        It is sent while it is spoken, or whole if there is a `make_whole_body` or `speech.delivery` says so.
        `make_body` and `make_whole_body` make the response's body of audio and words, `content_type` is that body's.
        `previous` is the dialect's name of `previous_request_id`. A text that is sent whole and ends badly is spoken
        again, once, with another seed; a dialogue is not.
        """
        utterance, headers = await self._prepared(request, speech, content_type, previous)
        spoken = await self._dialogue(request, utterance, parts) if parts else [utterance]
        may_retry = utterance.redraws and not utterance.synthesis.ignore_eos and not parts
        usage = state_of(request).record.usage
        if make_whole_body is None and not speech.delivery.whole:
            times = _word_times(parts or [speech])
            audio = self._audio(spoken, speech, usage, times)
            return SpeechResponse(audio if make_body is None else make_body(audio, times), headers, usage=usage)
        kept = Kept(state_of(request).caller.name)
        kept.expect(speech.body, speech.delivery, speech.info)

        def attempt(spoken: Sequence[UtteranceRequest], usage: Usage) -> AnswerAttempt:
            times = _word_times(parts or [speech])
            audio = self._audio(spoken, speech, usage, times, kept)
            drop_tail = partial(self._tails.drop, spoken[0].synthesis)
            return AnswerAttempt(audio, usage, make_whole_body, times, drop_tail=drop_tail)

        def retry() -> AnswerAttempt:
            second = utterance.redrawn(usage.finish_reason)
            return attempt([second], usage.another(second.synthesis.seed))

        return WholeResponse(attempt(spoken, usage), headers, kept=kept, retry=retry if may_retry else None)

    def _audio(
        self,
        parts: Sequence[UtteranceRequest],
        speech: SpeechRequest,
        usage: Usage,
        times: WordTimes | None,
        kept: Kept | None = None,
    ) -> AsyncGenerator[bytes, None]:
        """The parts' audio in the form that was asked for: bare, or as events."""
        speak = partial(self.models.of(parts[0]).speak, info=speech.info)
        chunks = one_after_another(parts, speak) if len(parts) > 1 else speak(parts[0])
        make = event_body if speech.delivery.events else audio_body
        return make(chunks, speech.delivery.rendering(speech.info), usage, times, kept)

    async def _prepared(
        self, request: Request, speech: SpeechRequest, content_type: str | None, previous: str
    ) -> tuple[UtteranceRequest, dict[str, str]]:
        """The utterance, which goes on from the request before it if that is named, and the response's headers."""
        utterance = await self.make_utterance(request, speech)
        if (previous_id := speech.body.previous_request_id) is not None:
            tail = self._tails.find(utterance.synthesis, previous_id)
            utterance = utterance.changed(tail=tail)
            if tail is None:
                speech = replace(speech, ignored={**speech.ignored, previous: NO_TAIL})
        usage = state_of(request).record.usage
        usage.ignored = ignored_fields.entries(speech.ignored)
        headers = {**speech_headers(speech.delivery, speech.info), **speech.headers(), **usage.headers()}
        return utterance, headers if content_type is None else {**headers, "content-type": content_type}

    async def _dialogue(
        self, request: Request, utterance: UtteranceRequest, parts: Sequence[SpeechRequest]
    ) -> list[UtteranceRequest]:
        """The parts of a dialogue, whose text and first voice `utterance` has."""
        client = state_of(request).caller.name
        whole = utterance.synthesis
        first, *later = [
            await build_utterance(self.offer, part, request_id=whole.request_id, client=client) for part in parts
        ]
        return as_dialogue([first.changed(seed=whole.seed, tail=whole.tail, marks=whole.marks), *later])

    async def make_utterance(
        self, request: HTTPConnection, speech: SpeechRequest, *, record: RequestRecord | None = None
    ) -> UtteranceRequest:
        """The utterance of a request, or of a socket's message with its own `record`. Raises InvalidRequest."""
        record = record or state_of(request).record
        client = state_of(request).caller.name
        asked = await build_utterance(self.offer, speech, request_id=record.request_id, client=client)
        state_of(request).upload.release()
        record.characters += len(speech.body.input)
        record.usage.tells_timing = self.settings.server_timing or TIMING_HEADER in request.headers
        is_timed = record.usage.tells_timing or self.settings.records.stages
        record.note_speech(asked, speech.info, speech.stored, speed=speech.delivery.speed)
        return start_marks(asked, record.received_ns) if is_timed else asked


def _word_times(parts: Sequence[SpeechRequest]) -> WordTimes | None:
    """The words of one text, or of a dialogue's parts, if their times are wanted."""
    body, info = parts[0].body, parts[0].info
    if not body.word_timestamps:
        return None
    texts = [each.spoken for each in parts]
    return DialogueTimes(texts, info, speed=body.speed) if texts[1:] else WordTimes(texts[0], info, speed=body.speed)
