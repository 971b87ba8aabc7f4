"""From a `SpeechRequest` to the HTTP response that speaks it: streamed or whole, a text or a dialogue.

A socket does not come here: it has a `Session`. A route that makes no such response, as that of codec frames, begins
with `SpeechService.begin_utterance` and reads the utterance's chunks itself.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.context import state_of
from serve_app.api.request_record import Usage
from serve_app.api.resolve.build_utterance import build_utterance
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
from serve_app.extensions.continuity.dialogue import DialogueTimes, as_dialogue, one_after_another
from serve_app.extensions.word_times.word_times import WordTimes
from serve_app.speech.segments import Utterance, count_redraw

NO_TAIL = "no finished request of yours in this voice that is kept has this id"


async def respond(
    service: SpeechService,
    request: Request,
    speech: SpeechRequest,
    answer: StreamedAnswer | WholeAnswer | None = None,
    *,
    parts: Sequence[SpeechRequest] = (),
) -> Response:
    """`speech.body.input` over HTTP, or the `parts` of a dialogue, whose form `speech` has.

    `answer`: the dialect's own. None: the audio, sent while it is spoken, or whole if `speech.delivery` says so. A text
    that is sent whole and ends badly is spoken again, once, with another seed; a dialogue is not.
    Raises InvalidRequest.

    The response counts in the record's `usage` while it is sent. `RequestContext` publishes the record after it.
    """
    utterance = await service.begin_utterance(request, speech)
    utterance, speech = _continued(service, utterance, speech)
    usage = state_of(request).record.usage
    own_type = {} if answer is None else {"content-type": answer.content_type}
    headers = {**speech_headers(speech.delivery, speech.info), **speech.headers(), **usage.headers(), **own_type}
    utterances = await _dialogue(service, request, utterance, parts) if parts else [utterance]
    source = _AudioSource(service, speech, utterances, parts)
    if isinstance(answer, StreamedAnswer) or (answer is None and not speech.delivery.whole):
        times = source.word_times()
        audio = source.audio(utterances, usage, times)
        return SpeechResponse(audio if answer is None else answer.make(audio, times), headers, usage=usage)
    return source.whole(usage, headers, answer, caller=state_of(request).caller.name)


def _continued(service: SpeechService, utterance: Utterance, speech: SpeechRequest) -> tuple[Utterance, SpeechRequest]:
    """The utterance, which goes on from the request that `previous_request_id` names. If none is kept, the speech
    request says so.
    """
    if (previous_id := speech.body.previous_request_id) is None:
        return utterance, speech
    tail = service.tails.find(utterance.synthesis, previous_id)
    if tail is None:
        speech = replace(speech, ignored={**speech.ignored, speech.previous_field: NO_TAIL})
    return utterance.changed(tail=tail), speech


async def _dialogue(
    service: SpeechService, request: Request, utterance: Utterance, parts: Sequence[SpeechRequest]
) -> list[Utterance]:
    """The parts of a dialogue, whose text and first voice `utterance` has."""
    client = state_of(request).caller.name
    opening = utterance.synthesis
    first, *later = [
        await build_utterance(service.offer, part, request_id=opening.request_id, client=client) for part in parts
    ]
    return as_dialogue([first.changed(seed=opening.seed, tail=opening.tail, marks=opening.marks), *later])


@dataclass(frozen=True, slots=True)
class _AudioSource:
    """Makes the audio of one request, streamed or whole."""

    service: SpeechService
    speech: SpeechRequest
    utterances: Sequence[Utterance]  # one, or those of a dialogue
    parts: Sequence[SpeechRequest]  # of a dialogue

    def word_times(self) -> WordTimes | None:
        """The words of one text, or of a dialogue's parts, if their times are wanted."""
        parts = self.parts or [self.speech]
        body, info = parts[0].body, parts[0].info
        if not body.word_timestamps:
            return None
        texts = [part.spoken for part in parts]
        dialogue = len(texts) > 1
        return DialogueTimes(texts, info, speed=body.speed) if dialogue else WordTimes(texts[0], info, speed=body.speed)

    def audio(
        self, utterances: Sequence[Utterance], usage: Usage, times: WordTimes | None, quota: ByteQuota | None = None
    ) -> AsyncGenerator[bytes, None]:
        """The audio of the utterances in the form that was asked for: bare, or as events. Nothing of it runs yet."""
        delivery, info = self.speech.delivery, self.speech.info
        speak = partial(self.service.models.of(utterances[0]).speak, info=info)  # SpeechModel.speak
        chunks = one_after_another(utterances, speak) if len(utterances) > 1 else speak(utterances[0])
        encode = partial(event_body, ignored=self.speech.ignored) if delivery.events else audio_body
        return encode(chunks, delivery.rendering(info), usage, times, quota)

    def whole(self, usage: Usage, headers: dict[str, str], answer: WholeAnswer | None, *, caller: str) -> WholeResponse:
        """All audio in one body. A text, not a dialogue, is spoken again, once, if it ended badly."""
        first = self.utterances[0]
        quota = ByteQuota(caller)
        quota.expect(self.speech.body, self.speech.delivery, self.speech.info)

        def attempt(utterances: Sequence[Utterance], usage: Usage) -> AnswerAttempt:
            times = self.word_times()
            audio = self.audio(utterances, usage, times, quota)
            drop_tail = partial(self.service.tails.drop, utterances[0].synthesis)
            return AnswerAttempt(audio, usage, whole=answer, times=times, drop_tail=drop_tail)

        def redraw() -> AnswerAttempt:
            count_redraw(first.synthesis, usage.finish_reason)
            second = first.second_attempt()
            return attempt([second], usage.another(second.synthesis.seed))

        may_redraw = first.may_redraw and not self.parts
        return WholeResponse(
            attempt(self.utterances, usage), headers, quota=quota, redraw=redraw if may_redraw else None
        )
