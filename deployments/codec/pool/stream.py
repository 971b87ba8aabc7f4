"""One stream through the codec: frames are read ahead, cut into chunks, decoded, and leave as PCM with their codes."""

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
    """Frames of one stream, read ahead by a task of its own: codes are small, so the talker never waits for us."""

    def __init__(self, chunks: AsyncGenerator[FrameChunk, None], frame_samples: int, first: Codes | None) -> None:
        """`first` as in PendingFrames."""
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
        """Whether no further frame will come. Once all are taken, raises the error that ended the stream."""
        if self._error is not None and not self._frames:
            raise self._error
        return self.finish_reason is not None or self._error is not None

    async def wait(self, timeout_s: float | None) -> None:
        """Return when something has arrived, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):  # wait_for would lose a cancellation that comes with the change
                await self._changed.wait()
        self._changed.clear()

    async def _read(self) -> None:
        try:
            async for chunk in self._chunks:
                self.add(chunk)
                self._changed.set()
            if self.finish_reason is None:
                raise EngineError("the talker's frames end without a reason: speech may be missing")
        except Exception as error:
            self._error = error
        self._changed.set()


@dataclass(frozen=True, slots=True)
class DecodingStart:
    """Where decoding begins: at a stream's first frame, or after the samples that its listener has."""

    state: DecoderState
    to_recall: Codes | None = None  # delivered frames that `state` lacks yet
    undelivered: Codes | None = None  # frames whose audio is missing although the caller has their codes
    position: int = 0  # samples that were delivered
    skipped: int = 0  # delivered samples of the first frame in `undelivered`
    in_hand_s: float = 0.0  # see `Progress`


class StreamDecoder:
    """Decodes one stream from `start` on. Holds the decoder's state, and drops it after `run`."""

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
        """`load` returns by how many steps chunks should be wider than planned. `background`: a segment of a job."""
        self._decode, self._plan, self._start, self._load = decode, plan, start, load
        self._silence, self._guard = silence, guard
        self._frame_samples, self._sample_rate = frame_samples, sample_rate
        self._listener = Listener.of(background=background, in_hand_s=start.in_hand_s)
        if start.in_hand_s and not background:
            plan.skip(start.position // frame_samples)
        self._state = start.state
        self._to_recall = [] if start.to_recall is None else list(start.to_recall)  # frames that `_state` lacks yet

    async def run(
        self, chunks: AsyncGenerator[FrameChunk, None], *, gpu_frames: int = 0
    ) -> AsyncGenerator[PcmChunk, None]:
        """Audio of the frames that `chunks` brings. The last chunk has the finish reason, of `chunks` or of the guard.

        The audio of the first `gpu_frames` is taken from `chunks`, while the decoder's state after it is recalled.
        Raises the errors of `chunks`, after the audio of the frames before them.
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
                chunk = self._deliver(audio.chunk(new_codes, pcm, buffer.over))
                reason = chunk.finish_reason
                if count and not self._listener.has_begun:
                    self._plan.restart()  # quiet so far: the first sound must not wait for a wider chunk
                yield chunk

    async def _decoded(self, codes: Codes, count: int) -> Pcm:
        """Audio of `codes` by a call of `count` frames: at the end of a stream perhaps more frames than `codes` has."""
        deadline_s = self._listener.deadline_s(time.monotonic())
        padded = np.pad(codes, ((0, count - len(codes)), (0, 0)), mode="edge")
        task = DecodeTask(padded, self._state, deadline_s, stalled_s=self._listener.stalled_s)
        decoded = await self._decode(task)
        self._state = decoded.state
        pcm = decoded.pcm[: len(codes) * self._frame_samples]
        metrics.DECODED.record(len(pcm) / self._sample_rate, pool="codec")
        return pcm

    def _deliver(self, chunk: PcmChunk) -> PcmChunk:
        if chunk.pcm:
            self._listener.deliver(chunk.num_samples / self._sample_rate, now_s=time.monotonic())
        return chunk

    async def _forward(
        self, buffer: FrameBuffer, audio: OutgoingAudio, gpu_frames: int
    ) -> AsyncGenerator[PcmChunk, None]:
        """Forward the talker's audio as it arrives. Once all of its codes have arrived, their recall starts in
        parallel.
        """
        received: list[Codes] = []  # frames whose audio has come
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
                reason = buffer.over
                if not len(codes) and reason is None:
                    if buffer.ended:
                        await _cancel(recall)  # it counts the frames that are left as delivered
                        recall = None
                        break  # no audio will come for the frames that are left
                    await buffer.wait(None)
                    continue
                chunk = self._deliver(audio.chunk(codes, pcm, reason))
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
        """The state after `codes`; the last `ahead_s` of their audio is still to be delivered."""
        state = self._state
        deadline_s = self._listener.deadline_s(time.monotonic()) + ahead_s
        for size in self._plan.recall_sizes(len(codes)):
            now, codes = codes[:size], codes[size:]
            task = DecodeTask(now, state, deadline_s, silent=True, followed_by=len(codes))
            state = (await self._decode(task)).state
        return state

    async def _next_count(self, buffer: FrameBuffer) -> int:
        """Wait for frames. Returns how many to decode next; 0 only after the last frame."""
        while True:
            ended, lead_s = buffer.ended, self._listener.lead_s(time.monotonic())
            count = self._plan.next_size(buffer.available, ended=ended, lead_s=lead_s, load=self._load())
            if count or ended:
                return count
            await buffer.wait(self._plan.patience_s(lead_s) if buffer.available else None)


async def _cancel(task: asyncio.Task[DecoderState] | None) -> None:
    """Cancel a task, if there is one, whose result is no longer needed."""
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
