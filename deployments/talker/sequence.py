"""One request inside the engine."""

from dataclasses import dataclass, field

import numpy as np

from deployments.protocol import Codes, FinishReason, GenerateRequest, Sampling
from deployments.talker.prompt import Prompt


@dataclass(frozen=True, slots=True)
class FrameLimit:
    """How many frames a sequence may have, and what it means to reach that."""

    frames: int
    reason: FinishReason


@dataclass(slots=True)
class Playback:
    """A listener who hears frames from the first one on without a pause."""

    frame_s: float = 0.08
    _started_s: float | None = None
    _frames_before: int = 0  # those of a stream that was resumed were heard elsewhere

    def start(self, now_s: float, num_frames: int) -> None:
        """There are frames now; called again, nothing happens."""
        if self._started_s is None:
            self._started_s, self._frames_before = now_s, num_frames - 1

    def lead_s(self, now_s: float, num_frames: int) -> float:
        """How much longer `num_frames` frames last than what was heard; 0 before the first frame."""
        if self._started_s is None:
            return 0.0
        return (num_frames - self._frames_before) * self.frame_s - (now_s - self._started_s)


@dataclass(slots=True, eq=False)
class Sequence:
    """A request from admission to its last frame. Its row is set while it runs."""

    id: int
    request: GenerateRequest
    prompt: Prompt
    sampling: Sampling  # complete: no option is None
    limit: FrameLimit
    frames: list[Codes] = field(default_factory=list)  # each [groups]; a resumed sequence starts with its prefix
    row: int | None = None
    is_open: bool = False  # whether the decoder beside the talker knows it
    finish_reason: FinishReason | None = None
    playback: Playback = field(default_factory=Playback)
    num_sent: int = field(init=False)  # frames that the stream's reader has

    def __post_init__(self) -> None:
        self.num_sent = len(self.frames)

    @property
    def num_frames(self) -> int:
        """Frames that exist, the prefix included."""
        return len(self.frames)

    @property
    def num_positions(self) -> int:
        """Rows that a prefill of the sequence as it stands has."""
        return self.prompt.num_rows + self.num_frames

    @property
    def num_text_tokens(self) -> int:
        """Text tokens of the request's own text."""
        return self.prompt.num_text_tokens

    @property
    def signed_seed(self) -> int:
        """The seed's 64 bits as the signed integer that tensors hold."""
        return int(np.uint64(self.request.synthesis.seed).astype(np.int64))

    def append(self, frame: Codes) -> None:
        """Add a frame [groups], which may be the last that the sequence can have."""
        self.frames.append(frame)
        if self.num_frames >= self.limit.frames:
            self.finish_reason = self.limit.reason
