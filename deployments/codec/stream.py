"""One stream through the codec: frames are read ahead, cut into chunks, decoded, and leave as PCM with their codes."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
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
from deployments.protocol import Codes, FinishReason, FrameChunk, Marks, PcmChunk, reached

Decode = Callable[[DecodeJob], Awaitable[Decoded]]


class FrameBuffer:
    """Frames of one stream, read ahead by a task of its own: codes are small, so the talker never waits for us."""

    def __init__(self, chunks: AsyncGenerator[FrameChunk, None], first: Codes | None = None) -> None:
        """`first` are frames that exist already, before those that `chunks` brings."""
        self._chunks = chunks
        self._frames: list[Codes] = [] if first is None else list(first)
        self._num_code_groups = 0
        self._pcm = bytearray()
        self._marks: Marks = ()
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

    def take_audio(self) -> bytes:
        """What the talker decoded since the last time, s16le."""
        pcm, self._pcm = bytes(self._pcm), bytearray()
        return pcm

    def take_marks(self) -> Marks:
        """Those that have arrived since the last time."""
        marks, self._marks = self._marks, ()
        return marks

    def peek(self, count: int) -> list[Codes]:
        """The next `count` frames at most, each [num_code_groups]; they stay."""
        return self._frames[:count]

    async def wait(self, timeout_s: float | None) -> None:
        """Return when something has arrived, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        self._changed.clear()

    async def _read(self) -> None:
        try:
            async for chunk in self._chunks:
                self._frames.extend(chunk.codes)
                self._pcm += chunk.pcm
                if chunk.marks:
                    self._marks = reached(chunk, "from-talker").marks
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
    behind: Codes | None = None  # frames that were heard, which the state must still be brought behind
    undelivered: Codes | None = None  # frames whose audio is missing though whoever asks has their codes
    position: int = 0  # behind those, in samples
    skipped: int = 0  # samples from there on that were delivered


@dataclass(frozen=True, slots=True)
class Opening:
    """The first frames of a stream, whose audio the talker brings."""

    frames: int
    frame_bytes: int


@dataclass(slots=True)
class _Progress:
    """How far a stream has come, and the state that decoding goes on from."""

    state: DecoderState
    behind: list[Codes]  # frames that the state must still be brought behind
    position: int
    reason: FinishReason | None = None


class StreamDecoder:
    """Decodes one stream. The decoder's state is a local variable of `run`: leaving it leaves nothing behind."""

    def __init__(
        self,
        decode: Decode,
        plan: ChunkPlan,
        silence: LeadingSilence | None,
        *,
        sample_rate: int,
        load: Callable[[], int] = lambda: 0,
    ) -> None:
        """`load` says by how many steps chunks should be wider than the plan has them."""
        self._decode, self._plan, self._silence, self._load = decode, plan, silence, load
        self._sample_rate = sample_rate
        self._clock = PlaybackClock()

    async def run(
        self, chunks: AsyncGenerator[FrameChunk, None], start: Start, opening: Opening | None = None
    ) -> AsyncGenerator[PcmChunk, None]:
        """Audio of the frames that `chunks` brings, decoded from `start` on. The last chunk has the finish reason.

        The audio of the `opening` is taken from `chunks`, while the decoder's state is brought behind it.
        Raises what `chunks` raises, after the audio of the frames before it.
        """
        state, position, skipped = start.state, start.position, start.skipped
        behind = [] if start.behind is None else list(start.behind)
        num_known = 0 if start.undelivered is None else len(start.undelivered)
        delivered = position + skipped
        async with FrameBuffer(chunks, start.undelivered) as buffer:
            reason = None
            if opening is not None:
                progress = _Progress(state, behind, position)
                async with aclosing(self._forward(buffer, opening, progress)) as forwarded:
                    async for chunk in forwarded:
                        yield chunk
                state, position, reason = progress.state, progress.position, progress.reason
            elif behind:
                state = await self._replay(np.stack(behind), state, 0.0)
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
                elif self._clock.started_s is None:
                    self._plan.restart()  # quiet so far: the first sound shall not wait for a wider chunk
                marks = buffer.take_marks()
                yield PcmChunk(pcm.tobytes(), new_codes, buffer.num_text_tokens, reason, delivered, marks)

    async def _forward(
        self, buffer: FrameBuffer, opening: Opening, progress: _Progress
    ) -> AsyncGenerator[PcmChunk, None]:
        """The talker's audio as it comes. Once all codes of the opening are there, their replay begins beside it."""
        heard: list[Codes] = []  # frames whose audio has come
        replay: asyncio.Task[DecoderState] | None = None
        delivered = progress.position
        try:
            while (missing := opening.frames - len(heard)) and progress.reason is None:
                if replay is None and buffer.available >= missing:
                    ahead_s = missing * opening.frame_bytes / 2 / self._sample_rate
                    codes = np.stack([*progress.behind, *heard, *buffer.peek(missing)])
                    replay = asyncio.create_task(self._replay(codes, progress.state, ahead_s))
                pcm = np.frombuffer(buffer.take_audio(), np.int16)
                codes = buffer.take(2 * len(pcm) // opening.frame_bytes)
                heard.extend(codes)
                over = buffer.finish_reason is not None and buffer.available == 0
                if not len(codes) and not over:
                    if buffer.ended:
                        await _cancel(replay)  # it knows the frames that are left as heard
                        replay = None
                        break  # no audio will come for the frames that are left
                    await buffer.wait(None)
                    continue
                progress.position += len(pcm)
                progress.reason = buffer.finish_reason if over else None
                pcm = pcm if self._silence is None else self._silence.trim(pcm)
                if len(pcm):
                    self._clock.deliver(len(pcm) / self._sample_rate, now_s=time.monotonic())
                    delivered = progress.position
                marks = buffer.take_marks()
                yield PcmChunk(pcm.tobytes(), codes, buffer.num_text_tokens, progress.reason, delivered, marks)
            behind = progress.behind + heard
            if progress.reason is None and behind:
                replay = replay or asyncio.create_task(self._replay(np.stack(behind), progress.state, 0.0))
                progress.state = await replay
                self._plan.skip(len(heard))
        finally:
            await _cancel(replay)

    async def _replay(self, codes: Codes, state: DecoderState, ahead_s: float) -> DecoderState:
        """The state behind `codes`; the last `ahead_s` of their audio is still to be delivered."""
        deadline_s = self._clock.deadline_s(time.monotonic()) + ahead_s
        for size in self._plan.replay(len(codes)):
            now, codes = codes[:size], codes[size:]
            job = DecodeJob(now, state, deadline_s, silent=True, followed_by=len(codes))
            state = (await self._decode(job)).state
        return state

    async def _next_count(self, buffer: FrameBuffer) -> int:
        """How many frames to decode next, waiting for them; 0 only behind the last frame."""
        while True:
            ended, lead_s = buffer.ended, self._clock.lead_s(time.monotonic())
            count = self._plan.next_size(buffer.available, ended=ended, lead_s=lead_s, load=self._load())
            if count or ended:
                return count
            await buffer.wait(self._plan.patience_s(lead_s) if buffer.available else None)


async def _cancel(task: asyncio.Task[DecoderState] | None) -> None:
    """End a task, if there is one, whose outcome nobody wants any more."""
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
