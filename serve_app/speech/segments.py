"""Utterances, their segments, each with its text, pause and speed, and the tails from which later speech continues."""

import hashlib
import logging
import re
import secrets
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Self

import numpy as np

from deployments.listener import Listener
from deployments.protocol import FinishReason, Frame, PcmChunk, SynthesisRequest, Tail
from deployments.serving import metrics
from serve_app.text.characters import is_ideograph
from serve_app.text.languages import detected
from serve_app.text.splitting import split_text
from serve_app.text.spoken import TextSpan

logger = logging.getLogger(__name__)

_SEED_BITS = 53  # JavaScript numbers are exact to 53 bits, and clients may send seeds back
_SEED_BYTES = 8
SECOND_ATTEMPT = -1  # used instead of a segment number in `segment_seed`; segments count from 0
_SPACES = re.compile(r"\s*+")
_MOST_FRAMES, _LEAST_FRAMES = 25, 5  # length of a tail in frames, at most 2 s
_MOST_CHARS = 100  # of a tail


@dataclass(frozen=True, slots=True)
class Utterance:
    """Text that is spoken as one unit, and the settings for splitting it into segments. It stays in the ingress."""

    synthesis: SynthesisRequest  # has the complete text; replicas receive one segment's text
    _: KW_ONLY
    spans: tuple[TextSpan, ...] = ()  # the text, split at pauses
    styles: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # fields of `synthesis`, by style of the span
    max_segment_chars: int | None = None  # None: the model's limit
    languages: tuple[str, ...] = ()  # candidates for per-segment detection; the utterance's language is the fallback
    joins: bool = False  # each segment continues from the previous segment's tail
    may_redraw: bool = False  # whether to repeat speech that ended badly: see `redraw`
    ignored: Mapping[str, str] = field(default_factory=dict)  # further request fields without effect, and the reasons
    live_text: "LiveSegments | None" = None  # segments of text that the client is still writing

    def changed(self, **fields: Any) -> Self:
        """Return a copy with some fields of `synthesis` changed."""
        return replace(self, synthesis=replace(self.synthesis, **fields))

    def redraw(self, reason: FinishReason | None, *, is_silent: bool = False, seed: int | None = None) -> Self | None:
        """Return the second and last attempt at speech of which nothing has been sent, or None to keep the first.

        Speech is redrawn if it ended badly or is silent. `reason`: why it ended, or None if it has not ended.
        `seed`: for the second attempt; None: draw one. Speech is judged when the decision cannot be delayed: with its
        first samples (`UtteranceSynthesizer`), or a later segment shortly before its playback (`SegmentAudio`).
        Complete responses (`AudioSource`) and segments of jobs (`SegmentMaker`) are judged at their end.
        """
        if not self.may_redraw or not (is_silent or ended_badly(reason)):
            return None
        request_id, model = self.synthesis.request_id, self.synthesis.model
        metrics.REDRAWN.record(1, reason=reason or "none", model=model)
        logger.warning("request %s ended badly before it was sent (%s), trying another seed", request_id, reason)
        return replace(self.changed(seed=draw_seed() if seed is None else seed), may_redraw=False)


def draw_seed() -> int:
    """Return a random seed for a request that has none."""
    return secrets.randbits(_SEED_BITS)


def ended_badly(reason: FinishReason | None) -> bool:
    """Return whether speech has ended otherwise than after its text or at `max_new_tokens`. None: it has not ended."""
    return reason is not None and not reason.is_good


class StreamTail:
    """Collects a stream's last codes."""

    def __init__(self) -> None:
        self._codes: deque[Frame] = deque(maxlen=_MOST_FRAMES)
        self._num_frames = 0
        self._reason: FinishReason | None = None

    def add(self, chunk: PcmChunk) -> None:
        self._codes.extend(chunk.codes)
        self._num_frames += len(chunk.codes)
        self._reason = chunk.finish_reason

    @property
    def is_over(self) -> bool:
        return self._reason is not None

    def tail(self, text: str) -> Tail | None:
        """Return the tail of a stream that has spoken `text`, or None if the stream was cut off or is too short.

        The tail starts at a word boundary, assuming that all characters take the same time to speak.
        """
        text = text.strip()
        if self._reason is not FinishReason.STOP or not text:
            return None
        frames_per_char = self._num_frames / len(text)
        for start in range(max(0, len(text) - _MOST_CHARS), len(text)):
            num_frames = round((len(text) - start) * frames_per_char)
            if num_frames < _LEAST_FRAMES:
                break
            if num_frames <= len(self._codes) and _begins_word(text, start):
                gap = "" if is_ideograph(text[-1]) else " "
                return Tail(text[start:] + gap, np.stack(list(self._codes)[-num_frames:]))
        return None


class Segments:
    """Segments of a complete text, numbered from 0 and spoken in order."""

    def __init__(self, utterance: Utterance) -> None:
        self._text = utterance.synthesis.text
        self.joins = utterance.joins
        self._segments: list[SynthesisRequest] = []
        self._pauses_s: dict[int, float] = {}  # before each segment, by number
        self._speeds: dict[int, float] = {}  # by segment number, if not 1
        self._styles: dict[int, str] = {}

    @classmethod
    def of(cls, utterance: Utterance, max_chars: int) -> "Segments":
        """Split a complete text into segments of at most `max_chars` characters, or the utterance's limit if that is
        lower.
        """
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
        """Return all segments, plus an empty segment if the text ends with a pause."""
        texts = [request.text for request in self._segments]
        if len(texts) in self._pauses_s:
            texts.append("")
        return [
            TextSpan(text, self.pause_s(number), self.speed(number), self.style(number))
            for number, text in enumerate(texts)
        ]

    @property
    def is_single(self) -> bool:
        """Whether there is only one segment, with no pause or speed of its own."""
        return len(self._segments) == 1 and not self._pauses_s and not self._speeds

    def known_segment(self, number: int) -> SynthesisRequest | None:
        """Return the request for a segment, or None if the segment is not known yet."""
        return self._segments[number] if number < len(self._segments) else None

    async def segment(self, number: int) -> SynthesisRequest | None:
        """Wait until a segment is known and return its request. Return None after the last segment."""
        return self.known_segment(number)

    def is_last(self, number: int) -> bool:
        """Return whether this is definitely the last segment, with no pause after it."""
        return number == len(self._segments) - 1 and number + 1 not in self._pauses_s

    def start(self, number: int) -> int:
        """Return the number of characters of the normalized text that precede a segment."""
        return segment_start(self._text, [request.text for request in self._segments[:number]])

    def segment_text(self, number: int) -> str:
        """Return the known part of a segment's text."""
        return self._segments[number].text

    def joined(self, number: int, before: StreamTail) -> SynthesisRequest | None:
        """Return the known segment. If segments are joined, the segment continues from the tail of `before`. A segment
        that uses a different recording starts afresh, because it would otherwise imitate the previous speaking style.
        """
        request = self.known_segment(number)
        last = self.known_segment(number - 1)
        if request is None or not self.joins or last is None or last.reference is not request.reference:
            return request
        return replace(request, tail=before.tail(self.segment_text(number - 1)))

    def pause_s(self, number: int) -> float:
        """Return the seconds of silence before a segment, or after the last segment."""
        return self._pauses_s.get(number, 0.0)

    def speed(self, number: int) -> float:
        return self._speeds.get(number, 1.0)

    def style(self, number: int) -> str:
        return self._styles.get(number, "")

    def close_segment(self, number: int) -> None:
        """Stop adding text to a segment whose speech is finished."""


class LiveSegments(Segments, ABC):
    """Segments of a text that the client is still writing: `LiveText` of the extension `live`."""

    @property
    @abstractmethod
    def spoken(self) -> str:
        """Spoken form of the text received up to now."""

    @property
    @abstractmethod
    def is_text_complete(self) -> bool:
        """Whether the spoken form of the complete text is known."""

    @abstractmethod
    async def wait_for_first_text(self) -> None:
        """Wait until there is enough text to determine the first audio."""

    @abstractmethod
    def smoothed(
        self, chunks: AsyncGenerator[PcmChunk, None], sample_rate: int, listener: Listener
    ) -> AsyncGenerator[PcmChunk, None]:
        """Return `chunks`, smoothed to avoid clicks where audio stops because the client has not written more yet."""


def segment_start(text: str, before: list[str]) -> int:
    """Return the offset in `text` where a segment begins. Only whitespace separates the previous segments, `before`."""
    start = 0
    for segment in before:
        start = skip_whitespace(text, start) + len(segment)
    return skip_whitespace(text, start)


def skip_whitespace(text: str, start: int) -> int:
    """Return the end of the whitespace that starts at `start`."""
    space = _SPACES.match(text, start)
    assert space is not None
    return space.end()


def _requests(request: SynthesisRequest, texts: list[str]) -> list[SynthesisRequest]:
    """Return one request for each segment. The first is `request` itself with that segment's text.

    Later segments continue speech that is already playing. Their seeds are derived from the request's seed and the
    segment number, so equal requests produce equal segments.
    """
    first, *later = texts
    return [replace(request, text=first, following=tuple(later))] + [
        segment_request(replace(request, text=text), number) for number, text in enumerate(later, start=1)
    ]


def _in_its_language(request: SynthesisRequest, languages: tuple[str, ...]) -> SynthesisRequest:
    return replace(request, language=detected(request.text, languages) or request.language)


def segment_request(request: SynthesisRequest, number: int) -> SynthesisRequest:
    """Return the request for segment `number`. Segment 0 is `request` itself. Ids count from 1: "id", "id.2"."""
    if number == 0:
        return request
    seed = segment_seed(request.seed, number)
    return replace(request, request_id=f"{request.request_id}.{number + 1}", seed=seed, continues=True, tail=None)


def segment_seed(seed: int, number: int) -> int:
    """Derive the seed of segment or part `number` from `seed`. With SECOND_ATTEMPT, derive the seed of a redraw."""
    if number == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}.{number + 1}".encode(), digest_size=_SEED_BYTES)
    return int.from_bytes(digest.digest())


def _begins_word(text: str, place: int) -> bool:
    is_start = not place or text[place - 1].isspace() or is_ideograph(text[place])
    return is_start and not text[place].isspace()
