"""A request inside the engine, and how far its speech has progressed through its text."""

from dataclasses import dataclass, field

import numpy as np

from deployments.listener import Listener
from deployments.protocol import ClonePrompt, FinishReason, Frame, Sampling, SynthesisRequest
from deployments.speech_detection import LATE_PATIENCE_S, frames_of
from deployments.talker.text.prompt import Prompt

# The alignment head attends _AHEAD_TOKENS ahead of the speech. Attention to the text of at most ATTENTIVE is noise.
_AHEAD_TOKENS = 0.75
ATTENTIVE = 0.2
# A frame that reads more than this many tokens behind the furthest token is repeating a passage.
_BACK_TOKENS = 10
# A good ending leaves at most 2.8 positions unread; an ending that lacks the last word leaves at least 3.8
# (docs/reliability.md). More than _UNSAID_TOKENS unread positions mean that words are missing. At most _SAID_TOKENS
# unread positions mean that all text has been spoken.
_UNSAID_TOKENS, _SAID_TOKENS = 3.25, 2.8
_WITNESSES = 8  # the head is trusted once this many frames have read the text; a resumed stream starts with none


@dataclass(frozen=True, slots=True)
class FrameLimit:
    """A sequence's maximum number of frames, and the finish reason when it is reached."""

    frames: int
    reason: FinishReason


class TextProgress:
    """Progress of speech through its text: each frame's position, and whether all text had been spoken at the end.

    A talker's alignment head attends to the token that is being spoken. If there is no such head, the position is
    estimated from the number of frames.
    """

    def __init__(self, *, starts: list[int] | None = None, token_frames: float | None = None) -> None:
        """Start at the beginning of the text.

        `starts` enables word times. The list holds the number of characters before each token and in total, and grows
        with a live text. `token_frames` is the expected number of frames per token; None with an alignment head.
        """
        self._starts = [] if starts is None else starts
        self._token_frames = token_frames
        self.num_unspoken = 0  # tokens at the end of the text that contain no letters or digits
        self._furthest = 0.0  # furthest token that a frame has read
        self._num_read = 0  # number of frames that read the text
        self._num_reread = 0  # number of frames that repeated a passage
        self._num_after = 0  # number of frames since all text had been spoken
        self._place = 0.0  # position of the next frame in characters
        self._places: list[float] = []  # positions of the frames since the last `pop_places`

    def begin(self, num_frames: int) -> None:
        """Start after `num_frames` existing frames."""
        self._estimate(num_frames)

    def add_frame(self, num_frames: int) -> None:
        """Count a new frame, the last one of `num_frames`."""
        if self._starts:
            self._places.append(self._place)
            self._estimate(num_frames)

    def read(self, mass: float, moment: float, prompt: Prompt) -> None:
        """Update the next frame's position in the text from `FrameNetworks.readings`."""
        token = moment / mass - _AHEAD_TOKENS if mass > ATTENTIVE else None
        if token is not None:
            self._num_read += 1
            self._num_reread += token < self._furthest - _BACK_TOKENS
            self._furthest = max(self._furthest, token)
        is_said = prompt.has_all_text and self._num_unread(prompt) <= _SAID_TOKENS
        self._num_after = self._num_after + 1 if is_said else 0
        if token is not None and self._starts:
            self._come_to(token)

    def end(self, prompt: Prompt, *, patience: int) -> FinishReason:
        """Return why speech ended on its own. The reason is LOOP if at least `patience` frames repeated a passage."""
        if self._num_reread >= patience:
            return FinishReason.LOOP
        is_early = self._num_read >= _WITNESSES and self._num_unread(prompt) > _UNSAID_TOKENS
        return FinishReason.EARLY if is_early else FinishReason.STOP

    def overrun(self, *, patience: int) -> FinishReason | None:
        """Return why speech that continues beyond its text must end, or None if it may continue.

        Speech may continue for `patience` frames, or half as many if they repeat a passage.
        """
        if not self._num_after:
            return None
        if 2 * min(self._num_after, self._num_reread) >= patience:
            return FinishReason.LOOP
        return FinishReason.RUNAWAY if self._num_after >= patience else None

    def pop_places(self) -> tuple[float, ...]:
        """Return the positions of the frames since the last call, in characters; empty without word times."""
        places, self._places = self._places, []
        return tuple(places)

    def _num_unread(self, prompt: Prompt) -> float:
        """Return the number of text positions after the furthest token, excluding punctuation at the end."""
        return prompt.num_text_positions - self.num_unspoken - self._furthest

    def _estimate(self, num_frames: int) -> None:
        """Estimate the next frame's position from the number of frames, unless an alignment head reads the position."""
        if self._starts and self._token_frames is not None:
            self._come_to(num_frames / self._token_frames)

    def _come_to(self, token: float) -> None:
        """Set the next frame's position to that of `token`, but never move back behind an earlier frame."""
        last = len(self._starts) - 1
        before = min(max(int(token), 0), last)
        after = min(before + 1, last)
        share = min(max(token - before, 0.0), 1.0)
        chars = self._starts[before] + share * (self._starts[after] - self._starts[before])
        self._place = max(self._place, chars)


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in the engine. A running sequence owns one row. `prompt` and `limit` grow with an unfinished text."""

    id: int
    request: SynthesisRequest
    prompt: Prompt
    sampling: Sampling  # complete, so no option is None
    limit: FrameLimit
    progress: TextProgress = field(default_factory=TextProgress)
    frames: list[Frame] = field(default_factory=list)  # a resumed sequence starts with its prefix
    frame_s: float = field(kw_only=True)  # duration of a frame in seconds
    row: int | None = None
    is_open: bool = False  # whether `AudioStreams` has opened it
    finish_reason: FinishReason | None = None
    clone_prompt: ClonePrompt | None = None  # set until it is sent
    listener: Listener = field(init=False)
    num_sent: int = field(init=False)  # number of frames sent
    _num_counted: int = field(init=False)  # number of frames counted in `listener`, including those of a prefix

    def __post_init__(self) -> None:
        in_hand_s = self.request.in_hand_s
        self.listener = Listener.of(background=self.is_background, in_hand_s=in_hand_s)
        self.num_sent = self._num_counted = len(self.frames)
        self.progress.begin(len(self.frames))

    @property
    def is_background(self) -> bool:
        """Whether the sequence is a job segment, which has no listener."""
        return self.request.background

    @property
    def num_frames(self) -> int:
        """Number of frames, including the prefix."""
        return len(self.frames)

    @property
    def num_positions(self) -> int:
        """Number of positions in the prompt and all frames."""
        return self.prompt.num_positions + self.num_frames

    @property
    def awaits_text(self) -> bool:
        """Whether the next frame needs text that the client has not yet written."""
        return not self.prompt.has_all_text and len(self.prompt.trailing) <= self.num_frames

    @property
    def signed_seed(self) -> int:
        """Seed as a signed 64-bit integer, the type of the tensors."""
        return int(np.uint64(self.request.seed).astype(np.int64))

    def append(self, frame: Frame) -> None:
        """Append a frame. Ends the sequence at its limit, or if speech continues too long beyond the text."""
        self.frames.append(frame)
        self.progress.add_frame(self.num_frames)
        if self.num_frames >= self.limit.frames:
            self.finish_reason = self.limit.reason
        elif not self.request.ignore_eos:
            self.finish_reason = self.progress.overrun(patience=self._patience)

    def end(self) -> None:
        """End the sequence after the talker has sampled its end-of-speech code."""
        self.finish_reason = self.progress.end(self.prompt, patience=self._patience)

    @property
    def _patience(self) -> int:
        """Number of frames for which invalid speech is tolerated."""
        return frames_of(LATE_PATIENCE_S, self.frame_s)

    def update_listener(self, now_s: float) -> None:
        """Count the frames since the last call as delivered to the listener."""
        num_new, self._num_counted = self.num_frames - self._num_counted, self.num_frames
        if num_new:
            self.listener.deliver(num_new * self.frame_s, now_s=now_s)

    def sent_lead_s(self, now_s: float) -> float:
        """Return the seconds of audio that have been sent but not yet played."""
        return self.listener.lead_s(now_s) - (self._num_counted - self.num_sent) * self.frame_s
