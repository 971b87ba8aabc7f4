"""Long texts: where they may be cut, and their segments, which follow each other without a gap."""

import asyncio
import hashlib
import re
import sys
import unicodedata
from bisect import bisect_right
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from itertools import accumulate

import numpy as np

from deployments.errors import Overloaded
from deployments.playback import Unread
from deployments.protocol import FinishReason, ModelInfo, PcmChunk, Reading, SynthesisRequest
from serve_app.speech.synthesizer import Synthesizer

_SEED_BYTES = 8
# A later segment that is refused is asked for again, as often, until it has taken so long.
_PAUSE_S, _PATIENCE_S = 0.25, 30.0
_CLOSING = "\"')\\]»”’」』）"  # noqa: RUF001
_PARAGRAPH = re.compile(r"\n\s*?\n")
_SENTENCE = re.compile(rf"[.!?؟।]++[{_CLOSING}]*+(?=\s)|[。！？]++[{_CLOSING}]*+")  # noqa: RUF001
_CLAUSE = re.compile(rf"[,;:—][{_CLOSING}]*+(?=\s)|\s[–-](?=\s)|[，、；：]")  # noqa: RUF001
_WORD = re.compile(r"\s(?=\S)")
_SPACE = re.compile(r"\s")
_SPACES = re.compile(r"\s*+")
_NOT_AN_END = re.compile(
    r"(?:\b(?:mr|mrs|ms|dr|prof|st|no|nos|fig|vol|vs|jr|sr|inc|ltd|approx|e\.g|i\.e|u\.s|ca|cf|bzw|z\.b)|\b[a-z])\.$",
    re.I,
)
_LONGEST_ABBREVIATION = 8
_WIDE_WEIGHT = 3  # an ideograph takes about as long to say as three letters


class Segments:
    """The parts of a text that are spoken one after the other, counted from 0. These are all there from the start."""

    def __init__(self, text: str, requests: list[SynthesisRequest]) -> None:
        """`text` is all of the spoken text; `requests` has one for each segment."""
        self._text, self._segments = text, requests

    def known_segment(self, number: int) -> SynthesisRequest | None:
        """The request for a segment, None where there is none yet."""
        return self._segments[number] if number < len(self._segments) else None

    async def segment(self, number: int) -> SynthesisRequest | None:
        """As `known_segment`, waiting for it; None after the last one."""
        return self.known_segment(number)

    def is_last(self, number: int) -> bool:
        """Whether certainly no segment follows, and no pause."""
        return number == len(self._segments) - 1

    def start(self, number: int) -> int:
        """Characters of the whole spoken text before a segment."""
        return segment_start(self._text, [request.text for request in self._segments[:number]])

    def pause_s(self, number: int) -> float:
        """Silence before a segment, or after the last one."""
        return 0.0

    def leave(self, number: int) -> None:
        """The speech of a segment has ended."""


class LongText:
    """Speaks texts of any length, by a synthesizer of texts up to the model's `max_segment_chars`."""

    def __init__(self, synthesizer: Synthesizer) -> None:
        self._synthesizer = synthesizer

    def synthesize(self, request: SynthesisRequest, info: ModelInfo) -> AsyncGenerator[PcmChunk, None]:
        """The audio of one utterance, whatever its length."""
        requests = segment_requests(request, info.max_segment_chars)
        if len(requests) > 1 or request.word_times:
            return self.speak(requests[0], Segments(request.text, requests), info)
        return self._insist(request) if request.continues else self._synthesizer.synthesize(request)

    async def speak(
        self, first: SynthesisRequest, segments: Segments, info: ModelInfo
    ) -> AsyncGenerator[PcmChunk, None]:
        """The audio of all segments in order, beginning with `first`. The next one is asked for as soon as there is
        one, and this one begins to sound.

        Sampling options hold for each segment on its own: `max_new_tokens` bounds a segment, not the whole.
        `num_text_tokens` counts the segments so far. The finish reason comes with the very last chunk; it is the first
        other than STOP that any segment had. A request that redraws ends where its first segment ends unheard.
        """
        tokens_before, cut_short, heard, has_ended, number = 0, None, not first.redraws, False, 0
        following: _Segment | None = None

        async def leave() -> None:
            if following is not None:
                await following.aclose()

        async with AsyncExitStack() as opened, Unread(leave) as unread:
            following = self._begin(first, opened)
            timeline = _Timeline(info)
            if pause_s := segments.pause_s(0):
                codes = np.zeros((0, info.num_code_groups), np.int16)
                yield PcmChunk(timeline.silence(pause_s), codes, 0)
            while following is not None:
                segment, following, tokens = following, None, 0
                timeline.begin(segments.start(number))
                while (chunk := await segment.next()) is not None:
                    if following is None and chunk.pcm:
                        following = self._begin(segments.known_segment(number + 1), opened)
                    tokens, heard = chunk.num_text_tokens, heard or bool(chunk.pcm)
                    if not heard and chunk.finish_reason is not None:
                        yield chunk
                        return
                    if chunk.finish_reason is not FinishReason.STOP:
                        cut_short = cut_short or chunk.finish_reason
                    has_ended = chunk.finish_reason is not None and segments.is_last(number)
                    reason = (cut_short or chunk.finish_reason) if has_ended else None
                    positions = timeline.add(chunk)
                    told = replace(chunk, finish_reason=reason, text_positions=positions, readings=(), segment=number)
                    unread.offer()
                    yield replace(told, num_text_tokens=tokens_before + tokens)
                    if await unread.taken():
                        following = None  # it is asked for again
                    nothing = replace(chunk, pcm=b"", codes=chunk.codes[:0], finish_reason=None, marks=(), readings=())
                segments.leave(number)
                number, tokens_before = number + 1, tokens_before + tokens
                following = following or self._begin(await segments.segment(number), opened)
                if pause_s := segments.pause_s(number):
                    yield replace(nothing, num_text_tokens=tokens_before, pcm=timeline.silence(pause_s))
            if not has_ended:  # the end was not known when the last chunk came
                yield replace(nothing, num_text_tokens=tokens_before, finish_reason=cut_short or FinishReason.STOP)

    def _begin(self, request: SynthesisRequest | None, opened: AsyncExitStack) -> "_Segment | None":
        """Asks for the next segment, if there is one."""
        if request is None:
            return None
        ask = self._insist if request.continues else self._synthesizer.synthesize
        segment = _Segment(ask(request))
        opened.push_async_callback(segment.aclose)
        return segment

    async def _insist(self, request: SynthesisRequest) -> AsyncGenerator[PcmChunk, None]:
        """The audio of a segment whose text is being heard: there is the time that the segment before it still plays,
        and even a pause is better than an end in the middle.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + _PATIENCE_S
        while True:
            begun = False
            try:
                async with aclosing(self._synthesizer.synthesize(request)) as chunks:
                    async for chunk in chunks:
                        begun = True
                        yield chunk
                return
            except Overloaded:
                if begun or loop.time() >= until_s:
                    raise
            await asyncio.sleep(_PAUSE_S)


class _Timeline:
    """When in an utterance's audio, as it is delivered, its talkers have read which part of its text."""

    def __init__(self, info: ModelInfo) -> None:
        self._sample_rate, self._frame_samples = info.sample_rate, info.frame_samples
        self._start = self._before = self._delivered = 0
        self._dropped: int | None = None  # samples of the segment that were quiet at its start
        self._readings: list[Reading] = []

    def begin(self, start: int) -> None:
        """A segment follows, before which the text has `start` characters."""
        self._before += self._delivered
        self._start, self._delivered, self._dropped = start, 0, None
        self._readings = []

    def silence(self, seconds: float) -> bytes:
        samples = int(seconds * self._sample_rate)
        self._before += samples
        return bytes(2 * samples)

    def add(self, chunk: PcmChunk) -> tuple[tuple[float, float], ...]:
        """As `PcmChunk.text_positions`: the middle of each frame that was read. Nothing before the first sound."""
        self._readings += chunk.readings
        self._delivered += len(chunk.pcm) // 2
        if chunk.pcm:
            self._dropped = chunk.position - self._delivered
        if self._dropped is None:
            return ()
        readings, self._readings = self._readings, []
        return tuple(
            (self._seconds(reading.first + number, self._dropped), self._start + chars)
            for reading in readings
            for number, chars in enumerate(reading.chars)
        )

    def _seconds(self, frame: int, dropped: int) -> float:
        samples = self._before + (frame + 0.5) * self._frame_samples - dropped
        return max(0.0, samples / self._sample_rate)


class _Segment:
    """One segment's audio. Its first chunk is asked for at once, the others as they are taken."""

    def __init__(self, chunks: AsyncGenerator[PcmChunk, None]) -> None:
        self._chunks = chunks
        self._first = asyncio.create_task(self._advance())
        self._first.add_done_callback(heed)
        self._begun = False

    async def next(self) -> PcmChunk | None:
        """The next chunk, None after the last one."""
        if self._begun:
            return await self._advance()
        self._begun = True
        return await self._first

    async def aclose(self) -> None:
        """Cancels everything behind it."""
        self._first.cancel()
        try:
            await asyncio.wait((self._first,))
        finally:  # also where the waiting task is cancelled; a task that still runs has been cancelled itself
            if self._first.done():
                await self._chunks.aclose()

    async def _advance(self) -> PcmChunk | None:
        return await anext(self._chunks, None)


def heed(task: "asyncio.Future[PcmChunk | None]") -> None:
    """Reads how a task ended, so that asyncio logs no error of a task that is not awaited any more."""
    if not task.cancelled():
        task.exception()


def segment_start(text: str, before: list[str]) -> int:
    """Where in `text` a segment begins. The segments `before` it follow each other, with whitespace between."""
    start = 0
    for segment in (*before, ""):
        space = _SPACES.match(text, start)
        assert space is not None
        start = space.end() + len(segment)
    return start


def segment_requests(request: SynthesisRequest, max_chars: int) -> list[SynthesisRequest]:
    """The request itself if its text is short enough; else one for each segment.

    A later segment continues speech that is being heard. Its id is the request's with its number after it, its seed
    follows from the request's seed and the number: the same request makes the same segments.
    """
    first, *later = split_text(request.text, max_chars) or [request.text]
    return [replace(request, text=first, following=tuple(later))] + [
        segment_request(replace(request, text=text), number) for number, text in enumerate(later, start=2)
    ]


def segment_request(request: SynthesisRequest, number: int) -> SynthesisRequest:
    """The request for the segment `number`, 1 for the first, which is `request` itself."""
    if number == 1:
        return request
    seed = segment_seed(request.seed, number)
    return replace(request, request_id=f"{request.request_id}.{number}", seed=seed, continues=True)


def segment_seed(seed: int, number: int) -> int:
    """The seed of a later segment, from 2."""
    digest = hashlib.blake2b(f"{seed}.{number}".encode(), digest_size=_SEED_BYTES)
    return int.from_bytes(digest.digest())


def split_text(text: str, max_chars: int) -> list[str]:
    """`text` in parts of at most `max_chars` characters, of which wide ones count three.

    The parts, which neither begin nor end with whitespace, hold every other character in order. Parts end where a
    paragraph does, else a sentence, a clause, a word; only a longer word is cut.
    """
    positions = _positions(text)
    parts, start = [], 0
    while positions[-1] - positions[start] > max_chars:
        limit = max(start + 1, bisect_right(positions, positions[start] + max_chars) - 1)
        end = _best_end(text, start, limit)
        parts.append(text[start:end].strip())
        start = end
    return [part for part in (*parts, text[start:].strip()) if part]


class LiveSplit:
    """Segments of a text that is being spoken while it comes.

    A segment ends with the first sentence whose end is in its second half, or the first clause in its last quarter, or
    else before the word that is too much. Each character is measured once, however the text is cut.
    """

    def __init__(self, max_chars: int) -> None:
        """`max_chars` as in `split_text`."""
        self._max_chars = max_chars
        self._text = ""  # of the segment
        self._given = 0  # characters of it
        self._positions = [0]  # of `_text`
        self._space = self._looked = 0  # its last whitespace; no end of a sentence or clause is before this place

    def feed(self, text: str) -> list[str]:
        """The text that can be spoken now, of the current segment and of later ones."""
        texts = [""]
        for start in range(0, len(text), self._max_chars):
            self._add(text[start : start + self._max_chars])
            while end := self._end():
                texts[-1] += self._take(end)
                texts.append("")
                self.restart()
            texts[-1] += self._take(max(self._reached(3), self._space))
        return texts

    def finish(self) -> list[str]:
        return [self._take(len(self._text))]

    def restart(self) -> None:
        """A segment has ended with the text so far."""
        rest = self._text[self._given :]
        self._text, self._given, self._positions, self._space, self._looked = "", 0, [0], 0, 0
        self._add(rest)

    def _add(self, text: str) -> None:
        text = text if self._given else (self._text + text).lstrip()
        if not self._given:
            self._text, self._positions = "", [0]
        before = len(self._text)
        self._text += text
        self._positions += _positions(text, self._positions.pop())
        self._space = max((match.start() for match in _SPACE.finditer(self._text, before)), default=self._space)

    def _take(self, end: int) -> str:
        start, self._given = self._given, max(self._given, end)
        return self._text[start : self._given]

    def _reached(self, quarters: int) -> int:
        """The last place in the text with so many quarters of a segment, or less, before it."""
        return bisect_right(self._positions, self._max_chars * quarters / 4) - 1

    def _end(self) -> int:
        """Where the segment ends, 0 as long as it may go on."""
        text, (middle, late, limit) = self._text, map(self._reached, (2, 3, 4))
        if middle >= len(text) - 1:
            return 0
        sentences = [end for end in _ends(_SENTENCE, text, self._looked) if end > middle]
        clauses = [end for end in _ends(_CLAUSE, text, self._looked) if end > late]
        first = min(sentences + clauses, default=len(text))
        if first < len(text) and first <= limit:
            return first
        self._looked = self._space
        if self._positions[-1] <= self._max_chars:
            return 0
        words = _ends(_WORD, text, late, limit + 1)
        return words[-1] if words else max(1, limit)


def _positions(text: str, before: int = 0) -> list[int]:
    """The length before each place in `text` and before its end, in narrow characters, after `before` of them."""
    if text.isascii():
        return list(range(before, before + len(text) + 1))
    widths = (_WIDE_WEIGHT if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)
    return list(accumulate(widths, initial=before))


def _best_end(text: str, start: int, limit: int) -> int:
    """Where the part that begins at `start` ends, at `limit` at the latest.

    An end in the first half is only taken between words: parts that are too short sound cut off from each other.
    """
    middle = (start + limit) // 2
    for pattern in (_PARAGRAPH, _SENTENCE, _CLAUSE):
        if good := [end for end in _ends(pattern, text, start, limit + 1) if middle < end <= limit]:
            return good[-1]
    words = _ends(_WORD, text, start, limit + 1)
    return words[-1] if words and words[-1] > start else _hard_end(text, start, limit)


def _ends(pattern: re.Pattern[str], text: str, start: int, stop: int = sys.maxsize) -> list[int]:
    """Where matches of `pattern` within these places end; an abbreviation ends no sentence."""
    ends = [match.end() for match in pattern.finditer(text, start, stop)]
    if pattern is not _SENTENCE:
        return ends
    return [end for end in ends if not _NOT_AN_END.search(text[max(0, end - _LONGEST_ABBREVIATION) : end])]


def _hard_end(text: str, start: int, limit: int) -> int:
    """`limit`, or the place before it that does not tear a character from its accents and joiners."""
    end = limit
    while end > start + 1 and _continues(text, end):
        end -= 1
    return limit if _continues(text, end) else end


def _continues(text: str, position: int) -> bool:
    if position == len(text):
        return False
    return unicodedata.category(text[position])[0] == "M" or "\u200d" in text[position - 1 : position + 1]
