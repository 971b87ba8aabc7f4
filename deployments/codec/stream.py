"""One stream through the codec: frames are read ahead, cut into chunks, decoded, and leave as PCM with their codes."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

from deployments.codec.batcher import Decoded, DecodeJob
from deployments.codec.chunking import ChunkPlan
from deployments.codec.playback import PlaybackClock
from deployments.codec.silence import LeadingSilence
from deployments.codec.state import DecoderState
from deployments.errors import EngineError
from deployments.protocol import Codes, FinishReason, FrameChunk, PcmChunk

Decode = Callable[[DecodeJob], Awaitable[Decoded]]


class FrameBuffer:
    """Frames of one stream, read ahead by a task of its own: codes are small, so the talker never waits for us."""

    def __init__(self, chunks: AsyncGenerator[FrameChunk, None], first: Codes | None = None) -> None:
        """`first` are frames that exist already, before those that `chunks` brings."""
        self._chunks = chunks
        self._frames: list[Codes] = [] if first is None else list(first)
        self._num_code_groups = 0
        self._changed = asyncio.Event()
        self._error: Exception | None = None
        self._reading: asyncio.Task[None] | None = None
        self.num_text_tokens = 0
        self.finish_reason: FinishReason | None = None

    async def __aenter__(self) -> Self:
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._reading is not None
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading
        await self._chunks.aclose()

    @property
    def available(self) -> int:
        """Frames that can be taken now."""
        return len(self._frames)

    @property
    def ended(self) -> bool:
        """Whether no frame will come behind those available; raises what ended the stream once those are taken."""
        if self._error is not None and not self._frames:
            raise self._error
        return self.finish_reason is not None or self._error is not None

    def take(self, count: int) -> Codes:
        """The next `count` frames, [count, num_code_groups]; there may be none."""
        taken, self._frames = self._frames[:count], self._frames[count:]
        return np.stack(taken) if taken else np.zeros((0, self._num_code_groups), dtype=np.int16)

    async def wait(self, timeout_s: float | None) -> None:
        """Return when something has arrived, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        self._changed.clear()

    async def _read(self) -> None:
        try:
            async for chunk in self._chunks:
                self._frames.extend(chunk.codes)
                self._num_code_groups = chunk.codes.shape[1]
                self.num_text_tokens = max(self.num_text_tokens, chunk.num_text_tokens)
                self.finish_reason = chunk.finish_reason
                self._changed.set()
            if self.finish_reason is None:
                raise EngineError("the talker's frames end without a reason: speech may be missing")
        except Exception as error:
            self._error = error
        self._changed.set()


@dataclass(frozen=True, slots=True)
class Start:
    """Where decoding begins: at a stream's first frame, or behind what its listener has."""

    state: DecoderState
    undelivered: Codes | None = None  # frames whose audio is missing though whoever asks has their codes
    position: int = 0  # of the state, in samples
    skipped: int = 0  # samples from there on that were delivered


class StreamDecoder:
    """Decodes one stream. The decoder's state is a local variable of `run`: leaving it leaves nothing behind."""

    def __init__(self, decode: Decode, plan: ChunkPlan, silence: LeadingSilence | None, *, sample_rate: int) -> None:
        self._decode, self._plan, self._silence = decode, plan, silence
        self._sample_rate = sample_rate
        self._clock = PlaybackClock()

    async def run(self, chunks: AsyncGenerator[FrameChunk, None], start: Start) -> AsyncGenerator[PcmChunk, None]:
        """Audio of the frames that `chunks` brings, decoded from `start` on. The last chunk has the finish reason.

        Raises what `chunks` raises, after the audio of the frames before it.
        """
        state, position, skipped = start.state, start.position, start.skipped
        num_known = 0 if start.undelivered is None else len(start.undelivered)
        delivered = position + skipped
        async with FrameBuffer(chunks, start.undelivered) as buffer:
            reason = None
            while reason is None:
                count = await self._next_count(buffer)
                codes = buffer.take(count)
                reason = buffer.finish_reason if buffer.available == 0 else None
                new_codes, num_known = codes[num_known:], max(0, num_known - count)
                if not count:
                    yield PcmChunk(b"", new_codes, buffer.num_text_tokens, reason, delivered)
                    continue
                decoded = await self._decode(
                    DecodeJob(codes=codes, state=state, deadline_s=self._clock.deadline_s(time.monotonic()))
                )
                state, position = decoded.state, position + len(decoded.pcm)
                pcm, skipped = decoded.pcm[skipped:], max(0, skipped - len(decoded.pcm))
                pcm = pcm if self._silence is None else self._silence.trim(pcm)
                if len(pcm):
                    self._clock.deliver(len(pcm) / self._sample_rate, now_s=time.monotonic())
                    delivered = position
                yield PcmChunk(pcm.tobytes(), new_codes, buffer.num_text_tokens, reason, delivered)

    async def _next_count(self, buffer: FrameBuffer) -> int:
        """How many frames to decode next, waiting for them; 0 only behind the last frame."""
        while True:
            ended, lead_s = buffer.ended, self._clock.lead_s(time.monotonic())
            count = self._plan.next_size(buffer.available, ended=ended, lead_s=lead_s)
            if count or ended:
                return count
            await buffer.wait(self._plan.patience_s(lead_s) if buffer.available else None)
