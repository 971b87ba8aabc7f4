"""Requests and their times, drawn before the run so that a slow server cannot slow down its own load."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate
from pathlib import Path

import numpy as np

# From three words to a short paragraph, typical of telephone systems, voice agents and narrators.
SENTENCES = tuple(Path(__file__).with_name("texts.txt").read_text(encoding="utf-8").splitlines())
PARAGRAPH = range(250, 351)  # characters
LONG = range(1450, 1551)
LONG_SEGMENTS, LONG_SEGMENT_S = 2, 22.0  # how Talkray splits a long text, if lengths are planned
LEAVES_S = 0.3  # after which a client that leaves early disconnects
INSTRUCTION = "Speak calmly, and a little slower than usual."
INTERRUPT_S = (0.2, 4.0)  # of audio, after which a turn is interrupted
FRAMES_PER_S = 12.5  # of Qwen3-TTS's codec: 80 ms each
MIN_S, MAX_S = 0.8, 30.0  # of answers whose lengths are drawn


class Texts(StrEnum):
    """The texts of requests."""

    MIXED = "mixed"  # SENTENCES as they are
    ONE_SENTENCE = "one-sentence"
    PARAGRAPHS = "paragraphs"  # of PARAGRAPH characters, assembled from SENTENCES

    def choices(self) -> tuple[str, ...]:
        """The texts, always in the same order."""
        if self is Texts.MIXED:
            return SENTENCES
        if self is Texts.ONE_SENTENCE:
            return tuple(text for text in SENTENCES if not re.search(r"[.?!] ", text))
        return tuple(_paragraph(start) for start in range(len(SENTENCES)))


def _paragraph(start: int, chars: range = PARAGRAPH) -> str:
    """Join sentences from number `start` on, wrapping around, until they make a paragraph; skips those that are too
    long.
    """
    said = ""
    for text in SENTENCES[start:] + SENTENCES[:start]:
        longer = f"{said} {text}".strip()
        if len(longer) in chars:
            return longer
        said = longer if len(longer) < chars.start else said
    raise AssertionError(f"no text of {chars.start} characters begins with {SENTENCES[start]!r}")


class RequestKind(StrEnum):
    """The kind of a request of mixed traffic."""

    PARAGRAPH = "paragraph"
    LONG = "long text"
    LEAVES = "leaves early"  # after LEAVES_S
    WHOLE = "not streamed"  # a WAV file
    INSTRUCTED = "instruction"  # and one sentence
    SLOW = "slow reader"  # reads as fast as it plays

    def choices(self) -> tuple[str, ...]:
        """The texts, always in the same order."""
        if self is RequestKind.LONG:
            return tuple(_paragraph(start, LONG) for start in range(len(SENTENCES)))
        return (Texts.ONE_SENTENCE if self is RequestKind.INSTRUCTED else Texts.PARAGRAPHS).choices()


# Of twenty requests, in any order.
MIX = {
    RequestKind.PARAGRAPH: 10,
    RequestKind.LONG: 3,
    RequestKind.LEAVES: 2,
    RequestKind.WHOLE: 2,
    RequestKind.INSTRUCTED: 2,
    RequestKind.SLOW: 1,
}


class Profile(StrEnum):
    """How much requests differ."""

    ALIKE = "alike"  # except for their texts
    MIXED = "mixed"  # as in MIX


class Arrivals(StrEnum):
    """How the gaps between requests are distributed."""

    POISSON = "poisson"  # independent callers: exponential gaps
    CONSTANT = "constant"  # equal gaps


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request of the plan."""

    index: int
    planned_s: float  # since the start of the run
    text: str
    frames: int | None = None  # planned length of the answer; None: the model decides
    interrupt_s: float | None = None  # seconds of its audio before an interruption; None: not interrupted
    kind: RequestKind | None = None  # of mixed traffic


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the run with one offered rate."""

    name: str
    rate: float  # requests per second
    duration_s: float
    measured: bool = True  # False: the server settles in; sent and traced, but not in the statistics
    start_s: float = 0.0  # since the start of the run, once the phase is placed in one

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s

    def holds(self, planned_s: float) -> bool:
        """Whether a request due at this time belongs to the phase."""
        return self.start_s <= planned_s < self.end_s


@dataclass(frozen=True, slots=True)
class SpeechLengths:
    """Log-normal durations of speech: `median_s`, and `sigma`, the standard deviation of their logarithm.

    For servers that accept a length: random weights would otherwise never stop, or stop at once.
    """

    median_s: float
    sigma: float

    def draw(self, count: int, *, seed: int) -> list[int]:
        """Frames of `count` answers, each between MIN_S and MAX_S."""
        generator = np.random.default_rng((seed, 1))
        drawn_s = generator.lognormal(np.log(self.median_s), self.sigma, size=count)
        frames: list[int] = np.rint(np.clip(drawn_s, MIN_S, MAX_S) * FRAMES_PER_S).astype(int).tolist()
        return frames


def settled(rate: float, duration_s: float, *, settle_s: float) -> tuple[Phase, ...]:
    """Phases of one rate: `settle_s` for the server to settle in, then a measured one."""
    settling = (Phase("settling in", rate, settle_s, measured=False),) if settle_s else ()
    return (*settling, Phase("measured", rate, duration_s))


def place(phases: Sequence[Phase]) -> tuple[Phase, ...]:
    """The phases placed one after another, starting at 0."""
    starts_s = accumulate((phase.duration_s for phase in phases), initial=0.0)
    return tuple(replace(phase, start_s=start_s) for phase, start_s in zip(phases, starts_s, strict=False))


def phase_times(arrivals: Arrivals, phase: Phase, *, seed: Sequence[int]) -> list[float]:
    """Arrival times in seconds at the phase's rate, all before its duration; may be empty.

    Constant arrivals have equal gaps starting at 0, Poisson arrivals exponential gaps.
    """
    mean = phase.rate * phase.duration_s
    enough = int(mean + 10 * mean**0.5 + 20)
    if arrivals is Arrivals.CONSTANT:
        times = np.arange(enough) / phase.rate
    else:
        times = np.random.default_rng(seed).exponential(1 / phase.rate, size=enough).cumsum()
    inside: list[float] = times[times < phase.duration_s].tolist()
    return inside


def arrival_times(arrivals: Arrivals, phases: Sequence[Phase], *, seed: int) -> list[float]:
    """Planned times of all requests in ascending order, in seconds since the start of the run."""
    placed = enumerate(place(phases))
    return [p.start_s + time_s for i, p in placed for time_s in phase_times(arrivals, p, seed=(seed, i))]


def choose_texts(count: int, *, seed: int, texts: Sequence[str] = SENTENCES) -> list[str]:
    """`count` of `texts` in an order that depends only on `seed`; every text is used once before any repeats."""
    generator = np.random.default_rng(seed)
    order: list[int] = []
    while len(order) < count:
        order.extend(generator.permutation(len(texts)).tolist())
    return [texts[index] for index in order[:count]]


def plan_requests(
    times_s: Sequence[float], *, seed: int, lengths: SpeechLengths | None = None, texts: Sequence[str] = SENTENCES
) -> list[ScheduledRequest]:
    """One request for each of these times; the arguments determine texts and lengths."""
    count = len(times_s)
    said = choose_texts(count, seed=seed, texts=texts)
    frames = lengths.draw(count, seed=seed) if lengths else [None] * count
    return [ScheduledRequest(index, *request) for index, request in enumerate(zip(times_s, said, frames, strict=True))]


def interrupt(requests: Sequence[ScheduledRequest], share: float, *, seed: int) -> list[ScheduledRequest]:
    """The same requests, about `share` of them interrupted at a random point; `seed` determines which and where."""
    generator = np.random.default_rng((seed, 2))
    places_s = generator.uniform(*INTERRUPT_S, size=len(requests)).tolist()
    chosen = (generator.random(len(requests)) < share).tolist()
    each = zip(requests, places_s, chosen, strict=True)
    return [replace(request, interrupt_s=place_s) if is_chosen else request for request, place_s, is_chosen in each]


def mix(requests: Sequence[ScheduledRequest], *, seed: int) -> list[ScheduledRequest]:
    """The same times and lengths, with mixed kinds: every twenty requests contain the kinds in MIX, in random order.

    A long text gets its own length if lengths are planned.
    """
    generator = np.random.default_rng((seed, 3))
    twenty = [kind for kind, count in MIX.items() for _ in range(count)]
    texts = {kind: iter(choose_texts(len(requests), seed=seed, texts=kind.choices())) for kind in MIX}
    long_frames = round(LONG_SEGMENTS * LONG_SEGMENT_S * FRAMES_PER_S)
    mixed: list[ScheduledRequest] = []
    while len(mixed) < len(requests):
        some = requests[len(mixed) : len(mixed) + len(twenty)]
        for request, number in zip(some, generator.permutation(len(twenty)).tolist(), strict=False):
            kind = twenty[number]
            frames = long_frames if request.frames is not None and kind is RequestKind.LONG else request.frames
            mixed.append(replace(request, text=next(texts[kind]), frames=frames, kind=kind))
    return mixed
