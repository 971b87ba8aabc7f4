"""One request inside the engine."""

from dataclasses import dataclass, field

import numpy as np

from deployments.listener import Listener
from deployments.protocol import ClonePrompt, FinishReason, Frame, Sampling, SynthesisRequest
from deployments.speech_detection import LATE_PATIENCE_S, frames_of
from deployments.talker.text.prompt import Prompt
from deployments.talker.text.text_progress import TextProgress


@dataclass(frozen=True, slots=True)
class FrameLimit:
    """How many frames a sequence may have, and its finish reason at that number."""

    frames: int
    reason: FinishReason


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in the engine. It has a row while it runs. `prompt` and `limit` grow while its text is written."""

    id: int
    request: SynthesisRequest
    prompt: Prompt
    sampling: Sampling  # complete: no option is None
    limit: FrameLimit
    progress: TextProgress = field(default_factory=TextProgress)
    frames: list[Frame] = field(default_factory=list)  # a resumed sequence starts with its prefix
    frame_s: float = field(kw_only=True)  # seconds of audio of a frame
    row: int | None = None
    is_open: bool = False  # whether `AudioStreams` has it
    finish_reason: FinishReason | None = None
    clone_prompt: ClonePrompt | None = None  # until it is sent
    listener: Listener = field(init=False)
    num_sent: int = field(init=False)  # frames that were sent
    _num_played: int = field(init=False)  # frames that `listener` counts; those of a prefix were played before

    def __post_init__(self) -> None:
        in_hand_s = self.request.in_hand_s
        self.listener = Listener.of(background=self.is_background, in_hand_s=in_hand_s)
        self.num_sent = self._num_played = len(self.frames)
        self.progress.begin(len(self.frames))

    @property
    def is_background(self) -> bool:
        """Whether it is a segment of a job, for which no listener waits."""
        return self.request.background

    @property
    def num_frames(self) -> int:
        """Frames that exist, the prefix included."""
        return len(self.frames)

    @property
    def num_positions(self) -> int:
        """Positions of the prompt and of the frames so far."""
        return self.prompt.num_positions + self.num_frames

    @property
    def awaits_text(self) -> bool:
        """Whether the next frame needs text that the client has not written yet."""
        return not self.prompt.has_all_text and len(self.prompt.trailing) <= self.num_frames

    @property
    def signed_seed(self) -> int:
        """The seed's 64 bits as the signed integer that tensors hold."""
        return int(np.uint64(self.request.seed).astype(np.int64))

    def append(self, frame: Frame) -> None:
        """Add a frame, and end the sequence at its limit or where it goes on with no words left."""
        self.frames.append(frame)
        self.progress.add_frame(self.num_frames)
        if self.num_frames >= self.limit.frames:
            self.finish_reason = self.limit.reason
        elif not self.request.ignore_eos:
            self.finish_reason = self.progress.overrun(patience=self._patience)

    def end(self) -> None:
        """End the sequence: the talker sampled its end-of-speech code."""
        self.finish_reason = self.progress.end(self.prompt, patience=self._patience)

    @property
    def _patience(self) -> int:
        """Frames for which speech may go on in a way that it should not."""
        return frames_of(LATE_PATIENCE_S, self.frame_s)

    def play(self, now_s: float) -> None:
        """Count the frames since the last call as delivered to the listener."""
        num_new, self._num_played = self.num_frames - self._num_played, self.num_frames
        if num_new:
            self.listener.deliver(num_new * self.frame_s, now_s=now_s)

    def sent_lead_s(self, now_s: float) -> float:
        """Seconds of audio that were sent and are not played yet."""
        return self.listener.lead_s(now_s) - (self._num_played - self.num_sent) * self.frame_s
