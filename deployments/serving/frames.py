"""Frames of one utterance from its first to its last, whatever becomes of the talkers that make them."""

from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from deployments.audio.runaway import EndingGuard
from deployments.audio.silence import LeadingSilence
from deployments.errors import EngineError, TalkerLost
from deployments.protocol import (
    ALL_FRAMES,
    ClonePrompt,
    Codes,
    FinishReason,
    FrameChunk,
    GenerateRequest,
    Marks,
    ModelInfo,
    PcmChunk,
    Reading,
    SynthesisRequest,
    reached,
)
from deployments.serving.failover import Received, persist

Generate = Callable[[GenerateRequest], AsyncGenerator[FrameChunk, None]]
Pcm = NDArray[np.int16]  # [samples]
D = TypeVar("D", FrameChunk, PcmChunk)


def all_frames(
    generate: Generate, request: GenerateRequest, pass_on: Callable[[FrameChunk], D | None], *, frame_samples: int
) -> AsyncGenerator[D, None]:
    """What `pass_on` makes of the frames behind the prefix, to the end: a lost talker is followed by another."""
    received = Received(request.synthesis.resume)
    begun = received.samples

    def ask() -> AsyncGenerator[FrameChunk, None]:
        gpu_frames = request.gpu_frames
        if gpu_frames < ALL_FRAMES:
            gpu_frames = max(0, gpu_frames - (received.samples - begun) // frame_samples)
        return generate(replace(request, synthesis=received.rest(request.synthesis), gpu_frames=gpu_frames))

    def take(chunk: FrameChunk) -> D | None:
        received.add(chunk.codes, received.samples + len(chunk.pcm) // 2)
        return pass_on(chunk)

    return persist(ask, take, request_id=request.synthesis.request_id, lost=TalkerLost)


class Frames:
    """Frames of one stream that have come, and the audio that a talker has made of the first of them."""

    def __init__(self, frame_samples: int, first: Codes | None = None) -> None:
        """`first` are frames that exist already, before those that chunks bring."""
        self._frame_bytes = 2 * frame_samples
        self._frames: list[Codes] = [] if first is None else list(first)  # each [num_code_groups]
        self._num_code_groups = 0
        self._pcm = bytearray()
        self._marks: Marks = ()
        self._readings: tuple[Reading, ...] = ()
        self._clone_prompt: ClonePrompt | None = None
        self.num_text_tokens = 0
        self.finish_reason: FinishReason | None = None

    def add(self, chunk: FrameChunk) -> None:
        """What a talker brings next: its audio may come later than its codes."""
        self._frames.extend(chunk.codes)
        self._pcm += chunk.pcm
        if chunk.marks:
            self._marks = reached(chunk, "from-talker").marks
        self._readings += chunk.readings
        self._clone_prompt = chunk.clone_prompt or self._clone_prompt
        self._num_code_groups = chunk.codes.shape[1]
        self.num_text_tokens = max(self.num_text_tokens, chunk.num_text_tokens)
        self.finish_reason = chunk.finish_reason

    @property
    def available(self) -> int:
        """Frames that can be taken now."""
        return len(self._frames)

    @property
    def over(self) -> FinishReason | None:
        """Why no frame will come, once all were taken."""
        return None if self._frames else self.finish_reason

    def take(self, count: int) -> Codes:
        """The next `count` frames, [count, num_code_groups]; there may be none."""
        taken, self._frames = self._frames[:count], self._frames[count:]
        return np.stack(taken) if taken else np.zeros((0, self._num_code_groups), dtype=np.int16)

    def take_audio(self) -> tuple[Codes, Pcm]:
        """The audio that a talker has made since the last time, and the frames that it made it of."""
        pcm, self._pcm = bytes(self._pcm), bytearray()
        return self.take(len(pcm) // self._frame_bytes), np.frombuffer(pcm, np.int16)

    def take_marks(self) -> Marks:
        """Those that have arrived since the last time."""
        marks, self._marks = self._marks, ()
        return marks

    def take_readings(self) -> tuple[Reading, ...]:
        """Those that have arrived since the last time."""
        readings, self._readings = self._readings, ()
        return readings

    def take_clone_prompt(self) -> ClonePrompt | None:
        """The one that has arrived since the last time."""
        prompt, self._clone_prompt = self._clone_prompt, None
        return prompt

    def peek(self, count: int) -> list[Codes]:
        """The next `count` frames at most, each [num_code_groups]; they stay."""
        return self._frames[:count]


class OutgoingAudio:
    """Audio of one stream on its way out: its quiet start is dropped, a missed end is made up for, and its reader
    learns how far it has come.
    """

    def __init__(
        self, frames: Frames, silence: LeadingSilence | None, guard: EndingGuard | None = None, *, position: int = 0
    ) -> None:
        """`position`: samples that were delivered elsewhere."""
        self._frames, self._silence, self._guard = frames, silence, guard
        self._position = self._delivered = position

    def chunk(self, codes: Codes, pcm: Pcm, finish_reason: FinishReason | None) -> PcmChunk:
        """The next frames of the stream and their audio. What is held back as quiet counts once there is sound.

        Where it has a finish reason though `finish_reason` is None, the stream ends there: the rest is no speech.
        """
        if self._guard is not None:
            codes, pcm, finish_reason = self._guard.pass_on(codes, pcm, finish_reason, self._frames.num_text_tokens)
        self._position += len(pcm)
        pcm = pcm if self._silence is None else self._silence.trim(pcm)
        if len(pcm):
            self._delivered = self._position
        tokens, marks = self._frames.num_text_tokens, self._frames.take_marks()
        readings, prompt = self._frames.take_readings(), self._frames.take_clone_prompt()
        return PcmChunk(
            pcm.tobytes(), codes, tokens, finish_reason, self._delivered, marks, readings, clone_prompt=prompt
        )


def forward(
    request: SynthesisRequest,
    generate: Generate,
    info: ModelInfo,
    *,
    learn: Callable[[PcmChunk], None] = lambda chunk: None,
) -> AsyncGenerator[PcmChunk, None]:
    """Audio of one utterance as a talker's GPU makes it, on one talker after the other where it has to be.

    `generate` asks a talker; `learn` sees each chunk first. Raises what `generate` raises, and EngineError where audio
    is missing at the end.
    """
    frames = Frames(info.frame_samples)
    silence = None if request.leading_silence else LeadingSilence(info.sample_rate)
    audio = OutgoingAudio(
        frames, silence, None if request.ignore_eos else EndingGuard(info.frame_samples, info.sample_rate)
    )

    def with_audio(chunk: FrameChunk) -> PcmChunk | None:
        frames.add(chunk)
        if not chunk.pcm and chunk.finish_reason is None:
            return None
        codes, pcm = frames.take_audio()
        if frames.finish_reason is not None and frames.available:
            raise EngineError(f"the talker has left {frames.available} frames without audio: speech is missing")
        item = audio.chunk(codes, pcm, chunk.finish_reason)
        learn(item)
        return item

    asked = GenerateRequest(request, gpu_frames=ALL_FRAMES)
    return all_frames(generate, asked, with_audio, frame_samples=info.frame_samples)
