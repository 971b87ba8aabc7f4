"""Requests and their planned times, drawn before the run so that a slow server cannot reduce its own load."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate
from pathlib import Path

import numpy as np

# Sentences of three to fifty words, typical of telephone systems, voice agents and narration.
SENTENCES = tuple(Path(__file__).with_name("texts.txt").read_text(encoding="utf-8").splitlines())
PARAGRAPH = range(250, 351)  # characters
LONG = range(1450, 1551)
LONG_SEGMENTS, LONG_SEGMENT_S = 2, 22.0  # segments in a long text of planned length, and seconds per segment
LEAVES_S = 0.3  # seconds until a client that leaves early disconnects
INSTRUCTION = "Speak calmly, and a little slower than usual."
INTERRUPT_S = (0.2, 4.0)  # how many seconds of audio precede an interruption
FRAMES_PER_S = 12.5  # frame rate of Qwen3-TTS's codec: 80 ms per frame
MIN_S, MAX_S = 0.8, 30.0  # limits on randomly drawn response lengths


class Texts(StrEnum):
    """Source of the request texts."""

    MIXED = "mixed"  # SENTENCES unchanged
    ONE_SENTENCE = "one-sentence"
    PARAGRAPHS = "paragraphs"  # PARAGRAPH characters each, assembled from SENTENCES

    def choices(self) -> tuple[str, ...]:
        """Return the texts in a fixed order."""
        if self is Texts.MIXED:
            return SENTENCES
        if self is Texts.ONE_SENTENCE:
            return tuple(text for text in SENTENCES if not re.search(r"[.?!] ", text))
        return tuple(_paragraph(start) for start in range(len(SENTENCES)))


def _paragraph(start: int, chars: range = PARAGRAPH) -> str:
    """Join sentences into a paragraph, beginning at index `start` and wrapping around. Skip those that would exceed the
    limit.
    """
    said = ""
    for text in SENTENCES[start:] + SENTENCES[:start]:
        longer = f"{said} {text}".strip()
        if len(longer) in chars:
            return longer
        said = longer if len(longer) < chars.start else said
    raise AssertionError(f"no text of {chars.start} characters begins with {SENTENCES[start]!r}")


class RequestKind(StrEnum):
    """Kind of request in mixed traffic."""

    PARAGRAPH = "paragraph"
    LONG = "long text"
    LEAVES = "leaves early"  # disconnects after LEAVES_S
    WHOLE = "not streamed"  # requests a complete WAV file
    INSTRUCTED = "instruction"  # one sentence with a style instruction
    SLOW = "slow reader"  # reads no faster than the audio plays

    def choices(self) -> tuple[str, ...]:
        """Return the texts for this kind of request, in a fixed order."""
        if self is RequestKind.LONG:
            return tuple(_paragraph(start, LONG) for start in range(len(SENTENCES)))
        return (Texts.ONE_SENTENCE if self is RequestKind.INSTRUCTED else Texts.PARAGRAPHS).choices()


# Number of requests of each kind in every twenty requests, which are shuffled.
MIX = {
    RequestKind.PARAGRAPH: 10,
    RequestKind.LONG: 3,
    RequestKind.LEAVES: 2,
    RequestKind.WHOLE: 2,
    RequestKind.INSTRUCTED: 2,
    RequestKind.SLOW: 1,
}


class Profile(StrEnum):
    """How much the requests vary."""

    ALIKE = "alike"  # all requests are alike, except for their texts
    MIXED = "mixed"  # several kinds of requests, in the proportions given by MIX


class Arrivals(StrEnum):
    """Distribution of the gaps between requests."""

    POISSON = "poisson"  # independent callers: exponential gaps
    CONSTANT = "constant"  # equal gaps


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One planned request."""

    index: int
    planned_s: float  # since the start of the run
    text: str
    frames: int | None = None  # planned length of the response; None: the model decides
    interrupt_s: float | None = None  # seconds of audio before the client interrupts; None: no interruption
    kind: RequestKind | None = None  # set in mixed traffic


@dataclass(frozen=True, slots=True)
class Phase:
    """Part of a run with a constant offered rate."""

    name: str
    rate: float  # requests per second
    duration_s: float
    measured: bool = True  # False for a settling phase, which statistics leave out
    start_s: float = 0.0  # since the start of the run, set by `place`

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s

    def holds(self, planned_s: float) -> bool:
        """Return whether a request due at `planned_s` belongs to the phase."""
        return self.start_s <= planned_s < self.end_s


@dataclass(frozen=True, slots=True)
class SpeechLengths:
    """Log-normally distributed speech durations. `sigma` is the standard deviation of the logarithm.

    Models with random weights need a fixed length, because they either stop immediately or never stop.
    """

    median_s: float
    sigma: float

    def draw(self, count: int, *, seed: int) -> list[int]:
        """Draw the lengths of `count` responses in frames, each between MIN_S and MAX_S."""
        generator = np.random.default_rng((seed, 1))
        drawn_s = generator.lognormal(np.log(self.median_s), self.sigma, size=count)
        frames: list[int] = np.rint(np.clip(drawn_s, MIN_S, MAX_S) * FRAMES_PER_S).astype(int).tolist()
        return frames


def settled(rate: float, duration_s: float, *, settle_s: float) -> tuple[Phase, ...]:
    """Return a settling phase of `settle_s` and a measured phase, both at the same rate."""
    settling = (Phase("settling in", rate, settle_s, measured=False),) if settle_s else ()
    return (*settling, Phase("measured", rate, duration_s))


def place(phases: Sequence[Phase]) -> tuple[Phase, ...]:
    """Return the phases scheduled one after another, starting at 0."""
    starts_s = accumulate((phase.duration_s for phase in phases), initial=0.0)
    return tuple(replace(phase, start_s=start_s) for phase, start_s in zip(phases, starts_s, strict=False))


def phase_times(arrivals: Arrivals, phase: Phase, *, seed: Sequence[int]) -> list[float]:
    """Return arrival times in seconds at the phase's rate, within its duration. The list may be empty.

    Constant arrivals have equal gaps and start at 0. Poisson arrivals have exponential gaps.
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
    """Return the planned times of all requests in ascending order, in seconds since the start of the run."""
    placed = enumerate(place(phases))
    return [p.start_s + time_s for i, p in placed for time_s in phase_times(arrivals, p, seed=(seed, i))]


def choose_texts(count: int, *, seed: int, texts: Sequence[str] = SENTENCES) -> list[str]:
    """Choose `count` texts in an order that depends only on `seed`. No text repeats until all have been used."""
    generator = np.random.default_rng(seed)
    order: list[int] = []
    while len(order) < count:
        order.extend(generator.permutation(len(texts)).tolist())
    return [texts[index] for index in order[:count]]


def plan_requests(
    times_s: Sequence[float], *, seed: int, lengths: SpeechLengths | None = None, texts: Sequence[str] = SENTENCES
) -> list[ScheduledRequest]:
    """Plan one request for each time. All texts and lengths follow from the arguments."""
    count = len(times_s)
    said = choose_texts(count, seed=seed, texts=texts)
    frames = lengths.draw(count, seed=seed) if lengths else [None] * count
    return [ScheduledRequest(index, *request) for index, request in enumerate(zip(times_s, said, frames, strict=True))]


def interrupt(requests: Sequence[ScheduledRequest], share: float, *, seed: int) -> list[ScheduledRequest]:
    """Return the requests, interrupting about `share` of them at random points. `seed` determines which ones."""
    generator = np.random.default_rng((seed, 2))
    places_s = generator.uniform(*INTERRUPT_S, size=len(requests)).tolist()
    chosen = (generator.random(len(requests)) < share).tolist()
    each = zip(requests, places_s, chosen, strict=True)
    return [replace(request, interrupt_s=place_s) if is_chosen else request for request, place_s, is_chosen in each]


def mix(requests: Sequence[ScheduledRequest], *, seed: int) -> list[ScheduledRequest]:
    """Return requests at the same times. Their kinds follow MIX, shuffled within each group of twenty.

    If lengths are planned, each long text gets its own length.
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
