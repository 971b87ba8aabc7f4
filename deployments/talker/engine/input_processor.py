"""Conversion of requests to sequences, with limits on prompt and speech length.

A complete text becomes a sequence immediately. An unfinished text becomes one once there is enough for a prompt.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace

from deployments.errors import InvalidRequest
from deployments.protocol import FinishReason, ModelInfo, Sampling, SynthesisRequest
from deployments.speech_detection import runaway_frames
from deployments.talker.model.input_tables import MAX_PASS_POSITIONS
from deployments.talker.state.sequence import FrameLimit, Sequence, TextProgress
from deployments.talker.text.prompt import Prompt, PromptBuilder
from deployments.talker.text.tokenizer import IncrementalTokenizer, TextTokenizer

_TOKEN_S = 0.3  # initial estimate of a text token's duration
# Each measured utterance moves the estimate by this share of the difference. Measured durations are clamped to between
# half and twice _TOKEN_S, because speech may end early.
_SHOWS = 0.05
_LONG_CHARS = 16_384  # length above which tokenization takes more than 10 ms
_END_CHARS = 64  # number of characters at the end of a text to search for tokens that need not be spoken


@dataclass(slots=True)
class LiveRequest:
    """A request whose text the client is still writing."""

    request: SynthesisRequest
    tokens: IncrementalTokenizer
    body: list[int] = field(default_factory=list)  # token ids received
    sequence: Sequence | None = None  # set when there is enough text


class LengthLimits:
    """Limits on a sequence's positions and frames."""

    def __init__(self, tokenizer: TextTokenizer, *, max_positions: int, frame_s: float) -> None:
        """Limit the prompt and frames together to `max_positions`. A frame lasts `frame_s` seconds."""
        self._tokenizer, self._max_positions, self._frame_s = tokenizer, max_positions, frame_s

    def frame_limit(self, request: SynthesisRequest, sampling: Sampling, prompt: Prompt) -> FrameLimit:
        """Return the lowest limit for a sequence. Raises InvalidRequest if its prompt or a later segment is too long.

        As in the official package, the last of `max_new_tokens` does not produce a frame. There is no runaway limit for
        an unfinished text, because its length is unknown.
        """
        room = self._max_positions - prompt.num_positions
        if room < 1:
            raise self._too_long(prompt.num_positions)
        self.check_following(request.following, prompt)
        length = FrameLimit(min((sampling.max_new_tokens or 1) - 1, room), FinishReason.LENGTH)
        runaway = FrameLimit(runaway_frames(prompt.num_text_tokens, self._frame_s), FinishReason.RUNAWAY)
        if request.ignore_eos or not prompt.has_all_text or length.frames <= runaway.frames:
            return length
        return runaway

    def check_bytes(self, texts: Iterable[str]) -> None:
        """Raise InvalidRequest if a text has too many bytes, because tokenizing it would take seconds."""
        for text in texts:
            if (num_tokens := self._tokenizer.least_tokens(text)) >= self._max_positions:
                raise self._too_long(num_tokens)

    def check_following(self, texts: tuple[str, ...], prompt: Prompt) -> None:
        """Raise InvalidRequest if a later segment is too long, before the speech starts."""
        num_others = prompt.num_positions - prompt.num_text_tokens
        for text in texts:
            most = 2 * len(text.encode("utf-8", "replace"))  # a token covers at least one byte of the text's NFC form
            fits_anyway = num_others + most < self._max_positions
            num_positions = num_others + (most if fits_anyway else len(self._tokenizer.encode(text)))
            if num_positions >= self._max_positions:
                raise self._too_long(num_positions)

    def _too_long(self, num_positions: int) -> InvalidRequest:
        return InvalidRequest(
            f"input and reference need {num_positions} positions, at most {self._max_positions - 1} fit: shorten them",
            "input",
            "context_length_exceeded",
        )


class InputProcessor:
    """Factory of sequences for requests. All methods raise InvalidRequest if a sequence can never run."""

    def __init__(self, info: ModelInfo, prompts: PromptBuilder, limits: LengthLimits) -> None:
        self._info, self._prompts, self._limits = info, prompts, limits
        self._live: dict[int, LiveRequest] = {}
        self._token_s = _TOKEN_S

    def build_sequence(self, sequence_id: int, request: SynthesisRequest) -> Sequence | None:
        """Return a request's sequence. Returns None for a live request, whose text arrives through `append_text`."""
        self._limits.check_bytes(self._prompts.texts(request))
        request = self._prompts.with_codes(request)
        if request.mailbox is None:
            prompt = self._prompts.build(request)
            if request.tail is not None and prompt.num_positions > MAX_PASS_POSITIONS:  # it would need a second pass
                return self.build_sequence(sequence_id, replace(request, tail=None))
            sequence = self._make(sequence_id, request, prompt)
            self._count_unspoken(sequence, request.text)
            return sequence
        self._live[sequence_id] = LiveRequest(request, IncrementalTokenizer(self._prompts.tokenizer, gap=request.gap))
        return None

    def long_texts(self, request: SynthesisRequest) -> list[str]:
        """Return a request's texts that are slow to tokenize; empty if `build_sequence` would reject them by size."""
        texts = [text for text in self._prompts.texts(request) if len(text) > _LONG_CHARS]
        try:
            self._limits.check_bytes(texts)
        except InvalidRequest:
            return []
        return texts

    def sequence(self, sequence_id: int) -> Sequence | None:
        """Return a live request's sequence; None before there is enough text, or once its text or speech has ended."""
        live = self._live.get(sequence_id)
        return None if live is None else live.sequence

    def append_text(self, sequence_id: int, text: str, *, is_last: bool) -> Sequence | None:
        """Return the sequence if its text has grown or is now long enough; None if it has ended or needs more text."""
        live = self._live.get(sequence_id)
        if live is None:
            return None
        live.body += (more := live.tokens.feed(text, is_last=is_last))
        if is_last:
            del self._live[sequence_id]
        if live.sequence is not None:
            self._extend(live.sequence, more, is_last=is_last)
        elif is_last or len(live.body) >= self._prompts.least_tokens(live.request):
            prompt = self._prompts.build_from_ids(live.request, live.body, has_all_text=is_last)
            live.sequence = self._make(sequence_id, live.request, prompt, live.tokens)
        if is_last and live.sequence is not None:
            self._count_unspoken(live.sequence, live.body)
        return live.sequence

    def close(self, sequence_id: int) -> None:
        """Stop accepting text for a sequence."""
        self._live.pop(sequence_id, None)

    def measure_pace(self, sequence: Sequence) -> None:
        """Update the estimated token duration, which places later words, based on speech that ended normally."""
        if sequence.finish_reason is FinishReason.STOP:
            took_s = sequence.num_frames * sequence.frame_s / sequence.prompt.num_text_positions
            self._token_s += _SHOWS * (min(max(took_s, _TOKEN_S / 2), 2 * _TOKEN_S) - self._token_s)

    def _make(
        self, sequence_id: int, request: SynthesisRequest, prompt: Prompt, tokens: IncrementalTokenizer | None = None
    ) -> Sequence:
        """Create a sequence. `tokens` is set for a live request."""
        model = self._prompts.config
        starts = list[int]()
        if request.word_times:
            text = request.text.lstrip()
            places = self._prompts.tokenizer.encode_body(text, gap=request.gap)[1]
            starts = [*places, len(text)] if tokens is None else tokens.starts
        sampling = with_defaults(request.sampling, model.generation)
        limit = self._limits.frame_limit(request, sampling, prompt)
        prefix = [] if request.prefix is None else list(request.prefix)
        frame_s = self._info.frame_s
        clone_prompt = self._prompts.clone_prompt(request)
        token_frames = self._token_s / frame_s if model.text.alignment_head is None else None
        progress = TextProgress(starts=starts, token_frames=token_frames)
        return Sequence(
            sequence_id, request, prompt, sampling, limit, progress, prefix, frame_s=frame_s, clone_prompt=clone_prompt
        )

    def _count_unspoken(self, sequence: Sequence, text: str | list[int]) -> None:
        """Count the tokens at the end of `text`, or of its token ids, that need not be spoken.

        The count is only needed if there is an alignment head.
        """
        if self._prompts.config.text.alignment_head is not None:
            tokenizer = self._prompts.tokenizer
            ids = tokenizer.encode(text[-_END_CHARS:]) if isinstance(text, str) else text
            sequence.progress.num_unspoken = tokenizer.num_unspoken(ids)

    def _extend(self, sequence: Sequence, more: list[int], *, is_last: bool) -> None:
        sequence.prompt = self._prompts.extend(sequence.prompt, more, has_all_text=is_last)
        sequence.limit = self._limits.frame_limit(sequence.request, sequence.sampling, sequence.prompt)


def with_defaults(asked: Sampling, defaults: Sampling) -> Sampling:
    """Return `asked`, with each None replaced by its default."""
    return replace(defaults, **{key: value for key, value in asdict(asked).items() if value is not None})
