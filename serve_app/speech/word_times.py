"""When each word is heard, and so how much had been said when a listener interrupted.

The talker's attention says how far each frame is in the spoken text; the written word is found through the parts in
which the text became spoken text.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

from deployments.protocol import ModelInfo, PcmChunk
from deployments.voice.live_english import LiveEnglish, TextPart
from serve_app.speech.live_text import TURN_CHARS, LivePlain, LiveText

_WORD = re.compile(r"\S+")
_USUAL_S = 0.3  # of a word whose end is not known yet


@dataclass(frozen=True, slots=True)
class Word:
    """A word as it was written, and when it is heard: seconds of the utterance's audio as it is played."""

    text: str
    start: int  # of its characters in the text that was written
    end: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Spoken:
    """The part of a text that a listener has heard."""

    text_spoken: str
    text_remaining: str
    last_word: str | None


@dataclass(slots=True)
class _Place:
    """A word in the text."""

    start: int
    end: int
    spoken: int  # where its spoken form begins in the spoken text


class WordTimes:
    """Words of one utterance: of a text that is there, or that is still being written."""

    def __init__(self, source: LiveText | str, info: ModelInfo, *, speed: float = 1.0) -> None:
        """`source` may be written further while this follows it. The audio is played `speed` times as fast."""
        self._live = None if isinstance(source, str) else source
        self._text = "" if self._live else str(source)
        self._made = iter(()) if self._live else _parts_of(self._text, info)
        self._parts: list[TextPart] = self._live.parts if self._live else []
        self._num_parts = self._num_written = self._num_spoken = 0  # of the parts that were taken
        self._places: list[_Place] = []
        self._read_to: tuple[float, float] = (0.0, 0.0)  # seconds, characters of the spoken text
        self._starts_s: list[float] = []  # of the words that have begun
        self._num_told = 0
        self._told: list[Word] = []  # not taken yet
        self._speed = speed
        self._sample_rate, self._num_samples, self._is_over = info.sample_rate, 0, False

    @property
    def text(self) -> str:
        return self._live.text if self._live else self._text

    @property
    def are_known(self) -> bool:
        """Whether any word has been found so far: not every model says where it is."""
        return bool(self._starts_s)

    def feed(self, chunk: PcmChunk) -> None:
        """The utterance's next chunk, with which the ends of some words may be known."""
        self._take_parts(max((chars for _, chars in chunk.text_positions), default=-1))
        self._num_samples += len(chunk.pcm) // 2
        for seconds, chars in chunk.text_positions:
            self._hear(seconds, chars)
        if chunk.finish_reason is not None:
            self._is_over = True
        over = len(self._starts_s) if self._is_over else max(0, len(self._starts_s) - 1)
        told, self._num_told = self._num_told, max(self._num_told, over)
        self._told += [self._word(number) for number in range(told, self._num_told)]

    @property
    def has_told(self) -> bool:
        return bool(self._told)

    def take(self) -> list[Word]:
        """The words whose end is known, once each, in order. Where no times are known, none are told."""
        told, self._told = self._told, []
        return told

    def spoken(self, played_s: float) -> Spoken:
        """The text heard once `played_s` of the audio had been played, with words that were said for the most part."""
        number = bisect_right(self._starts_s, played_s * self._speed)
        known = [self._word(index) for index in range(max(0, number - 2), number)]
        if known and (known[-1].start_s + known[-1].end_s) / 2 > played_s:
            known.pop()
        end = known[-1].end if known else 0
        return Spoken(self.text[:end], self.text[end:], known[-1].text if known else None)

    def _hear(self, seconds: float, chars: float) -> None:
        before_s, before = self._read_to
        if seconds <= before_s and before:
            return  # of a frame that was read before
        while len(self._starts_s) < len(self._places) and self._places[len(self._starts_s)].spoken <= chars:
            place = self._places[len(self._starts_s)].spoken
            share = 0.0 if chars <= before else min(1.0, max(0.0, (place - before) / (chars - before)))
            self._starts_s.append(before_s + share * (seconds - before_s))
        self._read_to = seconds, max(chars, before)

    def _word(self, number: int) -> Word:
        place, start_s = self._places[number], self._starts_s[number]
        if number + 1 < len(self._starts_s):
            end_s = self._starts_s[number + 1]
        else:
            end_s = max(start_s, self._num_samples / self._sample_rate) if self._is_over else start_s + _USUAL_S
        text = self.text[place.start : place.end]
        return Word(text, place.start, place.end, start_s / self._speed, end_s / self._speed)

    def _take_parts(self, chars: float) -> None:
        """The times up to the first `chars` characters of the spoken text, and the end of the last word there. Later
        words have time, so that one call makes few of them.
        """
        while (part := self._next_part()) is not None and (self._num_spoken <= chars or not part.written[:1].isspace()):
            self._add(part)
            self._num_written += len(part.written)
            self._num_spoken += len(part.spoken)
            self._num_parts += 1

    def _next_part(self) -> TextPart | None:
        if self._num_parts == len(self._parts) and (made := next(self._made, None)) is not None:
            self._parts.append(made)
        return self._parts[self._num_parts] if self._num_parts < len(self._parts) else None

    def _add(self, part: TextPart) -> None:
        written, spoken = list(_WORD.finditer(part.written)), list(_WORD.finditer(part.spoken))
        places = self._places
        if written and not written[0].start() and places and places[-1].end == self._num_written:  # a word was cut
            places[-1].end += written.pop(0).end()
            spoken = spoken[1:] if part.spoken[:1].strip() else spoken
        for match, begins in zip(written, _begins(written, spoken, len(part.spoken)), strict=True):
            start, end = (self._num_written + place for place in match.span())
            places.append(_Place(start, end, self._num_spoken + begins))


def _begins(written: list[re.Match[str]], spoken: list[re.Match[str]], end: int) -> list[int]:
    """Where the spoken form of each written word begins, of a part whose spoken text ends at `end`.

    Words that are equal on both sides match, from the front and from the end; the words between them share the rest.
    """
    ahead = _num_same(written, spoken)
    behind = min(_num_same(written[::-1], spoken[::-1]), len(written) - ahead, len(spoken) - ahead)
    starts = [match.start() for match in spoken] + [end]
    between, places = len(written) - ahead - behind, len(spoken) - ahead - behind
    middle = [starts[ahead + number * places // between] for number in range(between)]
    return starts[:ahead] + middle + starts[len(spoken) - behind : len(spoken)]


def _num_same(some: list[re.Match[str]], others: list[re.Match[str]]) -> int:
    same = (_letters(one[0]) == _letters(other[0]) for one, other in zip(some, others, strict=False))
    return sum(1 for _ in takewhile(bool, same))


def _letters(word: str) -> str:
    return "".join(filter(str.isalnum, word)).lower()


def _parts_of(text: str, info: ModelInfo) -> Iterator[TextPart]:
    front = LiveEnglish() if info.spoken_form == "english" else LivePlain()
    for start in range(0, len(text), TURN_CHARS):
        yield from front.feed(text[start : start + TURN_CHARS], is_last=False)
    yield from front.feed("", is_last=True)
