"""How long a prompt may be, and how many frames may follow it."""

from deployments.audio.runaway import runaway_frames
from deployments.errors import InvalidRequest
from deployments.protocol import FinishReason, GenerateRequest, Sampling
from deployments.talker.prompt import Prompt
from deployments.talker.sequence import FrameLimit
from deployments.talker.tokenizer import TextTokenizer


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
        room = self._max_positions - prompt.num_rows
        if room < 1:
            raise self._too_long(prompt.num_rows)
        self.check_following(request.synthesis.following, prompt)
        length = FrameLimit(min((sampling.max_new_tokens or 1) - 1, room), FinishReason.LENGTH)
        runaway = FrameLimit(runaway_frames(prompt.num_text_tokens, self._frame_s), FinishReason.RUNAWAY)
        if request.synthesis.ignore_eos or not prompt.is_whole or length.frames <= runaway.frames:
            return length
        return runaway

    def check_following(self, texts: tuple[str, ...], prompt: Prompt) -> None:
        """Raise InvalidRequest where a later segment of the same request would not fit: now it is not heard yet."""
        num_others = prompt.num_rows - prompt.num_text_tokens
        for text in texts:
            most = 2 * len(text.encode("utf-8", "replace"))  # tokens are bytes at least, of the text's normal form
            fits_anyway = num_others + most < self._max_positions
            num_rows = num_others + (most if fits_anyway else len(self._tokenizer.encode(text)))
            if num_rows >= self._max_positions:
                raise self._too_long(num_rows)

    def _too_long(self, num_rows: int) -> InvalidRequest:
        return InvalidRequest(
            f"input and reference make {num_rows} positions, at most {self._max_positions - 1} fit: shorten them",
            "input",
            "context_length_exceeded",
        )
