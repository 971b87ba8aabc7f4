"""Decoding of a single stream: reads frames ahead, splits them into chunks, and yields PCM with codes."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Self

import numpy as np

from deployments.codec.batch import Decoded, DecodeTask
from deployments.codec.decoder_state import DecoderState
from deployments.codec.plan import ChunkPlan
from deployments.errors import EngineError
from deployments.listener import Listener
from deployments.protocol import Codes, FrameChunk, Pcm, PcmChunk
from deployments.serving import metrics
from deployments.serving.replica_streams import OutgoingAudio, PendingFrames
from deployments.speech_detection import EndingGuard, LeadingSilence

Decode = Callable[[DecodeTask], Awaitable[Decoded]]

_NO_PCM: Pcm = np.zeros(0, np.int16)


class FrameBuffer(PendingFrames):
    """Buffer for a stream's frames, filled by a separate task. Codes are small, so the talker never has to wait."""

    def __init__(self, chunks: AsyncGenerator[FrameChunk, None], frame_samples: int, first: Codes | None) -> None:
        """Read `chunks` after the frames `first`, as in PendingFrames."""
        super().__init__(frame_samples, first)
        self._chunks = chunks
        self._changed = asyncio.Event()
        self._error: Exception | None = None
        self._reading: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._reading is not None
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading
        await self._chunks.aclose()

    @property
    def ended(self) -> bool:
        """Whether no further frame will arrive. Raises the stream's error after all frames have been taken."""
        if self._error is not None and not self._frames:
            raise self._error
        return self.finish_reason is not None or self._error is not None

    async def wait(self, timeout_s: float | None) -> None:
        """Wait until a chunk, an error or the end has arrived, or until `timeout_s` has passed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):  # wait_for would swallow a cancellation that coincides with it
                await self._changed.wait()
        self._changed.clear()

    async def _read(self) -> None:
        try:
            async for chunk in self._chunks:
                self.add(chunk)
                self._changed.set()
            if self.finish_reason is None:
                raise EngineError("the talker's frames ended without a finish reason, so speech may be missing")
        except Exception as error:
            self._error = error
        self._changed.set()


@dataclass(frozen=True, slots=True)
class DecodingStart:
    """Position at which decoding starts: the stream's first frame, or the end of the samples already delivered."""

    state: DecoderState
    to_recall: Codes | None = None  # delivered frames that are not yet part of `state`
    undelivered: Codes | None = None  # frames whose codes the caller already has, but whose audio is missing
    position: int = 0  # number of delivered samples
    skipped: int = 0  # number of samples of the first frame in `undelivered` that have been delivered
    in_hand_s: float = 0.0  # see `Progress`


class StreamDecoder:
    """Decoder for one stream, beginning at `start`. Holds the decoder's state until `decode_chunks` ends."""

    def __init__(
        self,
        decode: Decode,
        plan: ChunkPlan,
        start: DecodingStart,
        *,
        frame_samples: int,
        sample_rate: int,
        silence: LeadingSilence | None = None,
        guard: EndingGuard | None = None,
        load: Callable[[], int] = lambda: 0,
        background: bool = False,
    ) -> None:
        """`load` returns the number of steps by which to widen chunks. `background` marks a job segment."""
        self._decode, self._plan, self._start, self._load = decode, plan, start, load
        self._silence, self._guard = silence, guard
        self._frame_samples, self._sample_rate = frame_samples, sample_rate
        self._listener = Listener.of(background=background, in_hand_s=start.in_hand_s)
        if start.in_hand_s and not background:
            plan.skip(start.position // frame_samples)
        self._state = start.state
        self._to_recall = [] if start.to_recall is None else list(start.to_recall)  # frames not included in `_state`

    async def decode_chunks(
        self, chunks: AsyncGenerator[FrameChunk, None], *, gpu_frames: int = 0
    ) -> AsyncGenerator[PcmChunk, None]:
        """Yield the audio of the frames from `chunks`. The last chunk has the finish reason of `chunks` or the guard.

        Takes the audio of the first `gpu_frames` frames from `chunks`, and meanwhile computes the state after them.
        Raises the errors of `chunks` after yielding the audio of all earlier frames.
        """
        skipped, undelivered = self._start.skipped, self._start.undelivered
        num_known, reason = 0 if undelivered is None else len(undelivered), None
        async with FrameBuffer(chunks, self._frame_samples, undelivered) as buffer:
            audio = OutgoingAudio(buffer, self._silence, self._guard, position=self._start.position)
            if gpu_frames:
                async with aclosing(self._forward(buffer, audio, gpu_frames)) as forwarded:
                    async for chunk in forwarded:
                        reason = chunk.finish_reason
                        yield chunk
            elif self._to_recall:
                self._state = await self._recall(np.stack(self._to_recall), 0.0)
            while reason is None:
                count = await self._next_count(buffer)
                codes = buffer.take(count)
                new_codes, num_known = codes[num_known:], max(0, num_known - len(codes))
                pcm = (await self._decoded(codes, count))[skipped:] if count else _NO_PCM
                skipped = max(0, skipped - len(codes) * self._frame_samples)
                chunk = self._count_delivered(audio.chunk(new_codes, pcm, buffer.end_reason))
                reason = chunk.finish_reason
                if count and not self._listener.has_begun:
                    self._plan.restart()  # no sound yet; a wider chunk would delay the first sound
                yield chunk

    async def _decoded(self, codes: Codes, count: int) -> Pcm:
        """Return the audio of `codes` from a call of `count` frames, which pads `codes` at the end of a stream."""
        deadline_s = self._listener.deadline_s(time.monotonic())
        padded = np.pad(codes, ((0, count - len(codes)), (0, 0)), mode="edge")
        task = DecodeTask(padded, self._state, deadline_s, stalled_s=self._listener.stalled_s)
        decoded = await self._decode(task)
        self._state = decoded.state
        pcm = decoded.pcm[: len(codes) * self._frame_samples]
        metrics.DECODED.record(len(pcm) / self._sample_rate, pool="codec")
        return pcm

    def _count_delivered(self, chunk: PcmChunk) -> PcmChunk:
        if chunk.pcm:
            self._listener.deliver(chunk.num_samples / self._sample_rate, now_s=time.monotonic())
        return chunk

    async def _forward(
        self, buffer: FrameBuffer, audio: OutgoingAudio, gpu_frames: int
    ) -> AsyncGenerator[PcmChunk, None]:
        """Yield the talker's audio as it arrives.

        Once all its codes have arrived, the decoder's state is recalled in parallel.
        """
        received: list[Codes] = []  # frames whose audio has arrived
        recall: asyncio.Task[DecoderState] | None = None
        reason = None
        try:
            while (missing := gpu_frames - len(received)) and reason is None:
                if recall is None and buffer.available >= missing:
                    ahead_s = missing * self._frame_samples / self._sample_rate
                    codes = np.stack([*self._to_recall, *received, *buffer.peek(missing)])
                    recall = asyncio.create_task(self._recall(codes, ahead_s))
                codes, pcm = buffer.take_audio()
                metrics.DECODED.record(len(pcm) / self._sample_rate, pool="talker")
                received.extend(codes)
                reason = buffer.end_reason
                if not len(codes) and reason is None:
                    if buffer.ended:
                        await _cancel(recall)  # its codes include frames whose audio will not arrive
                        recall = None
                        break  # the remaining frames will be decoded here
                    await buffer.wait(None)
                    continue
                chunk = self._count_delivered(audio.chunk(codes, pcm, reason))
                reason = chunk.finish_reason
                yield chunk
            to_recall = self._to_recall + received
            if reason is None and to_recall:
                recall = recall or asyncio.create_task(self._recall(np.stack(to_recall), 0.0))
                self._state = await recall
                self._plan.skip(len(received))
        finally:
            await _cancel(recall)

    async def _recall(self, codes: Codes, ahead_s: float) -> DecoderState:
        """Return the state after `codes`. The last `ahead_s` seconds of their audio have not been delivered yet."""
        state = self._state
        deadline_s = self._listener.deadline_s(time.monotonic()) + ahead_s
        for size in self._plan.recall_sizes(len(codes)):
            now, codes = codes[:size], codes[size:]
            task = DecodeTask(now, state, deadline_s, state_only=True, followed_by=len(codes))
            state = (await self._decode(task)).state
        return state

    async def _next_count(self, buffer: FrameBuffer) -> int:
        """Wait for frames. Returns the number to decode next; 0 only after the last frame."""
        while True:
            ended, lead_s = buffer.ended, self._listener.lead_s(time.monotonic())
            count = self._plan.next_size(buffer.available, ended=ended, lead_s=lead_s, load=self._load())
            if count or ended:
                return count
            await buffer.wait(self._plan.patience_s(lead_s) if buffer.available else None)


async def _cancel(task: asyncio.Task[DecoderState] | None) -> None:
    """Cancel `task`, whose result is no longer needed, and wait until it ends. None is ignored."""
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
