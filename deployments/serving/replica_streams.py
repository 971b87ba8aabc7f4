"""Streams of a segment's frames or audio that survive the loss of replicas.

The ingress reads `with_failover(TalkerAudio(...))` or `with_failover(CodecAudio(...))`. A codec replica reads
`with_failover(AllFrames(...))`. `call` calls a replica, and `receive` handles each of its chunks. After a replica
is lost, the next `call` continues after the codes already received.
"""

from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

import numpy as np

from deployments.errors import CodecLost, EngineError, TalkerLost
from deployments.protocol import (
    ALL_FRAMES,
    SAMPLE_BYTES,
    ClonePrompt,
    Codes,
    FinishReason,
    Frame,
    FrameChunk,
    Marks,
    ModelInfo,
    Pcm,
    PcmChunk,
    Reading,
    SynthesisRequest,
    with_mark,
)
from deployments.serving.failover import ReaderChunk, ReceivedProgress, ReplicaStream
from deployments.speech_detection import EndingGuard, LeadingSilence

Generate = Callable[[SynthesisRequest], AsyncGenerator[FrameChunk, None]]
Synthesize = Callable[[SynthesisRequest], AsyncGenerator[PcmChunk, None]]


class TalkerStream(ReplicaStream[FrameChunk, ReaderChunk]):
    """Stream of frames from talkers. Each call requests the frames that have not yet arrived."""

    def __init__(self, generate: Generate, request: SynthesisRequest, frame_samples: int) -> None:
        super().__init__(request.request_id, TalkerLost, is_background=request.background)
        self._generate, self._request, self._frame_samples = generate, request, frame_samples
        self._received = ReceivedProgress(request.resume)
        self._start = self._received.samples

    def call(self) -> AsyncGenerator[FrameChunk, None]:
        gpu_frames = self._request.gpu_frames
        if gpu_frames < ALL_FRAMES:
            gpu_frames = max(0, gpu_frames - (self._received.samples - self._start) // self._frame_samples)
        rest = self._received.next_request(self._request)
        return self._generate(replace(rest, gpu_frames=gpu_frames))

    def _collect(self, chunk: FrameChunk) -> None:
        self._received.add(chunk, self._received.samples + len(chunk.pcm) // SAMPLE_BYTES)


class TalkerAudio(TalkerStream[PcmChunk]):
    """Audio for one segment, decoded by talkers. `receive` raises EngineError if audio is missing at the end."""

    def __init__(
        self,
        request: SynthesisRequest,
        generate: Generate,
        info: ModelInfo,
        *,
        each_chunk: Callable[[PcmChunk], None] = lambda chunk: None,
    ) -> None:
        super().__init__(generate, replace(request, gpu_frames=ALL_FRAMES), info.frame_samples)
        self._frames, self._sample_rate = PendingFrames(info.frame_samples), info.sample_rate
        self._each_chunk = each_chunk
        silence = None if request.leading_silence else LeadingSilence(info.sample_rate)
        guard = None if request.ignore_eos else EndingGuard(info.frame_samples, info.sample_rate)
        self._audio = OutgoingAudio(self._frames, silence, guard)

    def receive(self, chunk: FrameChunk) -> PcmChunk | None:
        frames = self._frames
        self._collect(chunk)
        frames.add(chunk)
        if not chunk.pcm and chunk.finish_reason is None:
            return None
        codes, pcm = frames.take_audio()
        if frames.finish_reason is not None and frames.available:
            raise EngineError(f"the talker sent {frames.available} frames without audio, so speech is missing")
        item = self._audio.chunk(codes, pcm, chunk.finish_reason)
        self._received.deliver(item.num_samples / self._sample_rate)
        self._each_chunk(item)
        return item


class CodecAudio(ReplicaStream[PcmChunk, PcmChunk]):
    """Audio for one segment, decoded by codec replicas, which call the talkers."""

    def __init__(
        self,
        request: SynthesisRequest,
        synthesize: Synthesize,
        info: ModelInfo,
        *,
        each_chunk: Callable[[PcmChunk], None],
    ) -> None:
        super().__init__(request.request_id, CodecLost, is_background=request.background)
        self._request, self._synthesize, self._each_chunk = request, synthesize, each_chunk
        self._sample_rate = info.sample_rate
        self._received = ReceivedProgress()

    def call(self) -> AsyncGenerator[PcmChunk, None]:
        return self._synthesize(self._received.next_request(self._request))

    def receive(self, chunk: PcmChunk) -> PcmChunk | None:
        self._each_chunk(chunk)
        if chunk.is_heartbeat:
            return None
        self._received.add(chunk, chunk.position)
        self._received.deliver(chunk.num_samples / self._sample_rate)
        return with_mark(chunk, "from-codec")


class PendingFrames:
    """A stream's frames that have arrived but have not been taken. Talkers may have decoded the first of them."""

    def __init__(self, frame_samples: int, first: Codes | None = None) -> None:
        """Start with the frames `first`, which precede those in the chunks."""
        self._frame_bytes = SAMPLE_BYTES * frame_samples
        self._frames: list[Frame] = [] if first is None else list(first)
        self._num_code_groups = 0
        self._pcm = bytearray()
        self._marks: Marks = ()
        self._readings: tuple[Reading, ...] = ()
        self._clone_prompt: ClonePrompt | None = None
        self._trail: Marks = ()
        self.num_text_tokens = 0
        self.finish_reason: FinishReason | None = None

    def add(self, chunk: FrameChunk) -> None:
        """Add a chunk. Its audio may belong to earlier codes."""
        self._frames.extend(chunk.codes)
        self._pcm += chunk.pcm
        if chunk.marks:
            self._marks = with_mark(chunk, "from-talker").marks
        self._readings += chunk.readings
        self._trail += chunk.trail
        self._clone_prompt = chunk.clone_prompt or self._clone_prompt
        self._num_code_groups = chunk.codes.shape[1]
        self.num_text_tokens = max(self.num_text_tokens, chunk.num_text_tokens)
        self.finish_reason = chunk.finish_reason

    @property
    def available(self) -> int:
        return len(self._frames)

    @property
    def end_reason(self) -> FinishReason | None:
        """Why the stream ended; None until all frames have been taken."""
        return None if self._frames else self.finish_reason

    def take(self, count: int) -> Codes:
        """Remove and return up to `count` frames, [frames, num_code_groups]."""
        taken = self._frames[:count]
        del self._frames[:count]
        return np.stack(taken) if taken else np.zeros((0, self._num_code_groups), dtype=np.int16)

    def take_audio(self) -> tuple[Codes, Pcm]:
        """Remove and return the talker's audio received since the last call, with its frames."""
        pcm = bytes(self._pcm)
        self._pcm.clear()
        return self.take(len(pcm) // self._frame_bytes), np.frombuffer(pcm, np.int16)

    def take_extras(self) -> tuple[Marks, tuple[Reading, ...], ClonePrompt | None, Marks]:
        """Remove and return the marks, readings, clone prompt and trail received since the last call."""
        news = self._marks, self._readings, self._clone_prompt, self._trail
        self._marks, self._readings, self._clone_prompt, self._trail = (), (), None, ()
        return news

    def peek(self, count: int) -> list[Frame]:
        return self._frames[:count]


class OutgoingAudio:
    """Producer of a stream's PcmChunks. Removes leading silence and counts samples.

    If the talker misses the end of the speech, the producer ends the stream.
    """

    def __init__(
        self,
        frames: PendingFrames,
        silence: LeadingSilence | None,
        guard: EndingGuard | None = None,
        *,
        position: int = 0,
    ) -> None:
        """Resume after the first `position` samples, which have already been delivered."""
        self._frames, self._silence, self._guard = frames, silence, guard
        self._position = position  # position of the next sample, including leading silence
        self._delivered = position  # as in chunks: includes leading silence only after the first sound

    def chunk(self, codes: Codes, pcm: Pcm, finish_reason: FinishReason | None) -> PcmChunk:
        """Return the chunk for the next frames and audio. Its position includes leading silence after the first sound.

        The stream ends if the returned chunk has a finish reason, even if `finish_reason` is None, because the rest of
        the audio is not speech.
        """
        if self._guard is not None:
            codes, pcm, finish_reason = self._guard.truncate(codes, pcm, finish_reason, self._frames.num_text_tokens)
        self._position += len(pcm)
        pcm = pcm if self._silence is None else self._silence.trim(pcm)
        if len(pcm):
            self._delivered = self._position
        marks, readings, prompt, trail = self._frames.take_extras()
        return PcmChunk(
            pcm=pcm.tobytes(),
            codes=codes,
            num_text_tokens=self._frames.num_text_tokens,
            finish_reason=finish_reason,
            position=self._delivered,
            marks=marks,
            readings=readings,
            clone_prompt=prompt,
            trail=trail,
        )
