"""One request inside the engine, and how long its prompt and its speech may be."""

from dataclasses import dataclass, field

import numpy as np

from deployments.audio.listening import LATE_PATIENCE_S, frames_of, runaway_frames
from deployments.errors import InvalidRequest
from deployments.listener import Listener
from deployments.protocol import ClonePrompt, Codes, FinishReason, GenerateRequest, Sampling
from deployments.talker.prompt import Prompt
from deployments.talker.tokenizer import TextTokenizer

# The alignment head's attention is _AHEAD_TOKENS ahead of the speech. With at most ATTENTIVE on the text it is noise.
_AHEAD_TOKENS = 0.75
ATTENTIVE = 0.2
# Frames of LATE_PATIENCE_S that read so many tokens before the furthest one mean that a passage is spoken twice.
_BACK_TOKENS = 10
# A good end leaves 2.8 positions unread at most, one without its last word 3.8 or more: docs/reliability.md. With more
# than _UNSAID_TOKENS left words are missing, with at most _SAID_TOKENS all is said.
_UNSAID_TOKENS, _SAID_TOKENS = 3.25, 2.8
_WITNESSES = 8  # frames that read before a head is believed: a stream that goes on elsewhere has read none of its own


@dataclass(frozen=True, slots=True)
class FrameLimit:
    """How many frames a sequence may have, and its finish reason at that number."""

    frames: int
    reason: FinishReason


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in the engine. It has a row while it runs. `prompt` and `limit` grow while its text is written."""

    id: int
    request: GenerateRequest
    prompt: Prompt
    sampling: Sampling  # complete: no option is None
    limit: FrameLimit
    frames: list[Codes] = field(default_factory=list)  # each [groups]; a resumed sequence starts with its prefix
    frame_s: float = field(kw_only=True)  # seconds of audio of a frame
    row: int | None = None
    is_open: bool = False  # whether `AudioStreams` has it
    finish_reason: FinishReason | None = None
    token_starts: list[int] = field(default_factory=list)  # for word times: characters before each token, and in all
    next_reading: float = 0.0  # the next frame's place in the text, in characters
    readings: list[float] = field(default_factory=list)  # one for each frame after `num_sent`
    token_frames: float | None = None  # how many a token may take; None where the alignment head tells the readings
    num_reread: int = 0  # frames far before the furthest token
    num_unspoken: int = 0  # tokens at the end of the text that hold no letter or digit
    num_read: int = 0  # frames that read the text
    num_after: int = 0  # frames since all of the text was said
    furthest_token: float = 0.0  # that a frame has read
    clone_prompt: ClonePrompt | None = None  # until it is sent
    listener: Listener = field(default_factory=Listener)
    num_sent: int = field(init=False)  # frames that were sent
    _num_played: int = field(init=False)  # frames that `listener` counts; those of a prefix were played before

    def __post_init__(self) -> None:
        self.num_sent = self._num_played = len(self.frames)
        self._estimate()

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
    def num_text_tokens(self) -> int:
        return self.prompt.num_text_tokens

    @property
    def num_text_positions(self) -> int:
        """Positions that hold the text, and the one that ends it: who reads that has said all."""
        return self.num_text_tokens + 1

    @property
    def num_unread(self) -> float:
        """Positions of the text beyond the furthest token, without the marks at its end, which need not be read."""
        return self.num_text_positions - self.num_unspoken - self.furthest_token

    @property
    def signed_seed(self) -> int:
        """The seed's 64 bits as the signed integer that tensors hold."""
        return int(np.uint64(self.request.synthesis.seed).astype(np.int64))

    def append(self, frame: Codes) -> None:
        """Add a frame [groups], and end the sequence at its limit or where it goes on with no words left."""
        self.frames.append(frame)
        if self.token_starts:
            self.readings.append(self.next_reading)
            self._estimate()
        is_full = self.num_frames >= self.limit.frames
        self.finish_reason = self.limit.reason if is_full else self._overrun()

    def read(self, mass: float, moment: float) -> None:
        """Find the next frame's place in the text: see `FrameNetworks.readings`."""
        token = moment / mass - _AHEAD_TOKENS if mass > ATTENTIVE else None
        if token is not None:
            self.num_read += 1
            self.num_reread += token < self.furthest_token - _BACK_TOKENS
            self.furthest_token = max(self.furthest_token, token)
        is_said = self.prompt.has_all_text and self.num_unread <= _SAID_TOKENS
        self.num_after = self.num_after + 1 if is_said else 0
        if token is not None and self.token_starts:
            self._come_to(token)

    def end(self) -> None:
        """End the sequence: the talker sampled its end-of-speech code."""
        if self.num_reread >= frames_of(LATE_PATIENCE_S, self.frame_s):
            self.finish_reason = FinishReason.LOOP
            return
        is_early = self.num_read >= _WITNESSES and self.num_unread > _UNSAID_TOKENS
        self.finish_reason = FinishReason.EARLY if is_early else FinishReason.STOP

    def _overrun(self) -> FinishReason | None:
        """Why speech is over that goes on although all of its text is said; half the patience if it reads it again."""
        if not self.num_after or self.request.synthesis.ignore_eos:
            return None
        patience = frames_of(LATE_PATIENCE_S, self.frame_s)
        if 2 * min(self.num_after, self.num_reread) >= patience:
            return FinishReason.LOOP
        return FinishReason.RUNAWAY if self.num_after >= patience else None

    def _estimate(self) -> None:
        """Find the next frame's place in the text where nothing reads it: by the number of frames."""
        if self.token_starts and self.token_frames is not None:
            self._come_to(self.num_frames / self.token_frames)

    def _come_to(self, token: float) -> None:
        """The next frame speaks that token, unless an earlier frame has spoken a later one."""
        chars = np.interp(token, np.arange(len(self.token_starts)), self.token_starts)
        self.next_reading = max(self.next_reading, float(chars))

    def play(self, now_s: float) -> None:
        """Count the frames since the last call as delivered to the listener."""
        num_new, self._num_played = self.num_frames - self._num_played, self.num_frames
        if num_new:
            self.listener.deliver(num_new * self.frame_s, now_s=now_s)

    def sent_lead_s(self, now_s: float) -> float:
        """Seconds of audio that were sent and are not played yet."""
        return self.listener.lead_s(now_s) - (self._num_played - self.num_sent) * self.frame_s


class LengthLimits:
    """How many positions and frames a sequence may have."""

    def __init__(self, tokenizer: TextTokenizer, *, max_positions: int, frame_s: float) -> None:
        """`max_positions`: of one sequence, prompt and frames together. `frame_s`: seconds of audio of a frame."""
        self._tokenizer, self._max_positions, self._frame_s = tokenizer, max_positions, frame_s

    def frame_limit(self, request: GenerateRequest, sampling: Sampling, prompt: Prompt) -> FrameLimit:
        """The lowest limit of a sequence. Raises InvalidRequest where its prompt or a later segment is too long.

        The last of `max_new_tokens` becomes no frame, as in the official package. A text that is still being written
        has no limit for runaways, because its length is unknown.
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
        """Raise InvalidRequest where a later segment does not fit, before any of the text is spoken."""
        num_others = prompt.num_positions - prompt.num_text_tokens
        for text in texts:
            most = 2 * len(text.encode("utf-8", "replace"))  # a token has a byte or more of the text's NFC form
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
