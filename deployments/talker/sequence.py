"""One request inside the engine, and how long its prompt and its speech may be."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deployments.audio.listening import LATE_PATIENCE_S, frames_of, runaway_frames
from deployments.errors import InvalidRequest
from deployments.playback import PlaybackClock
from deployments.protocol import ClonePrompt, Codes, FinishReason, GenerateRequest, Sampling
from deployments.talker.prompt import Prompt
from deployments.talker.tokenizer import TextTokenizer

# Attention is _AHEAD_TOKENS ahead of the speech, and says nothing where no more than _ATTENTIVE of it is on the text.
_AHEAD_TOKENS = 0.75
_ATTENTIVE = 0.2
# A passage is spoken twice where frames of LATE_PATIENCE_S read so many tokens before the furthest one.
_BACK_TOKENS = 10


@dataclass(frozen=True, slots=True)
class FrameLimit:
    """How many frames a sequence may have, and the finish reason where it reaches the limit."""

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
    frame_s: float = field(kw_only=True)  # seconds of audio of a frame
    row: int | None = None
    is_open: bool = False  # whether the decoder beside the talker knows it
    finish_reason: FinishReason | None = None
    token_starts: list[int] = field(default_factory=list)  # for word times: characters before each token, and in all
    next_reading: float = 0.0  # how far in the text its next frame is, in characters
    readings: list[float] = field(default_factory=list)  # one for each frame after `num_sent`
    num_reread: int = 0  # frames that read a passage once more
    furthest_token: float = 0.0  # the furthest one read so far
    clone_prompt: ClonePrompt | None = None  # kept until the stream's reader has it
    playback: PlaybackClock = field(default_factory=PlaybackClock)
    num_sent: int = field(init=False)  # frames that the stream's reader has
    _num_played: int = field(init=False)  # frames that `playback` knows of; frames of a prefix were played elsewhere

    def __post_init__(self) -> None:
        self.num_sent = self._num_played = len(self.frames)

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
        """Whether its next frame needs text that has not been written yet."""
        return not self.prompt.has_all_text and len(self.prompt.trailing) <= self.num_frames

    @property
    def num_text_tokens(self) -> int:
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
        """Learn where in the text the next frame is, from its attention: weights [positions]."""
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
        """Seconds of audio that were sent and that the listener has not heard yet."""
        return self.playback.lead_s(now_s) - (self._num_played - self.num_sent) * self.frame_s


class LengthLimits:
    """The share of the model's context and of the KV cache that one sequence may take."""

    def __init__(self, tokenizer: TextTokenizer, *, max_positions: int, frame_s: float) -> None:
        """`max_positions`: rows of one sequence, prompt and frames, each of `frame_s` of audio."""
        self._tokenizer, self._max_positions, self._frame_s = tokenizer, max_positions, frame_s

    def frame_limit(self, request: GenerateRequest, sampling: Sampling, prompt: Prompt) -> FrameLimit:
        """The first limit a sequence will meet; raises InvalidRequest where its prompt or a later segment is too long.

        The last of `max_new_tokens` never becomes a frame, as in the official package. While the text is still being
        written its need is unknown, and it has a token for each frame.
        """
        room = self._max_positions - prompt.num_positions
        if room < 1:
            raise self._too_long(prompt.num_positions)
        self.check_following(request.synthesis.following, prompt)
        length = FrameLimit(min((sampling.max_new_tokens or 1) - 1, room), FinishReason.LENGTH)
        runaway = FrameLimit(runaway_frames(prompt.num_text_tokens, self._frame_s), FinishReason.RUNAWAY)
        if request.synthesis.ignore_eos or not prompt.has_all_text or length.frames <= runaway.frames:
            return length
        return runaway

    def check_following(self, texts: tuple[str, ...], prompt: Prompt) -> None:
        """Raise InvalidRequest where a later segment of the same request would not fit, before any of it is spoken."""
        num_others = prompt.num_positions - prompt.num_text_tokens
        for text in texts:
            most = 2 * len(text.encode("utf-8", "replace"))  # tokens are bytes at least, of the text's normal form
            fits_anyway = num_others + most < self._max_positions
            num_positions = num_others + (most if fits_anyway else len(self._tokenizer.encode(text)))
            if num_positions >= self._max_positions:
                raise self._too_long(num_positions)

    def _too_long(self, num_positions: int) -> InvalidRequest:
        return InvalidRequest(
            f"input and reference make {num_positions} positions, at most {self._max_positions - 1} fit: shorten them",
            "input",
            "context_length_exceeded",
        )
