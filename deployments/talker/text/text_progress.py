"""How far speech has come in its text: where words are, and whether all was said when speech ends.

An alignment head of the talker attends to the token that is spoken. Without one the number of frames has to do.
"""

from deployments.protocol import FinishReason
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


class TextProgress:
    """Follows the frames of one sequence through the text of its prompt."""

    def __init__(self, *, starts: list[int] | None = None, token_frames: float | None = None) -> None:
        """`starts`, for word times: characters before each token, and in all; it grows with a live text.
        `token_frames`: how many frames a token may take; None if an alignment head tells.
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
        """Speech goes on behind `num_frames` frames."""
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
        """Why speech that goes on after its text is over; None: it may go on.

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
        """Find the next frame's place in the text where nothing reads it: by the number of frames."""
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
