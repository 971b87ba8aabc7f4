"""HTTP response to a `SpeechRequest`, with streamed or complete audio.

Sockets use `Session` instead. A route with another kind of response, such as codec frames, calls
`SpeechService.prepare_utterance` and reads the utterance's chunks itself.
"""

from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from deployments.protocol import FinishReason, PcmChunk
from serve_app.api.context import state_of
from serve_app.api.request_record import Usage
from serve_app.api.resolve.speech_request import SpeechRequest, speech_headers
from serve_app.api.responses.speech_response import (
    OwnFormat,
    SpeechResponse,
    StreamedFormat,
    WholeAttempt,
    WholeFormat,
    WholeResponse,
    audio_body,
    event_body,
)
from serve_app.api.responses.whole_audio import ByteQuota
from serve_app.api.speech_service import SpeechService
from serve_app.speech.observers import WordSource
from serve_app.speech.segments import Utterance


async def respond(
    service: SpeechService, request: Request, speech: SpeechRequest, own_format: OwnFormat | None = None
) -> Response:
    """Return the HTTP response that speaks `speech.body.input`.

    `own_format`: the dialect's own response format. None: audio that is streamed or complete, according to
    `speech.delivery`. If a complete response ends badly, its text is synthesized once more with another seed. Sending
    the response updates the record's `usage`; `RequestContext` then publishes the record. Raises InvalidRequest.
    """
    utterance = await service.prepare_utterance(request, speech)
    return AudioSource(service, speech, utterance).response(request, own_format)


class AudioSource:
    """Audio of one request, streamed or complete."""

    def __init__(self, service: SpeechService, speech: SpeechRequest, utterance: Utterance) -> None:
        self.service, self.utterance = service, utterance
        self.speech = replace(speech, ignored={**speech.ignored, **utterance.ignored})

    def words(self) -> WordSource | None:
        """Return the source of word timestamps, if the request asks for them and an extension provides them."""
        time_words = self.service.resolver.time_words
        if time_words is None or not self.speech.word_times:
            return None
        return time_words(self.speech.spoken, self.speech.info, speed=self.speech.body.speed)

    def chunks(self, utterance: Utterance) -> AsyncGenerator[PcmChunk, None]:
        return self.service.models.of(utterance).speak(utterance, self.speech.info)  # SpeechModel.speak

    def redraw(self, reason: FinishReason | None) -> Utterance | None:
        """Return the second attempt at a complete response, which ended for `reason`, or None to send the first."""
        return self.utterance.redraw(reason)

    def response(self, request: Request, own_format: OwnFormat | None) -> Response:
        """Return the response with this audio. `own_format`: see `respond`."""
        usage, delivery = state_of(request).record.usage, self.speech.delivery
        own_type = {} if own_format is None else {"content-type": own_format.content_type}
        headers = {**speech_headers(delivery, self.speech.info), **self.speech.headers(), **usage.headers(), **own_type}
        if isinstance(own_format, StreamedFormat) or (own_format is None and not delivery.whole):
            times = self.words()
            audio = self._audio(self.utterance, usage, times)
            return SpeechResponse(audio if own_format is None else own_format.make(audio, times), headers, usage=usage)
        return self._whole(usage, headers, own_format, caller=state_of(request).caller.name)

    def _audio(
        self, utterance: Utterance, usage: Usage, times: WordSource | None, quota: ByteQuota | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Return the audio in the requested format, raw or as events. Synthesis starts when it is first read."""
        delivery = self.speech.delivery
        encode = partial(event_body, ignored=self.speech.ignored) if delivery.events else audio_body
        return encode(self.chunks(utterance), delivery.rendering(self.speech.info), usage, times, quota)

    def _whole(self, usage: Usage, headers: dict[str, str], own_format: WholeFormat | None, *, caller: str) -> Response:
        """Return all audio in one body. If synthesis ends badly, repeat it once."""
        quota = ByteQuota(caller)
        quota.expect(self.speech.body, self.speech.delivery, self.speech.info)

        def attempt(utterance: Utterance, usage: Usage) -> WholeAttempt:
            times = self.words()
            audio = self._audio(utterance, usage, times, quota)
            return WholeAttempt(audio, usage, whole=own_format, times=times, discard=partial(self._discard, utterance))

        def redraw() -> WholeAttempt | None:
            second = self.redraw(usage.finish_reason)
            return None if second is None else attempt(second, usage.another(second.synthesis.seed))

        return WholeResponse(attempt(self.utterance, usage), headers, quota=quota, redraw=redraw)

    def _discard(self, utterance: Utterance) -> None:
        for _, hooks in self.service.resolver.hooks:
            hooks.discard(utterance)
