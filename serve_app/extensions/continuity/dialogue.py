"""Dialogues: several parts, spoken by different voices, in a single response."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from deployments.protocol import FinishReason, ModelInfo, PcmChunk
from serve_app.api.context import state_of
from serve_app.api.resolve.make_utterance import build_utterance
from serve_app.api.resolve.speech_request import SpeechRequest
from serve_app.api.responses.respond import AudioSource
from serve_app.api.responses.speech_response import OwnFormat
from serve_app.api.speech_service import SpeechService
from serve_app.extensions.word_times.word_times import WordTimes
from serve_app.speech.observers import WordSource
from serve_app.speech.segments import Utterance, segment_seed
from serve_app.text.spoken import SpokenText


async def respond_in_parts(
    service: SpeechService,
    request: Request,
    speech: SpeechRequest,
    own_format: OwnFormat | None,
    parts: Sequence[SpeechRequest],
) -> Response:
    """Respond with the audio of all `parts` of a dialogue. `speech` contains their combined text and the audio format.

    Unlike `respond`, do not regenerate faulty speech. Raises InvalidRequest.
    """
    whole, client = await service.prepare_utterance(request, speech), state_of(request).caller.name
    alone = [replace(part, body=part.body.model_copy(update={"previous_request_id": None})) for part in parts]
    first, *later = [
        await build_utterance(service.resolver, part, request_id=whole.synthesis.request_id, client=client)
        for part in alone
    ]
    first = replace(first.changed(seed=whole.synthesis.seed, tail=whole.synthesis.tail), ignored=whole.ignored)
    first = first.changed(marks=whole.synthesis.marks)
    return _Dialogue(service, speech, as_dialogue([first, *later]), parts).response(request, own_format)


class _Dialogue(AudioSource):
    """Audio source that speaks the parts of a dialogue in order."""

    def __init__(
        self,
        service: SpeechService,
        speech: SpeechRequest,
        utterances: Sequence[Utterance],
        parts: Sequence[SpeechRequest],
    ) -> None:
        super().__init__(service, speech, utterances[0])
        self._utterances, self._parts = utterances, parts

    def words(self) -> WordSource | None:
        first = self._parts[0]
        if not first.word_times:
            return None
        return DialogueTimes([part.spoken for part in self._parts], first.info, speed=first.body.speed)

    def chunks(self, utterance: Utterance) -> AsyncGenerator[PcmChunk, None]:
        """Return the audio of all parts, of which `utterance` is the first."""
        speak = partial(self.service.models.of(utterance).speak, info=self.speech.info)
        return one_after_another(self._utterances, speak)

    def redraw(self, reason: FinishReason | None) -> None:
        """Keep the first attempt."""


Speak = Callable[[Utterance], AsyncGenerator[PcmChunk, None]]


def as_dialogue(utterances: Sequence[Utterance]) -> list[Utterance]:
    """Return the utterances as parts of one dialogue. Mark all but the first as continuations, and derive their seeds
    from the first seed and the part number.
    """
    first, *later = utterances
    return [first] + [
        replace(
            utterance.changed(
                request_id=f"{first.synthesis.request_id}-{number + 1}",
                seed=segment_seed(first.synthesis.seed, number),
                continues=True,
            ),
            may_redraw=first.may_redraw,
        )
        for number, utterance in enumerate(later, start=1)
    ]


async def one_after_another(utterances: Sequence[Utterance], speak: Speak) -> AsyncGenerator[PcmChunk, None]:
    """Yield the audio of all parts. A chunk's `segment` is its part's number, and its `text_positions` refer to the
    text of that part.

    The last chunk's finish reason is the first one other than STOP among the parts, or STOP if there is none.
    """
    num_tokens = 0
    cut_short: FinishReason | None = None
    for number, utterance in enumerate(utterances):
        own_tokens = 0
        is_last = number == len(utterances) - 1
        async with aclosing(speak(utterance)) as chunks:
            async for chunk in chunks:
                own_tokens = chunk.num_text_tokens
                reason = chunk.finish_reason
                if reason is not FinishReason.STOP:
                    cut_short = cut_short or reason
                yield replace(
                    chunk,
                    num_text_tokens=num_tokens + own_tokens,
                    finish_reason=(cut_short or reason) if is_last and reason is not None else None,
                    segment=number,
                )
        num_tokens += own_tokens


class DialogueTimes(WordTimes):
    """Word times for all parts. Times count from the start of the dialogue, and characters from the start of a part."""

    def __init__(self, texts: Sequence[SpokenText], info: ModelInfo, *, speed: float) -> None:
        """`texts` contains the text of each part."""
        super().__init__(texts[0], info, speed=speed)
        self._by_part = [WordTimes(text, info, speed=speed) for text in texts]
        self._number, self._begun_s, self._samples_per_s = 0, 0.0, info.sample_rate * speed

    def feed(self, chunk: PcmChunk) -> None:
        """Process the next chunk of `one_after_another`."""
        if chunk.segment != self._number:
            self._hear_part(replace(chunk.emptied(), finish_reason=FinishReason.STOP))
            self._number, self._begun_s = chunk.segment, self._num_samples / self._samples_per_s
        self._num_samples += chunk.num_samples
        self._hear_part(chunk)

    def _hear_part(self, chunk: PcmChunk) -> None:
        part = self._by_part[self._number]
        part.feed(chunk)
        for word in part.take():
            start_s, end_s = self._begun_s + word.start_s, self._begun_s + word.end_s
            self._finished.append(replace(word, start_s=start_s, end_s=end_s))
