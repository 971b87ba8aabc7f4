"""Long texts: their segments are spoken one after the other, without a gap."""

import asyncio
import hashlib
import re
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Any

import numpy as np

from deployments.errors import Overloaded
from deployments.listener import Listener, ReaderWatch
from deployments.protocol import FinishReason, ModelInfo, PcmChunk, Reading, Stretch, SynthesisRequest
from serve_app.audio.formats import Filter
from serve_app.speech.detection import detected
from serve_app.speech.joints import SpokenEnd
from serve_app.speech.redraw import ended_badly, redraw
from serve_app.speech.splitting import split_text
from serve_app.speech.synthesizer import Synthesizer

_SEED_BYTES = 8
# A later segment is heard by the server before it is sent, as long as so much audio is sent and not played.
_LEAD_S = 1.0
# A later segment that is refused is asked for again after each pause, until the patience has ended.
_PAUSE_S, _GIVE_UP_S = 0.25, 30.0
_SPACES = re.compile(r"\s*+")


class Segments:
    """The parts of a text that are spoken one after the other, counted from 0. Here all are known from the start."""

    def __init__(self, text: str, requests: list[SynthesisRequest]) -> None:
        """`text` is all of the spoken text; `requests` has one for each segment."""
        self._text, self._segments = text, requests
        self._pauses_s: dict[int, float] = {}  # in front of segments
        self._speeds: dict[int, float] = {}  # of segments that are faster or slower than the others

    @classmethod
    def of(cls, request: SynthesisRequest, max_chars: int) -> "Segments":
        """The segments of a whole text: none has more than `max_chars` characters, or more than the request wants."""
        max_chars = min(max_chars, request.max_segment_chars or max_chars)
        texts: list[str] = []
        made = cls(request.text, [])
        for stretch in request.stretches or (Stretch(request.text),):
            if stretch.pause_s:
                made._pauses_s[len(texts)] = stretch.pause_s
            parts = split_text(stretch.text, max_chars)
            if stretch.speed != 1:
                made._speeds |= dict.fromkeys(range(len(texts), len(texts) + len(parts)), stretch.speed)
            texts += parts
        made._segments = _requests(replace(request, stretches=(), max_segment_chars=None), texts or [request.text])
        if request.languages:
            made._segments = [_in_its_language(each, request.languages) for each in made._segments]
        return made

    def plan(self) -> list[Stretch]:
        """All of it, with an empty one if a pause ends it."""
        texts = [request.text for request in self._segments]
        texts += [""] * (len(texts) in self._pauses_s)
        return [Stretch(text, self.pause_s(number), self.speed(number)) for number, text in enumerate(texts)]

    @property
    def is_plain(self) -> bool:
        """Whether it is a single segment, spoken as it is."""
        return len(self._segments) == 1 and not self._pauses_s and not self._speeds

    def known_segment(self, number: int) -> SynthesisRequest | None:
        """The request for a segment, None if there is none yet."""
        return self._segments[number] if number < len(self._segments) else None

    async def segment(self, number: int) -> SynthesisRequest | None:
        """The segment that `known_segment` returns once it is known; None after the last one."""
        return self.known_segment(number)

    def is_last(self, number: int) -> bool:
        """Whether it is certain that no segment and no pause follow."""
        return number == len(self._segments) - 1 and number + 1 not in self._pauses_s

    def start(self, number: int) -> int:
        """How many characters of the whole spoken text are before a segment."""
        return segment_start(self._text, [request.text for request in self._segments[:number]])

    def segment_text(self, number: int) -> str:
        """The text of a segment as far as it is known."""
        return self._segments[number].text

    def joined(self, number: int, before: SpokenEnd) -> SynthesisRequest | None:
        """The known segment, going on from the end of the segment `before` if segments are joined."""
        request = self.known_segment(number)
        if request is None or not request.joins:
            return request
        return replace(request, tail=before.tail(self.segment_text(number - 1)))

    def pause_s(self, number: int) -> float:
        """Seconds of silence before a segment, or after the last one."""
        return self._pauses_s.get(number, 0.0)

    def speed(self, number: int) -> float:
        """How fast a segment is played."""
        return self._speeds.get(number, 1.0)

    def leave(self, number: int) -> None:
        """The speech of a segment has ended."""


class LongText:
    """Speaks texts of any length with a synthesizer that takes texts of up to the model's `max_segment_chars`."""

    def __init__(self, synthesizer: Synthesizer, *, model: str = "") -> None:
        """`model` is the name of one of several models."""
        self._synthesizer, self._model = synthesizer, model

    def synthesize(self, request: SynthesisRequest, info: ModelInfo) -> AsyncGenerator[PcmChunk, None]:
        """The audio of one utterance, whatever its length."""
        segments = Segments.of(request, info.max_segment_chars)
        first = segments.known_segment(0)
        assert first is not None, "a text has a segment"
        if not segments.is_plain or request.word_times:
            return self.speak(first, segments, info)
        return self._ask(first, info)

    async def speak(
        self, first: SynthesisRequest, segments: Segments, info: ModelInfo
    ) -> AsyncGenerator[PcmChunk, None]:
        """The audio of all segments in order, beginning with `first`. The next one is asked for as soon as there is
        one and this one begins to sound, or where it joins this one, has ended.

        Sampling options hold for each segment on its own: `max_new_tokens` bounds a segment, not the whole. A request
        that redraws ends where its first segment ends badly and can be made again by the caller. Later ones are made
        again here.
        """
        utterance, number, listener = _Utterance(info), 0, Listener()
        following: _Segment | None = None

        async def leave() -> None:
            if following is not None:
                await following.aclose()

        async with AsyncExitStack() as opened, ReaderWatch(leave) as reader:
            following = self._begin(first, info, opened)
            if pause_s := segments.pause_s(0):
                yield utterance.pause(pause_s)
            while following is not None:
                segment, following = following, None
                utterance.begin(number, segments.start(number), speed=segments.speed(number))
                if number and first.redraws and await segment.hear(listener.due_s):
                    segments.leave(number)
                while (chunk := await segment.next()) is not None:
                    has_failed = first.redraws and utterance.has_failed(chunk)
                    part = await utterance.add(chunk, is_last=segments.is_last(number))
                    if has_failed:
                        yield chunk
                        return
                    if following is None and (segment.end.is_over if first.joins else chunk.pcm):
                        following = self._begin(segments.joined(number + 1, segment.end), info, opened)
                    reader.before_yield()
                    yield part
                    if part.pcm:
                        listener.deliver(part.num_samples / info.sample_rate, now_s=time.monotonic())
                    if await reader.after_yield():
                        following = None  # it is asked for again
                segments.leave(number)
                number += 1
                if following is None and await segments.segment(number) is not None:
                    following = self._begin(segments.joined(number, segment.end), info, opened)
                if pause_s := segments.pause_s(number):
                    yield utterance.pause(pause_s)
            if not utterance.has_ended:  # the end was not known when the last chunk came
                yield utterance.end()

    def _begin(self, request: SynthesisRequest | None, info: ModelInfo, opened: AsyncExitStack) -> "_Segment | None":
        """Asks for the next segment, if there is one."""
        if request is None:
            return None

        def ask_again(reason: FinishReason) -> AsyncGenerator[PcmChunk, None]:
            """With another seed, after an end that is no good one."""
            return self._insist(redraw(request, reason, segment_seed(request.seed, 0), model=self._model), info)

        segment = _Segment(self._ask(request, info), ask_again)
        opened.push_async_callback(segment.aclose)
        return segment

    def _ask(self, request: SynthesisRequest, info: ModelInfo) -> AsyncGenerator[PcmChunk, None]:
        """The audio of a segment."""
        return (self._insist if request.continues else self._synthesizer.synthesize)(request, info)

    async def _insist(self, request: SynthesisRequest, info: ModelInfo) -> AsyncGenerator[PcmChunk, None]:
        """The audio of a later segment, asked for again if it is refused: the segment before it still plays, and
        even a pause is better than an end in the middle.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + _GIVE_UP_S
        while True:
            has_delivered = False
            try:
                async with aclosing(self._synthesizer.synthesize(request, info)) as chunks:
                    async for chunk in chunks:
                        has_delivered = True
                        yield chunk
                return
            except Overloaded:
                if has_delivered or loop.time() >= until_s:
                    raise
            await asyncio.sleep(_PAUSE_S)


class _Utterance:
    """Turns the chunks of segments into chunks of one utterance.

    `num_text_tokens` counts the segments so far. The finish reason comes with the very last chunk; it is the first
    other than STOP that any segment had.
    """

    def __init__(self, info: ModelInfo) -> None:
        self._timeline, self._info = _Timeline(info), info
        self._filter: Filter | None = None  # of a segment that is faster or slower
        self._number = self._tokens_before = self._tokens = 0  # of the current segment, before it, and in it
        self._cut_short: FinishReason | None = None
        self._nothing = PcmChunk(b"", np.zeros((0, info.num_code_groups), np.int16), 0)  # as the last chunk, but empty
        self.has_sound = self.has_ended = False

    def begin(self, number: int, start: int, *, speed: float) -> None:
        """The segment `number` follows, before which the text has `start` characters."""
        self._timeline.begin(start, speed)
        self._filter = Filter(self._info.sample_rate, speed=speed) if speed != 1 else None
        self._number = number
        self._tokens_before += self._tokens
        self._tokens = 0

    def has_failed(self, chunk: PcmChunk) -> bool:
        """Whether the chunk ends the utterance without sound, or ends its first segment badly, and nothing was sent."""
        if chunk.finish_reason is None or self.has_sound:
            return False
        return not chunk.pcm or (self._number == 0 and ended_badly(chunk.finish_reason))

    async def add(self, chunk: PcmChunk, *, is_last: bool) -> PcmChunk:
        """A chunk of the current segment, which is the last one or may have others after it."""
        positions = self._timeline.add(chunk)
        if self._filter is not None:
            chunk = replace(chunk, pcm=await asyncio.to_thread(_filtered, self._filter, chunk))
        self._timeline.deliver(chunk.num_samples)
        self._tokens, self.has_sound = chunk.num_text_tokens, self.has_sound or bool(chunk.pcm)
        if chunk.finish_reason is not FinishReason.STOP:
            self._cut_short = self._cut_short or chunk.finish_reason
        self.has_ended = chunk.finish_reason is not None and is_last
        self._nothing = chunk.emptied()
        return replace(
            chunk,
            num_text_tokens=self._tokens_before + self._tokens,
            finish_reason=(self._cut_short or chunk.finish_reason) if self.has_ended else None,
            text_positions=positions,
            readings=(),
            segment=self._number,
        )

    def pause(self, seconds: float) -> PcmChunk:
        return self._empty(pcm=self._timeline.silence(seconds))

    def end(self) -> PcmChunk:
        return self._empty(finish_reason=self._cut_short or FinishReason.STOP)

    def _empty(self, **fields: Any) -> PcmChunk:
        return replace(self._nothing, num_text_tokens=self._tokens_before + self._tokens, **fields)


class _Timeline:
    """Says when, in the delivered audio of an utterance, its talkers have read which part of its text."""

    def __init__(self, info: ModelInfo) -> None:
        self._sample_rate, self._frame_samples = info.sample_rate, info.frame_samples
        self._start = self._before = self._made = self._delivered = 0  # samples: before the segment, of it, as played
        self._speed = 1.0
        self._dropped: int | None = None  # samples of the segment that were quiet at its start
        self._readings: list[Reading] = []

    def begin(self, start: int, speed: float) -> None:
        """A segment follows, before which the text has `start` characters."""
        self._before += self._delivered
        self._start = start
        self._speed = speed
        self._made = self._delivered = 0
        self._dropped = None
        self._readings = []

    def silence(self, seconds: float) -> bytes:
        samples = int(seconds * self._sample_rate)
        self._before += samples
        return bytes(2 * samples)

    def add(self, chunk: PcmChunk) -> tuple[tuple[float, float], ...]:
        """The chunk's `text_positions`: the middle of each frame that was read. Nothing before the first sound."""
        self._readings += chunk.readings
        self._made += chunk.num_samples
        if chunk.pcm:
            self._dropped = chunk.position - self._made
        if self._dropped is None:
            return ()
        readings, self._readings = self._readings, []
        return tuple(
            (self._seconds(reading.first + number, self._dropped), self._start + chars)
            for reading in readings
            for number, chars in enumerate(reading.chars)
        )

    def deliver(self, num_samples: int) -> None:
        """So many samples were sent, after a change of speed."""
        self._delivered += num_samples

    def _seconds(self, frame: int, dropped: int) -> float:
        samples = self._before + ((frame + 0.5) * self._frame_samples - dropped) / self._speed
        return max(0.0, samples / self._sample_rate)


def _filtered(faster: Filter, chunk: PcmChunk) -> bytes:
    """The chunk's audio at its segment's speed; with the last chunk the rest."""
    pcm = faster.feed(chunk.pcm)
    return pcm + faster.close() if chunk.finish_reason is not None else pcm


class _Segment:
    """One segment's audio. Its first chunk is asked for at once, the others as they are taken."""

    def __init__(self, chunks: AsyncGenerator[PcmChunk, None], again: "_Again") -> None:
        """`again` makes it with another seed."""
        self._chunks, self._again, self.end = chunks, again, SpokenEnd()
        self._read: deque[PcmChunk] = deque()
        self._next: asyncio.Task[PcmChunk | None] | None = self._ask()

    async def next(self) -> PcmChunk | None:
        """The next chunk, None after the last one."""
        if self._read:
            return self._read.popleft()
        if (task := self._next) is None:
            return await self._advance()
        chunk = await task
        self._next = None
        return chunk

    async def hear(self, due_s: float | None) -> bool:
        """Read ahead until its listener soon needs it, by the monotonic clock: if it ends badly, it is made again.

        Returns whether an end was heard: what is written from then on is not of this segment.
        """
        while (task := self._next) is not None:
            left_s = 0.0 if due_s is None else due_s - _LEAD_S - time.monotonic()
            patience_s = max(0.0, left_s) if self._read else None
            await asyncio.wait((task,), timeout=patience_s)
            if not task.done() or task.exception() is not None or (chunk := task.result()) is None:
                return False
            self._read.append(chunk)
            self._next = None if chunk.finish_reason is not None else self._ask()
        if not self._read or (reason := self._read[-1].finish_reason) is None:
            return False
        if reason.is_good:
            return True
        await self._chunks.aclose()
        self._read.clear()
        self._chunks, self.end = self._again(reason), SpokenEnd()
        self._next = self._ask()
        return True

    async def aclose(self) -> None:
        """Cancels the calls that make its audio."""
        task = self._next
        if task is not None:
            task.cancel()
        try:
            if task is not None:
                await asyncio.wait((task,))
        finally:  # also where the waiting task is cancelled; a task that still runs has been cancelled itself
            if task is None or task.done():
                await self._chunks.aclose()

    def _ask(self) -> "asyncio.Task[PcmChunk | None]":
        asking = asyncio.create_task(self._advance())
        asking.add_done_callback(heed)
        return asking

    async def _advance(self) -> PcmChunk | None:
        if (chunk := await anext(self._chunks, None)) is not None:
            self.end.add(chunk)
        return chunk


_Again = Callable[[FinishReason], AsyncGenerator[PcmChunk, None]]


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


def _requests(request: SynthesisRequest, texts: list[str]) -> list[SynthesisRequest]:
    """One for each segment. The first one is the request itself, with its text.

    A later segment continues speech that is being heard. Its id is the request's with its number after it, its seed
    follows from the request's seed and the number: the same request makes the same segments.
    """
    first, *later = texts
    return [replace(request, text=first, following=tuple(later))] + [
        segment_request(replace(request, text=text), number) for number, text in enumerate(later, start=2)
    ]


def _in_its_language(request: SynthesisRequest, languages: tuple[str, ...]) -> SynthesisRequest:
    return replace(request, language=detected(request.text, languages) or request.language, languages=())


def segment_request(request: SynthesisRequest, number: int) -> SynthesisRequest:
    """The request for the segment `number`, 1 for the first, which is `request` itself."""
    if number == 1:
        return request
    seed = segment_seed(request.seed, number)
    return replace(request, request_id=f"{request.request_id}.{number}", seed=seed, continues=True, tail=None)


def segment_seed(seed: int, number: int) -> int:
    """The seed of a later segment, from 2."""
    digest = hashlib.blake2b(f"{seed}.{number}".encode(), digest_size=_SEED_BYTES)
    return int.from_bytes(digest.digest())
