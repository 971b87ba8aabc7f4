"""Synthesis of an utterance, with one call per text segment and no gaps between segments."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, Self

from deployments.errors import Overloaded
from deployments.listener import Listener, ReaderTimeout
from deployments.protocol import FinishReason, ModelInfo, PcmChunk, SynthesisRequest
from serve_app.speech.segments import SECOND_ATTEMPT, Segments, StreamTail, Utterance, segment_seed
from serve_app.speech.utterance_assembler import UtteranceAssembler

# A later segment is prefetched while more than this many seconds of sent audio remain to be played.
_LEAD_S = 1.0
# Retry interval for a later segment that was rejected, and the time after which retries stop.
_RETRY_AFTER_S, _GIVE_UP_AFTER_S = 0.25, 30.0

Synthesize = Callable[[SynthesisRequest], AsyncGenerator[PcmChunk, None]]


class Synthesizer(Protocol):
    """Synthesizer for a loaded checkpoint: `ReplicaSynthesizer`, which depends on Ray, or a fake in tests."""

    async def describe(self) -> ModelInfo:
        """Describe the loaded checkpoint. Raises NotReady while the replicas are loading."""
        ...

    def synthesize(self, request: SynthesisRequest, info: ModelInfo) -> AsyncGenerator[PcmChunk, None]:
        """Yield the audio of one segment as it is generated. Closing the generator cancels all of its calls.

        `info` is the result of `describe` for the request's model. Raises InvalidRequest, Overloaded, NotReady,
        ReplicaLost or EngineError at any point.
        """
        ...


class UtteranceSynthesizer:
    """Synthesizer of utterances of any length. The wrapped synthesizer accepts at most `max_segment_chars` per text."""

    def __init__(self, synthesizer: Synthesizer) -> None:
        self._synthesizer = synthesizer

    async def start_utterance(
        self, utterance: Utterance, info: ModelInfo, listener: Listener, *, calls: AsyncExitStack
    ) -> "StartedSpeech":
        """Begin one utterance and read its audio up to the first samples. If the speech ends badly at that point, start
        over once with another seed for all segments.

        `listener`: see `speak_utterance`. `calls` closes all calls that this method makes.
        """
        seed = None
        while True:
            chunks = await calls.enter_async_context(aclosing(self.speak_utterance(utterance, info, listener)))
            started = StartedSpeech(chunks, seed=seed)
            await started.read_start()
            if (second := utterance.redraw(started.reason, is_silent=started.is_silent)) is None:
                return started
            utterance, seed = second, second.synthesis.seed

    def speak_utterance(
        self, utterance: Utterance, info: ModelInfo, listener: Listener
    ) -> AsyncGenerator[PcmChunk, None]:
        """Yield the audio of one utterance, with one call per text segment. If a client that is still writing the text
        pauses, the audio pauses too.

        Later segments are prefetched until `listener` needs their audio. The caller reports sent audio to `listener`.
        A text of one segment skips all of this, unless it has word times: its audio is passed on unchanged.
        """
        if (live := utterance.live_text) is not None:
            chunks = self.speak_segments(utterance.synthesis, live, info, listener, may_redraw=utterance.may_redraw)
            return live.smoothed(chunks, info.sample_rate, listener)
        segments = Segments.of(utterance, info.max_segment_chars)
        first = segments.known_segment(0)
        assert first is not None, "a text has a segment"
        if segments.is_single and not (first.word_times or first.continues):
            return self._synthesizer.synthesize(first, info)
        return self.speak_segments(first, segments, info, listener, may_redraw=utterance.may_redraw)

    async def speak_segments(
        self, first: SynthesisRequest, segments: Segments, info: ModelInfo, listener: Listener, *, may_redraw: bool
    ) -> AsyncGenerator[PcmChunk, None]:
        """Yield the audio of all segments in order. `first` is the request for the first segment, with the utterance's
        own tail and seed. The next segment is requested once it is known and the current segment has audio. A joined
        segment is requested after the current segment has ended.

        Sampling options apply to each segment separately: `max_new_tokens` limits one segment, not the utterance. If
        `may_redraw` is set, speech that ends badly with its first audio stops there, because the caller redraws it.
        Segments after the first audio are redrawn here.
        """
        assembler = UtteranceAssembler(info)
        number = 0  # of the current segment
        synthesize = partial(self._synthesizer.synthesize, info=info)
        look_ahead = LookAhead(segments, synthesize, may_redraw=may_redraw)
        async with look_ahead, ReaderTimeout(look_ahead.cancel_next) as reader:
            look_ahead.request_segment(first)
            if pause_s := segments.pause_s(0):
                yield assembler.silence(pause_s)
            while (segment := look_ahead.pop()) is not None:
                assembler.start_segment(number, segments.start(number), speed=segments.speed(number))
                if may_redraw and assembler.has_audio and await segment.read_ahead(listener.due_s):
                    segments.close_segment(number)
                    await segment.redraw_if_bad()
                while (chunk := await reader.read(segment.next)) is not None:
                    has_failed = may_redraw and assembler.has_failed(chunk)
                    part = await assembler.add(chunk, is_last=segments.is_last(number))
                    if has_failed:
                        yield chunk
                        return
                    look_ahead.request_after(number, segment, chunk)
                    yield part
                segments.close_segment(number)
                number += 1
                await look_ahead.ensure_requested(number, segment)
                if pause_s := segments.pause_s(number):
                    yield assembler.silence(pause_s)
            if not assembler.has_ended:  # the end was not yet known when the last chunk arrived
                yield assembler.end()


class StartedSpeech:
    """Speech that has been read up to its first samples. `next` returns all chunks, including those already read."""

    def __init__(self, chunks: AsyncGenerator[PcmChunk, None], *, seed: int | None = None) -> None:
        """Wrap `chunks`. `seed` is set in the first chunks if it differs from the request's seed."""
        self._chunks, self._seed = chunks, seed
        self._start: deque[PcmChunk] = deque()

    @property
    def is_silent(self) -> bool:
        """Whether the speech ended before any samples."""
        return bool(self._start) and not self._start[-1].pcm

    @property
    def reason(self) -> FinishReason | None:
        return self._start[-1].finish_reason if self._start else None

    async def read_start(self) -> None:
        while not (self._start and self._start[-1].pcm) and (chunk := await anext(self._chunks, None)) is not None:
            self._start.append(chunk if self._seed is None else replace(chunk, seed=self._seed))

    async def next(self) -> PcmChunk | None:
        return self._start.popleft() if self._start else await anext(self._chunks, None)


class SegmentAudio:
    """Audio of one segment. The first chunk is requested immediately, and each later chunk only when it is read.

    If a later segment is rejected, it is requested again: the previous segment is still playing, and a stall is better
    than truncated speech.
    """

    def __init__(self, segment: Utterance, synthesize: Synthesize) -> None:
        """Request the audio of `segment` with `synthesize`."""
        self._synthesize = synthesize
        self._ahead: deque[PcmChunk] = deque()
        self._request(segment)

    def _request(self, segment: Utterance) -> None:
        self._segment, self._requested_s = segment, time.monotonic()
        self._chunks, self._has_begun = self._synthesize(segment.synthesis), False
        self.end = StreamTail()
        self._next: asyncio.Task[PcmChunk | None] | None = self._start_next()

    async def next(self) -> PcmChunk | None:
        """Return the next chunk, or None after the last chunk."""
        if self._ahead:
            return self._ahead.popleft()
        if (task := self._next) is None:
            return await self._read_one()
        chunk = await task
        self._next = None
        return chunk

    async def read_ahead(self, due_s: float | None) -> bool:
        """Read chunks until playback is about to reach the segment, at monotonic time `due_s`.

        Return whether the end of the segment was read. If so, any text written later belongs to the next segment.
        """
        while (task := self._next) is not None:
            left_s = 0.0 if due_s is None else due_s - _LEAD_S - time.monotonic()
            patience_s = max(0.0, left_s) if self._ahead else None
            await asyncio.wait((task,), timeout=patience_s)
            if not task.done() or task.exception() is not None or (chunk := task.result()) is None:
                return False
            self._ahead.append(chunk)
            self._next = None if chunk.finish_reason is not None else self._start_next()
        return bool(self._ahead) and self._ahead[-1].finish_reason is not None

    async def redraw_if_bad(self) -> None:
        """Request the segment once more if its end, which has been read ahead, is bad."""
        seed = segment_seed(self._segment.synthesis.seed, SECOND_ATTEMPT)
        if (second := self._segment.redraw(self._ahead[-1].finish_reason, seed=seed)) is not None:
            await self._chunks.aclose()
            self._ahead.clear()
            self._request(second)

    async def aclose(self) -> None:
        """Cancel the calls that generate the audio."""
        await stop_reading(self._chunks, self._next)

    def _start_next(self) -> "asyncio.Task[PcmChunk | None]":
        reading = asyncio.create_task(self._read_one())
        reading.add_done_callback(retrieve_error)
        return reading

    async def _read_one(self) -> PcmChunk | None:
        while True:
            try:
                chunk = await anext(self._chunks, None)
            except Overloaded:
                is_late = time.monotonic() >= self._requested_s + _GIVE_UP_AFTER_S
                if self._has_begun or is_late or not self._segment.synthesis.continues:
                    raise
                await asyncio.sleep(_RETRY_AFTER_S)
                self._chunks = self._synthesize(self._segment.synthesis)
                continue
            if chunk is not None:
                self._has_begun = True
                self.end.add(chunk)
            return chunk


class LookAhead:
    """Requests each segment while the previous one is being sent. Exiting the context cancels all requests."""

    def __init__(self, segments: Segments, synthesize: Synthesize, *, may_redraw: bool) -> None:
        self._segments, self._synthesize, self._may_redraw = segments, synthesize, may_redraw
        self._next: SegmentAudio | None = None
        self._opened = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._opened.aclose()

    def request_segment(self, request: SynthesisRequest | None) -> None:
        """Request the next segment, unless `request` is None."""
        if request is not None:
            self._next = SegmentAudio(Utterance(request, may_redraw=self._may_redraw), self._synthesize)
            self._opened.push_async_callback(self._next.aclose)

    def request_after(self, number: int, current: SegmentAudio, chunk: PcmChunk) -> None:
        """Request the segment after `number` as soon as this segment has audio. If segments are joined, wait until it
        ends.

        `chunk`: the most recent chunk of the `current` segment.
        """
        if self._next is None and (current.end.is_over if self._segments.joins else chunk.pcm):
            self.request_segment(self._segments.joined(number + 1, current.end))

    async def ensure_requested(self, number: int, before: SegmentAudio) -> None:
        """Wait until the segment `number` is known, then request it. Does nothing if it has already been requested or
        does not exist.
        """
        if self._next is None and await self._segments.segment(number) is not None:
            self.request_segment(self._segments.joined(number, before.end))

    def pop(self) -> SegmentAudio | None:
        """Return the requested segment, which becomes the current segment."""
        segment, self._next = self._next, None
        return segment

    async def cancel_next(self) -> None:
        """Cancel the requested segment because the client has paused. The segment is requested again later."""
        if (segment := self.pop()) is not None:
            await segment.aclose()


async def stop_reading(chunks: AsyncGenerator[PcmChunk, None], reading: "asyncio.Future[Any] | None") -> None:
    """Cancel the task that reads `chunks`, if there is one, and close `chunks`."""
    try:
        if reading is not None:
            reading.cancel()
            await asyncio.wait((reading,))
    finally:  # even if the waiting task is cancelled; a task that is still running has been cancelled
        if reading is None or reading.done():
            await chunks.aclose()


def retrieve_error(task: "asyncio.Future[Any]") -> None:
    """Retrieve a task's error, so that asyncio does not log it as never retrieved."""
    if not task.cancelled():
        task.exception()
