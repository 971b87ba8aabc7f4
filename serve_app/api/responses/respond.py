"""From a `SpeechRequest` to the HTTP response that speaks it: streamed or whole.

A socket does not come here: it has a `Session`. A route that makes no such response, as that of codec frames, begins
with `SpeechService.begin_utterance` and reads the utterance's chunks itself.
"""

from collections.abc import AsyncGenerator, Sequence
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from deployments.protocol import PcmChunk
from serve_app.api.context import state_of
from serve_app.api.request_record import Usage
from serve_app.api.resolve.speech_request import SpeechRequest, speech_headers
from serve_app.api.responses.speech_response import (
    AnswerAttempt,
    SpeechResponse,
    StreamedAnswer,
    WholeAnswer,
    WholeResponse,
    audio_body,
    event_body,
)
from serve_app.api.responses.whole_audio import ByteQuota
from serve_app.api.speech_service import SpeechService
from serve_app.speech.segments import Utterance, count_redraw
from serve_app.speech.words import WordSource


async def respond(
    service: SpeechService, request: Request, speech: SpeechRequest, answer: StreamedAnswer | WholeAnswer | None = None
) -> Response:
    """`speech.body.input` over HTTP.

    `answer`: the dialect's own. None: the audio, streamed or whole by `speech.delivery`. A text
    that is sent whole and ends badly is spoken again, once, with another seed. Raises InvalidRequest.

    The response counts in the record's `usage` while it is sent. `RequestContext` publishes the record after it.
    """
    draft = await service.begin_utterance(request, speech)
    return AudioSource(service, draft.speech, [draft.utterance]).response(request, answer)


class AudioSource:
    """Makes the audio of one request, streamed or whole."""

    may_redraw = True

    def __init__(self, service: SpeechService, speech: SpeechRequest, utterances: Sequence[Utterance]) -> None:
        """`utterances`: one, as `speech` asks for it; a kind of source that speaks several says how."""
        self.service, self.speech, self.utterances = service, speech, utterances

    def words(self) -> WordSource | None:
        """The words of the text, if their times are wanted and an extension knows them."""
        body, time_words = self.speech.body, self.service.resolver.time_words
        if time_words is None or not body.word_timestamps:
            return None
        return time_words(self.speech.spoken, self.speech.info, speed=body.speed)

    def chunks(self, utterances: Sequence[Utterance]) -> AsyncGenerator[PcmChunk, None]:
        [utterance] = utterances
        return self.service.models.of(utterance).speak(utterance, self.speech.info)  # SpeechModel.speak

    def response(self, request: Request, answer: StreamedAnswer | WholeAnswer | None) -> Response:
        """The response that sends it; `answer` as in `respond`."""
        usage, delivery = state_of(request).record.usage, self.speech.delivery
        own_type = {} if answer is None else {"content-type": answer.content_type}
        headers = {**speech_headers(delivery, self.speech.info), **self.speech.headers(), **usage.headers(), **own_type}
        if isinstance(answer, StreamedAnswer) or (answer is None and not delivery.whole):
            times = self.words()
            audio = self._audio(self.utterances, usage, times)
            return SpeechResponse(audio if answer is None else answer.make(audio, times), headers, usage=usage)
        return self._whole(usage, headers, answer, caller=state_of(request).caller.name)

    def _audio(
        self, utterances: Sequence[Utterance], usage: Usage, times: WordSource | None, quota: ByteQuota | None = None
    ) -> AsyncGenerator[bytes, None]:
        """The audio of the utterances in the form that was asked for: bare, or as events. Nothing of it runs yet."""
        delivery = self.speech.delivery
        encode = partial(event_body, ignored=self.speech.ignored) if delivery.events else audio_body
        return encode(self.chunks(utterances), delivery.rendering(self.speech.info), usage, times, quota)

    def _whole(self, usage: Usage, headers: dict[str, str], answer: WholeAnswer | None, *, caller: str) -> Response:
        """All audio in one body, which is spoken again, once, if it ended badly."""
        first = self.utterances[0]
        quota = ByteQuota(caller)
        quota.expect(self.speech.body, self.speech.delivery, self.speech.info)

        def attempt(utterances: Sequence[Utterance], usage: Usage) -> AnswerAttempt:
            times = self.words()
            audio = self._audio(utterances, usage, times, quota)
            return AnswerAttempt(audio, usage, whole=answer, times=times, discard=partial(self._discard, utterances))

        def redraw() -> AnswerAttempt:
            count_redraw(first.synthesis, usage.finish_reason)
            second = first.second_attempt()
            return attempt([second], usage.another(second.synthesis.seed))

        may_redraw = self.may_redraw and first.may_redraw
        return WholeResponse(
            attempt(self.utterances, usage), headers, quota=quota, redraw=redraw if may_redraw else None
        )

    def _discard(self, utterances: Sequence[Utterance]) -> None:
        for discard in self.service.resolver.on_discard:
            discard(utterances[0])
