"""Compute when each word is spoken in the audio, and what text a listener had heard before an interruption.

The talker assigns each frame a position in the spoken text, from the attention of the alignment head if the model has
one, or else from an estimate. Pieces of written text and its spoken form map this position to the written word.
"""

import re
from bisect import bisect_right
from dataclasses import asdict, dataclass
from itertools import takewhile
from math import inf
from typing import Protocol

from deployments.protocol import FinishReason, ModelInfo, PcmChunk
from serve_app.speech.observers import Word
from serve_app.text.spoken import LEFT_OUT, SpokenPiece, SpokenText

_WORD = re.compile(rf"[^\s{LEFT_OUT}](?:\S*[^\s{LEFT_OUT}])?")
_UNREAD_WORDS = 2  # in complete speech, at most 2.8 tokens remain unread; see docs/reliability.md
_USUAL_S = 0.3  # assumed length of a word until its end is known


class WrittenSoFar(Protocol):
    """Text that is still being written."""

    text: str  # the text as sent
    parts: list[SpokenPiece]  # the same text with its spoken forms


@dataclass(frozen=True, slots=True)
class Spoken:
    """Text of an utterance, split where the listener is."""

    text_spoken: str
    text_remaining: str
    last_word: str | None
    is_estimate: bool = False

    def as_json(self) -> dict[str, object]:
        """Return the fields to add to a message."""
        fields = asdict(self)
        return {**fields, "estimated": True} if fields.pop("is_estimate") else fields


@dataclass(slots=True)
class _Span:
    """Position of a word in the written text, and the start of its spoken form in the spoken text."""

    start: int
    end: int
    spoken: int


class WordTimes:
    """Word times of one utterance, whose text may be complete or still arriving."""

    def __init__(self, source: WrittenSoFar | SpokenText, info: ModelInfo, *, speed: float = 1.0) -> None:
        """`speed` is the playback speed of the audio. Times are estimates unless `info` declares them exact."""
        self._is_estimate = not info.word_times
        self._live = None if isinstance(source, SpokenText) else source
        self._text = source.sent if isinstance(source, SpokenText) else ""
        self._made = source.pieces() if isinstance(source, SpokenText) else iter(())
        self._parts: list[SpokenPiece] = self._live.parts if self._live else []
        self._num_parts = self._num_written = self._num_spoken = 0  # totals of the processed parts
        self._spans: list[_Span] = []
        self._word_end = -1  # end of the last word and attached unspoken text; text from here on belongs to the word
        self._read_to: tuple[float, float] = (0.0, 0.0)  # (seconds, characters of the spoken text)
        self._starts_s: list[float] = []  # start of each word that the frames have reached
        self._num_finished = 0  # number of words with a known end
        self._finished: list[Word] = []  # finished words that `take` has not returned yet
        self._speed = speed
        self._sample_rate, self._num_samples, self._is_over = info.sample_rate, 0, False

    @property
    def text(self) -> str:
        return self._live.text if self._live else self._text

    @property
    def are_known(self) -> bool:
        """Whether any word has a known time. Some models do not report text positions."""
        return bool(self._starts_s)

    def feed(self, chunk: PcmChunk) -> None:
        """Process the utterance's next chunk, which can determine where more words end."""
        self._take_parts(max((chars for _, chars in chunk.text_positions), default=-1))
        self._num_samples += chunk.num_samples
        for seconds, chars in chunk.text_positions:
            self._hear(seconds, chars)
        if chunk.finish_reason is not None:
            self._is_over = True
            if chunk.finish_reason is FinishReason.STOP and self._read_to[0]:
                self._spread_rest()
            self._text = self.text
            self._live, self._parts, self._made = None, [], iter(())  # drop the large source
        over = len(self._starts_s) if self._is_over else max(0, len(self._starts_s) - 1)
        self._finished += [self._word(number) for number in range(self._num_finished, over)]
        self._num_finished = max(self._num_finished, over)

    def take(self) -> list[Word]:
        """Return the words whose ends have become known since the last call, in order."""
        words, self._finished = self._finished, []
        return words

    def spoken(self, played_s: float) -> Spoken:
        """Return the text heard in the first `played_s` seconds. A word counts as heard after half of its duration."""
        number = bisect_right(self._starts_s, played_s * self._speed)
        known = [self._word(index) for index in range(max(0, number - 2), number)]
        if known and (known[-1].start_s + known[-1].end_s) / 2 > played_s:
            known.pop()
        end = known[-1].end if known else 0
        last = known[-1].text if known else None
        return Spoken(self.text[:end], self.text[end:], last_word=last, is_estimate=self._is_estimate)

    def _hear(self, seconds: float, chars: float) -> None:
        before_s, before = self._read_to
        if seconds <= before_s and before:
            return  # the frame already has a text position
        while len(self._starts_s) < len(self._spans) and self._spans[len(self._starts_s)].spoken <= chars:
            begins = self._spans[len(self._starts_s)].spoken
            share = 0.0 if chars <= before else min(1.0, max(0.0, (begins - before) / (chars - before)))
            self._starts_s.append(before_s + share * (seconds - before_s))
        self._read_to = seconds, max(chars, before)

    def _spread_rest(self) -> None:
        """Distribute the rest of complete speech among the words without a text position. The rest begins at the start
        of the last word with a position. With an alignment head, more than _UNREAD_WORDS such words were not spoken.
        """
        self._take_parts(inf)
        begun = len(self._starts_s)
        if not self._is_estimate and len(self._spans) - begun > _UNREAD_WORDS:
            return
        start_s, start = (self._starts_s[-1], self._spans[begun - 1].spoken) if begun else (0.0, 0)
        step_s = max(0.0, self._num_samples / self._sample_rate - start_s) / max(1, self._num_spoken - start)
        self._starts_s += [start_s + (span.spoken - start) * step_s for span in self._spans[begun:]]

    def _word(self, number: int) -> Word:
        span = self._spans[number]
        start_s = self._starts_s[number]
        if number + 1 < len(self._starts_s):
            end_s = self._starts_s[number + 1]
        else:
            end_s = max(start_s, self._num_samples / self._sample_rate) if self._is_over else start_s + _USUAL_S
        text = self.text[span.start : span.end]
        start_s, end_s = start_s / self._speed, end_s / self._speed  # playback time
        return Word(text, span.start, end=span.end, start_s=start_s, end_s=end_s, is_estimate=self._is_estimate)

    def _take_parts(self, chars: float) -> None:
        """Find the words in the first `chars` characters of the spoken text, through the end of the last word.

        Leave later words to later calls, so that each call is short.
        """
        while (part := self._next_part()) is not None and (self._num_spoken <= chars or not part.written[:1].isspace()):
            self._add(part)
            self._num_written += len(part.written)
            self._num_spoken += len(part.spoken)
            self._num_parts += 1

    def _next_part(self) -> SpokenPiece | None:
        if self._num_parts == len(self._parts) and (made := next(self._made, None)) is not None:
            self._parts.append(made)
        return self._parts[self._num_parts] if self._num_parts < len(self._parts) else None

    def _add(self, part: SpokenPiece) -> None:
        if not part.spoken.strip():
            is_within = not any(char.isspace() for char in part.written) and self._word_end == self._num_written
            self._word_end = self._word_end + len(part.written) if is_within else -1
            return
        written = list(_WORD.finditer(part.written))
        spoken = list(_WORD.finditer(part.spoken))
        is_cut = self._word_end == self._num_written
        self._word_end = self._num_written + len(part.written.rstrip()) if not part.written[-1:].isspace() else -1
        if written and not written[0].start() and self._spans and is_cut:
            self._spans[-1].end = self._num_written + written.pop(0).end()
            spoken = spoken[1:] if part.spoken[:1].strip() else spoken
        for match, begins in zip(written, _begins(written, spoken, len(part.spoken)), strict=True):
            start, end = (self._num_written + offset for offset in match.span())
            self._spans.append(_Span(start, end, spoken=self._num_spoken + begins))


def _begins(written: list[re.Match[str]], spoken: list[re.Match[str]], end: int) -> list[int]:
    """Return the start of the spoken form of each written word, in a part whose spoken text ends at `end`.

    Pair equal words at the start and at the end of both texts. Distribute the spoken words between these pairs evenly
    among the written words between the pairs.
    """
    ahead = _num_same(written, spoken)
    behind = min(_num_same(written[::-1], spoken[::-1]), len(written) - ahead, len(spoken) - ahead)
    starts = [match.start() for match in spoken] + [end]
    num_written = len(written) - ahead - behind
    num_spoken = len(spoken) - ahead - behind
    middle = [starts[ahead + number * num_spoken // num_written] for number in range(num_written)]
    return starts[:ahead] + middle + starts[len(spoken) - behind : len(spoken)]


def _num_same(left: list[re.Match[str]], right: list[re.Match[str]]) -> int:
    same = (_letters(a[0]) == _letters(b[0]) for a, b in zip(left, right, strict=False))
    return sum(1 for _ in takewhile(bool, same))


def _letters(word: str) -> str:
    return "".join(filter(str.isalnum, word)).lower()
