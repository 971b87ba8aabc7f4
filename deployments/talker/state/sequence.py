"""One request inside the engine, and how far its speech has come in its text."""

from dataclasses import dataclass, field

import numpy as np

from deployments.listener import Listener
from deployments.protocol import ClonePrompt, FinishReason, Frame, Sampling, SynthesisRequest
from deployments.speech_detection import LATE_PATIENCE_S, frames_of
from deployments.talker.text.prompt import Prompt

# The alignment head's attention is _AHEAD_TOKENS ahead of the speech. With at most ATTENTIVE on the text it is noise.
_AHEAD_TOKENS = 0.75
ATTENTIVE = 0.2
# A frame that reads more than this many tokens before the furthest one reads a passage again.
_BACK_TOKENS = 10
# A good end leaves 2.8 positions unread at most, one without its last word 3.8 or more: docs/reliability.md. With more
# than _UNSAID_TOKENS left words are missing, with at most _SAID_TOKENS all is said.
_UNSAID_TOKENS, _SAID_TOKENS = 3.25, 2.8
_WITNESSES = 8  # the head is believed once this many frames have read the text; a resumed stream begins with none


@dataclass(frozen=True, slots=True)
class FrameLimit:
    """How many frames a sequence may have, and its finish reason at that number."""

    frames: int
    reason: FinishReason


class TextProgress:
    """How far speech has come in its text: where words are, and whether all was said when speech ends.

    An alignment head of the talker attends to the token that is spoken. Without one the number of frames serves as an
    estimate.
    """

    def __init__(self, *, starts: list[int] | None = None, token_frames: float | None = None) -> None:
        """`starts`, for word times: characters before each token, and in all; it grows with a live text.
        `token_frames`: how many frames a token may take; None with an alignment head.
        """
        self._starts = [] if starts is None else starts
        self._token_frames = token_frames
        self.num_unspoken = 0  # tokens at the end of the text that hold no letter or digit
        self._furthest = 0.0  # token that a frame has read
        self._num_read = 0  # frames that read the text
        self._num_reread = 0  # frames that read a passage again
        self._num_after = 0  # frames since all of the text was said
        self._place = 0.0  # of the next frame, in characters
        self._places: list[float] = []  # of the frames since the last `take`

    def begin(self, num_frames: int) -> None:
        """Speech continues after `num_frames` frames."""
        self._estimate(num_frames)

    def add_frame(self, num_frames: int) -> None:
        """The next frame was made, the last one of `num_frames`."""
        if self._starts:
            self._places.append(self._place)
            self._estimate(num_frames)

    def read(self, mass: float, moment: float, prompt: Prompt) -> None:
        """Find the next frame's place in the text: see `FrameNetworks.readings`."""
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
        """Why speech that ended by itself has ended: in a loop, if `patience` frames or more read a passage again."""
        if self._num_reread >= patience:
            return FinishReason.LOOP
        is_early = self._num_read >= _WITNESSES and self._num_unread(prompt) > _UNSAID_TOKENS
        return FinishReason.EARLY if is_early else FinishReason.STOP

    def overrun(self, *, patience: int) -> FinishReason | None:
        """Why speech that continues after its text is over; None: it may continue.

        `patience`: for how many frames it may; half as many if they read a passage again.
        """
        if not self._num_after:
            return None
        if 2 * min(self._num_after, self._num_reread) >= patience:
            return FinishReason.LOOP
        return FinishReason.RUNAWAY if self._num_after >= patience else None

    def take(self) -> tuple[float, ...]:
        """The places of the frames since the last call, in characters; empty without word times."""
        places, self._places = self._places, []
        return tuple(places)

    def _num_unread(self, prompt: Prompt) -> float:
        """Positions of the text beyond the furthest token, without the marks at its end, which need not be read."""
        return prompt.num_text_positions - self.num_unspoken - self._furthest

    def _estimate(self, num_frames: int) -> None:
        """Estimate the next frame's place in the text from the number of frames, if no alignment head reads it."""
        if self._starts and self._token_frames is not None:
            self._come_to(num_frames / self._token_frames)

    def _come_to(self, token: float) -> None:
        """The next frame speaks that token, unless an earlier frame has spoken a later one."""
        last = len(self._starts) - 1
        before = min(max(int(token), 0), last)
        after = min(before + 1, last)
        share = min(max(token - before, 0.0), 1.0)
        chars = self._starts[before] + share * (self._starts[after] - self._starts[before])
        self._place = max(self._place, chars)


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
        """Whether it is a segment of a batch job, so that no client waits for it."""
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
        """Add a frame, and end the sequence at its limit or if it continues with no words left."""
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
        """Number of frames for which speech may continue in a way that it should not."""
        return frames_of(LATE_PATIENCE_S, self.frame_s)

    def play(self, now_s: float) -> None:
        """Count the frames since the last call as delivered to the listener."""
        num_new, self._num_played = self.num_frames - self._num_played, self.num_frames
        if num_new:
            self.listener.deliver(num_new * self.frame_s, now_s=now_s)

    def sent_lead_s(self, now_s: float) -> float:
        """Seconds of audio that were sent and are not played yet."""
        return self.listener.lead_s(now_s) - (self._num_played - self.num_sent) * self.frame_s
