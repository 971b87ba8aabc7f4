"""A dialogue: parts of several voices, spoken one after the other as one utterance."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from deployments.protocol import FinishReason, ModelInfo, PcmChunk
from serve_app.extensions.word_times.word_times import WordTimes
from serve_app.speech.segments import Utterance, segment_seed
from serve_app.text.spoken import SpokenText

Speak = Callable[[Utterance], AsyncGenerator[PcmChunk, None]]


def as_dialogue(utterances: Sequence[Utterance]) -> list[Utterance]:
    """The same utterances as parts of one dialogue: later ones continue speech that is being heard. Their seeds follow
    from the first one's and their number.
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
    """The audio of all parts. A chunk's `segment` is the number of its part, its `text_positions` are of that part.

    The finish reason comes with the very last chunk; it is the first other than STOP that any part had.
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
    """The words of all parts: their times count from the beginning of the first part, their characters in their own."""

    def __init__(self, texts: Sequence[SpokenText], info: ModelInfo, *, speed: float) -> None:
        """`texts` has the text of each part."""
        super().__init__(texts[0], info, speed=speed)
        self._by_part = [WordTimes(text, info, speed=speed) for text in texts]
        self._number, self._begun_s, self._samples_per_s = 0, 0.0, info.sample_rate * speed

    def feed(self, chunk: PcmChunk) -> None:
        """The next chunk of `one_after_another`."""
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
