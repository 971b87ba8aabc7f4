"""An utterance, and its segments: the text, pause and speed of each."""

import hashlib
import logging
import re
import secrets
from collections.abc import AsyncGenerator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Self

from deployments.listener import Listener
from deployments.protocol import FinishReason, PcmChunk, SynthesisRequest
from deployments.serving import metrics
from serve_app.speech.stream_tail import StreamTail
from serve_app.text.languages import detected
from serve_app.text.splitting import split_text
from serve_app.text.spoken import TextSpan

logger = logging.getLogger(__name__)

_SEED_BITS = 53  # JavaScript's numbers hold this many, and a client may send the seed back
_SEED_BYTES = 8
SECOND_ATTEMPT = -1  # in place of the number of a segment in `segment_seed`; segments count from 0
_SPACES = re.compile(r"\s*+")


@dataclass(frozen=True, slots=True)
class Utterance:
    """A text that is spoken as one piece, and how the ingress cuts it into segments. It never leaves the ingress."""

    synthesis: SynthesisRequest  # with the whole text; a replica gets one with the text of each segment
    _: KW_ONLY
    spans: tuple[TextSpan, ...] = ()  # the text, cut at its pauses
    styles: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # fields of `synthesis` of spans in a style
    max_segment_chars: int | None = None  # None: the model's
    languages: tuple[str, ...] = ()  # each segment is in one of these; if it is uncertain, in the utterance's
    joins: bool = False  # each segment continues from the tail of the one before
    may_redraw: bool = False  # whether speech that ended badly is made again: see `second_attempt`
    live_text: "Segments | None" = None  # its segments, if the client still writes the text

    def changed(self, **fields: Any) -> Self:
        """The utterance with other values of these fields of `synthesis`."""
        return replace(self, synthesis=replace(self.synthesis, **fields))

    def second_attempt(self, seed: int | None = None) -> Self:
        """The last attempt at speech that ended badly before any of it was sent. Without a `seed`, one is drawn.

        `UtteranceSynthesizer` makes it if speech ends with its first samples. Answers that are sent whole and segments
        of jobs are judged only at their end: `WholeResponse` and `SegmentMaker` redraw them.
        """
        return replace(self.changed(seed=draw_seed() if seed is None else seed), may_redraw=False)


def draw_seed() -> int:
    """A seed for a request whose client gave none."""
    return secrets.randbits(_SEED_BITS)


def ended_badly(reason: FinishReason | None) -> bool:
    """Whether speech has ended, but not as it should."""
    return reason is not None and not reason.is_good


def count_redraw(request: SynthesisRequest, reason: FinishReason | None) -> None:
    """Count and log that `request` is made again. `reason`: why it ended, None if it ended without samples."""
    metrics.REDRAWN.record(1, reason=reason or "none", model=request.model)
    logger.warning("request %s ended before it was sent (%s): another seed", request.request_id, reason)


class Segments:
    """The parts of a text that are spoken one after the other, counted from 0. Here all are known from the start."""

    def __init__(self, utterance: Utterance) -> None:
        self._text = utterance.synthesis.text
        self.joins = utterance.joins
        self._segments: list[SynthesisRequest] = []
        self._pauses_s: dict[int, float] = {}  # in front of segments
        self._speeds: dict[int, float] = {}  # of segments that are faster or slower than the others
        self._styles: dict[int, str] = {}

    @classmethod
    def of(cls, utterance: Utterance, max_chars: int) -> "Segments":
        """The segments of a whole text: at most `max_chars` characters each, or the utterance's limit if lower."""
        max_chars = min(max_chars, utterance.max_segment_chars or max_chars)
        texts: list[str] = []
        segments = cls(utterance)
        for span in utterance.spans or (TextSpan(utterance.synthesis.text),):
            if span.pause_s:
                segments._pauses_s[len(texts)] = span.pause_s
            parts = split_text(span.text, max_chars)
            if span.speed != 1:
                segments._speeds |= dict.fromkeys(range(len(texts), len(texts) + len(parts)), span.speed)
            if span.style:
                segments._styles |= dict.fromkeys(range(len(texts), len(texts) + len(parts)), span.style)
            texts += parts
        segments._segments = _requests(utterance.synthesis, texts or [utterance.synthesis.text])
        for number, style in segments._styles.items():
            segments._segments[number] = replace(segments._segments[number], **utterance.styles.get(style, {}))
        if utterance.languages:
            segments._segments = [_in_its_language(request, utterance.languages) for request in segments._segments]
        return segments

    def plan(self) -> list[TextSpan]:
        """All segments, and an empty one if a pause ends the text."""
        texts = [request.text for request in self._segments]
        if len(texts) in self._pauses_s:
            texts.append("")
        return [
            TextSpan(text, self.pause_s(number), self.speed(number), self.style(number))
            for number, text in enumerate(texts)
        ]

    @property
    def spoken(self) -> str:
        """The text so far, in its spoken form."""
        return self._text

    @property
    def is_taken_in(self) -> bool:
        """Whether the spoken form of the whole text is known."""
        return True

    async def is_plenty(self) -> None:
        """Wait until the text is long enough for first audio, whatever the client writes next."""

    def smoothed(
        self, chunks: AsyncGenerator[PcmChunk, None], sample_rate: int, listener: Listener
    ) -> AsyncGenerator[PcmChunk, None]:
        """The audio, without clicks when it stops because the client writes nothing."""
        return chunks

    @property
    def is_single(self) -> bool:
        """Whether there is a single segment, without a pause or a speed of its own."""
        return len(self._segments) == 1 and not self._pauses_s and not self._speeds

    def known_segment(self, number: int) -> SynthesisRequest | None:
        """The request for a segment, None if there is none yet."""
        return self._segments[number] if number < len(self._segments) else None

    async def segment(self, number: int) -> SynthesisRequest | None:
        """The segment that `known_segment` returns once it is known; None after the last one."""
        return self.known_segment(number)

    def is_last(self, number: int) -> bool:
        """Whether it is certain that no segment and no pause follow."""
        return number == len(self._segments) - 1 and number + 1 not in self._pauses_s

    def start(self, number: int) -> int:
        """How many characters of the whole spoken text are before a segment."""
        return segment_start(self._text, [request.text for request in self._segments[:number]])

    def segment_text(self, number: int) -> str:
        """The text of a segment as far as it is known."""
        return self._segments[number].text

    def joined(self, number: int, before: StreamTail) -> SynthesisRequest | None:
        """The known segment, which continues from the end of the segment `before` if segments are joined. A segment
        with another recording does not, because it would keep the manner of the one before.
        """
        request = self.known_segment(number)
        last = self.known_segment(number - 1)
        if request is None or not self.joins or last is None or last.reference is not request.reference:
            return request
        return replace(request, tail=before.tail(self.segment_text(number - 1)))

    def pause_s(self, number: int) -> float:
        """Seconds of silence before a segment, or after the last one."""
        return self._pauses_s.get(number, 0.0)

    def speed(self, number: int) -> float:
        """How fast a segment is played."""
        return self._speeds.get(number, 1.0)

    def style(self, number: int) -> str:
        """The style in which a segment is spoken."""
        return self._styles.get(number, "")

    def close_segment(self, number: int) -> None:
        """Add no more text to a segment, because its speech has ended."""


def segment_start(text: str, before: list[str]) -> int:
    """Where in `text` a segment begins. Only whitespace separates the segments `before` it."""
    start = 0
    for segment in before:
        start = behind_space(text, start) + len(segment)
    return behind_space(text, start)


def behind_space(text: str, start: int) -> int:
    """The end of the whitespace that begins at `start`."""
    space = _SPACES.match(text, start)
    assert space is not None
    return space.end()


def _requests(request: SynthesisRequest, texts: list[str]) -> list[SynthesisRequest]:
    """One request for each segment. The first is `request` itself, with the segment's text.

    A later segment continues speech that is being heard. Its seed is derived from the request's seed and its number, so
    that the same request makes the same segments.
    """
    first, *later = texts
    return [replace(request, text=first, following=tuple(later))] + [
        segment_request(replace(request, text=text), number) for number, text in enumerate(later, start=1)
    ]


def _in_its_language(request: SynthesisRequest, languages: tuple[str, ...]) -> SynthesisRequest:
    return replace(request, language=detected(request.text, languages) or request.language)


def segment_request(request: SynthesisRequest, number: int) -> SynthesisRequest:
    """The request for the segment `number`, which is `request` itself for 0. Ids count from 1: "id", "id.2", "id.3"."""
    if number == 0:
        return request
    seed = segment_seed(request.seed, number)
    return replace(request, request_id=f"{request.request_id}.{number + 1}", seed=seed, continues=True, tail=None)


def segment_seed(seed: int, number: int) -> int:
    """The seed of the segment or part `number` of speech whose seed is `seed`; with SECOND_ATTEMPT, of a redraw."""
    if number == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}.{number + 1}".encode(), digest_size=_SEED_BYTES)
    return int.from_bytes(digest.digest())
