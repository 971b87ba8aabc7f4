"""What a codec replica has to do: its streams, the frames that wait for a decoder, and its workers. Knows no Ray."""

import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import TypeVar

from deployments import metrics
from deployments.codec.frames import Generate
from deployments.codec.places import Places
from deployments.config import CodecConfig
from deployments.protocol import ALL_FRAMES, FrameChunk, GenerateRequest, PcmChunk, SynthesisRequest

# Of a codec frame, whatever the checkpoint.
FRAME_S = 0.08
# One chunk keeps a core busy for a moment: the mean work over this time counts.
_BUSY_MEMORY_S = 4.0

T = TypeVar("T")
Synthesize = Callable[[SynthesisRequest, Generate], AsyncGenerator[PcmChunk, None]]


@dataclass(slots=True, eq=False)
class _Stream:
    arrived: int = 0  # frames
    decoded: int = 0

    @property
    def waiting(self) -> int:
        return max(0, self.arrived - self.decoded)  # a stream that goes on here brings frames of its own


class CodecLoad:
    """Counts what passes through. All methods belong to one event loop."""

    def __init__(self, config: CodecConfig) -> None:
        self._workers = config.workers
        self._chunk_frames = config.chunk_frames[-1]  # a stream holds these back on purpose: others wait for a worker
        self._places = Places(max_late_s=config.max_late_s)
        self._streams: set[_Stream] = set()
        self._calls = 0  # that decode now
        self._busy_s = 0.0  # of all workers, since the last record
        self._busy_cores = 0.0
        self._counted_s = self._recorded_s = time.monotonic()

    @property
    def lag_s(self) -> float:
        """Audio that has arrived as codes and is not decoded, over all streams."""
        return FRAME_S * sum(stream.waiting for stream in self._streams)

    @property
    def backlog_s(self) -> float:
        """Audio of the frames that would be decoded if there were a worker."""
        return FRAME_S * sum(max(0, stream.waiting - self._chunk_frames) for stream in self._streams)

    async def stream(
        self, synthesize: Synthesize, request: SynthesisRequest, generate: Generate
    ) -> AsyncGenerator[PcmChunk, None]:
        """What `synthesize(request, generate)` yields, counted on its way in and out.

        Decoding of a stream that nobody hears yet begins when there is a place for it. The talker begins at once: its
        pool must see what is asked for, and codes are small.
        """
        counts, place = _Stream(), AsyncExitStack()
        is_heard = request.continues or request.resume is not None

        async def arriving(request: GenerateRequest) -> AsyncGenerator[FrameChunk, None]:
            async with aclosing(generate(request)) as chunks:
                async for chunk in chunks:
                    if len(chunk.codes) and not counts.arrived and request.gpu_frames < ALL_FRAMES:
                        at_once = is_heard or request.gpu_frames > 0  # what a GPU has made of it shall not wait
                        await place.enter_async_context(self._places.take(at_once=at_once))
                    counts.arrived += len(chunk.codes)
                    yield chunk

        self._streams.add(counts)
        try:
            async with place, aclosing(synthesize(request, arriving)) as chunks:
                async for chunk in chunks:
                    counts.decoded += len(chunk.codes)
                    yield chunk
        finally:
            self._streams.discard(counts)
            metrics.codec_lag(self.lag_s)

    async def call(self, decoding: Awaitable[T], deadlines_s: Sequence[float], *, waiting: int) -> T:
        """The outcome of one decode call, while `waiting` other chunks wait for a worker.

        `deadlines_s`: when the listener of each of its chunks needs it, of time.monotonic().
        """
        began_s = time.monotonic()
        self._change_calls(+1)
        try:
            return await decoding
        finally:
            self._change_calls(-1)
            now_s = time.monotonic()
            self._places.decoded(now_s - min(deadlines_s), now_s=now_s)
            metrics.codec_call(now_s - began_s, len(deadlines_s), waiting=waiting, lag_s=self.lag_s)

    def record(self) -> dict[str, float]:
        """The fields of `serve_app.autoscaling.CodecRecord`; `busy_cores` is a moving mean."""
        self._change_calls(0)
        elapsed_s = max(self._counted_s - self._recorded_s, 1e-6)
        weight = 1.0 - math.exp(-elapsed_s / _BUSY_MEMORY_S)
        self._busy_cores += weight * (self._busy_s / elapsed_s - self._busy_cores)
        self._busy_s, self._recorded_s = 0.0, self._counted_s
        return {
            "streams": float(len(self._streams)),
            "starting": float(sum(not stream.arrived for stream in self._streams)),
            "backlog_s": self.backlog_s,
            "busy_cores": self._busy_cores,
            "cores": float(self._workers),
        }

    def _change_calls(self, change: int) -> None:
        now_s = time.monotonic()
        self._busy_s += self._calls * (now_s - self._counted_s)
        self._calls, self._counted_s = self._calls + change, now_s
