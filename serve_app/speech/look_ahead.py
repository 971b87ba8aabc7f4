"""Prefetches segments to prevent underruns between them."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack
from typing import Any, Self

from deployments.errors import Overloaded
from deployments.protocol import PcmChunk, SynthesisRequest
from serve_app.speech.segments import SECOND_ATTEMPT, Segments, StreamTail, Utterance, segment_seed

# A later segment is prefetched while more than this many seconds of sent audio remain to be played.
_LEAD_S = 1.0
# Retry interval for a later segment that was rejected, and the time after which retries stop.
_RETRY_AFTER_S, _GIVE_UP_AFTER_S = 0.25, 30.0

Synthesize = Callable[[SynthesisRequest], AsyncGenerator[PcmChunk, None]]


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
        """Read chunks until playback is about to reach the segment, at monotonic time `due_s`. Redraw the segment if it
        ends badly.

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
        if not self._ahead or (reason := self._ahead[-1].finish_reason) is None:
            return False
        seed = segment_seed(self._segment.synthesis.seed, SECOND_ATTEMPT)
        if (second := self._segment.redraw(reason, seed=seed)) is not None:
            await self._chunks.aclose()
            self._ahead.clear()
            self._request(second)
        return True

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

    def __init__(self, segments: Segments, open_segment: Callable[[SynthesisRequest], SegmentAudio]) -> None:
        self._segments, self._open_segment = segments, open_segment
        self._next: SegmentAudio | None = None
        self._opened = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._opened.aclose()

    def request_segment(self, request: SynthesisRequest | None) -> None:
        """Request the next segment, unless `request` is None."""
        if request is not None:
            self._next = self._open_segment(request)
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
