"""One request inside the engine."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deployments.audio.runaway import LATE_PATIENCE_S, frames_of
from deployments.playback import PlaybackClock
from deployments.protocol import ClonePrompt, Codes, FinishReason, GenerateRequest, Sampling
from deployments.talker.prompt import Prompt

# Attention reads so far ahead of what is said, and means nothing where so little of it is on the text.
_AHEAD_TOKENS = 0.75
_ATTENTIVE = 0.2
# LATE_PATIENCE_S of frames that read so many tokens behind what was read already: a passage is spoken once more.
_BACK_TOKENS = 10


@dataclass(frozen=True, slots=True)
class FrameLimit:
    """How many frames a sequence may have, and what it means to reach that."""

    frames: int
    reason: FinishReason


@dataclass(slots=True, eq=False)
class Sequence:
    """A request from admission to its last frame. Its row is set while it runs.

    `prompt` and `limit` grow while its text is written.
    """

    id: int
    request: GenerateRequest
    prompt: Prompt
    sampling: Sampling  # complete: no option is None
    limit: FrameLimit
    frames: list[Codes] = field(default_factory=list)  # each [groups]; a resumed sequence starts with its prefix
    frame_s: float = field(kw_only=True)  # of audio
    row: int | None = None
    is_open: bool = False  # whether the decoder beside the talker knows it
    finish_reason: FinishReason | None = None
    token_starts: list[int] = field(
        default_factory=list
    )  # where word times are wanted: characters before each token, and in all
    next_reading: float = 0.0  # how far in the text its next frame is, in characters
    readings: list[float] = field(default_factory=list)  # of the frames behind `num_sent`
    num_reread: int = 0  # frames that read what was read long before
    furthest_token: float = 0.0  # that was read
    clone_prompt: ClonePrompt | None = None  # for the stream's reader, until it has it
    playback: PlaybackClock = field(default_factory=PlaybackClock)
    num_sent: int = field(init=False)  # frames that the stream's reader has
    _num_played: int = field(init=False)  # frames that `playback` knows of; those of a prefix were heard elsewhere

    def __post_init__(self) -> None:
        self.num_sent = self._num_played = len(self.frames)

    @property
    def num_frames(self) -> int:
        """Frames that exist, the prefix included."""
        return len(self.frames)

    @property
    def num_positions(self) -> int:
        """Rows that a prefill of the sequence as it stands has."""
        return self.prompt.num_rows + self.num_frames

    @property
    def is_starved(self) -> bool:
        """Whether its next frame needs text that has not been written yet."""
        return not self.prompt.is_whole and len(self.prompt.trailing) <= self.num_frames

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
        if self.token_starts:
            self.readings.append(self.next_reading)
        if self.num_frames >= self.limit.frames:
            self.finish_reason = self.limit.reason

    def attend(self, weights: NDArray[np.float32]) -> None:
        """Learn where in the text the next frame is, from what it attends to: weights [positions]."""
        text = weights[self.prompt.text_start :][: len(self.token_starts) or self.num_text_tokens]
        mass = float(text.sum())
        if mass <= _ATTENTIVE:
            return
        token = float(text @ np.arange(len(text))) / mass - _AHEAD_TOKENS
        self.num_reread += token < self.furthest_token - _BACK_TOKENS
        self.furthest_token = max(self.furthest_token, token)
        if self.token_starts:
            chars = np.interp(token, np.arange(len(self.token_starts)), self.token_starts)
            self.next_reading = max(self.next_reading, float(chars))

    def end(self) -> None:
        """Its speech is over. One that said a passage twice has not been spoken as it should."""
        again = self.num_reread >= frames_of(LATE_PATIENCE_S, self.frame_s)
        self.finish_reason = FinishReason.LOOP if again else FinishReason.STOP

    def play(self, now_s: float) -> None:
        """Its listener hears the frames that have come since the last time, one after the other."""
        num_new, self._num_played = self.num_frames - self._num_played, self.num_frames
        if num_new:
            self.playback.deliver(num_new * self.frame_s, now_s=now_s)

    def sent_lead_s(self, now_s: float) -> float:
        """How much longer the frames that were sent last than what was heard."""
        return self.playback.lead_s(now_s) - (self._num_played - self.num_sent) * self.frame_s
