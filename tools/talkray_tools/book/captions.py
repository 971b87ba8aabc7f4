"""Generate SubRip or WebVTT captions for a book: short captions if word timestamps are known, else one per sentence."""

import html
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

from serve_app.text.splitting import sentence_ends

MAX_CHARS = 84  # per caption with exact word timestamps: two lines of 42
_LINE_CHARS = 42
_SLACK_CHARS = 10  # a part may extend this far beyond the middle, to end at a word
_LONGEST_PAUSE_S = 0.7  # within a caption with exact word timestamps
_NO_SPACE = re.compile(r"[\u3000-\u30ff\u3400-\u9fff\uff00-\uffef]")


@dataclass(frozen=True, slots=True)
class Caption:
    """One caption's text, with its start and end in seconds."""

    text: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class TimedWord:
    """One word of a part, with its start and end in seconds of the part's audio."""

    text: str
    start_s: float
    end_s: float


def captions_of(told: Mapping[str, Any], start_s: float, speed: float = 1.0) -> list[Caption]:
    """Return the captions of one part, which begins at `start_s` of the book and plays at `speed`. `told` has the job's
    words and segments. If word times are estimated, captions end only where sentences do and never span segments.
    """
    words = [TimedWord(each["word"], float(each["start"]), float(each["end"])) for each in told.get("words", ())]
    segments = [each for each in told.get("segments", ()) if each.get("text", "").strip()]
    if not words:
        spans = [Caption(each["text"].strip(), each["start"], each["end"]) for each in segments]
    else:
        borders = [float(each["start"]) for each in segments[1:]]
        is_estimated = bool(told.get("estimated"))
        spans = [_caption(run) for run in _runs(words, borders, math.inf if is_estimated else _LONGEST_PAUSE_S)]
        if not is_estimated:
            spans = [_caption(part) for run in _runs(words, borders, _LONGEST_PAUSE_S) for part in _short(run)]
    return [Caption(each.text, start_s + each.start_s / speed, start_s + each.end_s / speed) for each in spans]


def _runs(words: Sequence[TimedWord], borders: Sequence[float], longest_pause_s: float) -> Iterator[list[TimedWord]]:
    """Split the words into sentences, and split sentences at segment boundaries and long pauses."""
    texts = list(accumulate((word.text for word in words), joined))
    ends = set(sentence_ends(texts[-1], 0, len(texts[-1])))
    run: list[TimedWord] = []
    for number, word in enumerate(words):
        if run:
            is_end = len(texts[number - 1]) in ends or _crosses(run[-1], word, borders)
            if is_end or word.start_s - run[-1].end_s > longest_pause_s:
                yield run
                run = []
        run.append(word)
    if run:
        yield run


def _crosses(word: TimedWord, following: TimedWord, borders: Sequence[float]) -> bool:
    return any(word.end_s - 0.001 <= border <= following.start_s + 0.001 for border in borders)


def _short(run: Sequence[TimedWord]) -> Iterator[list[TimedWord]]:
    """Split a sentence into the fewest parts of similar length. Each part has at most MAX_CHARS, unless one word is
    longer.
    """
    length = len(_caption(run).text)
    share = length / math.ceil(length / (MAX_CHARS - _SLACK_CHARS))
    ends = accumulate((word.text for word in run), joined)
    middles = (len(text) - len(word.text) / 2 for text, word in zip(ends, run, strict=True))
    placed = zip(middles, run, strict=True)
    yield from ([word for _, word in part] for _, part in groupby(placed, key=lambda each: each[0] // share))


def _caption(words: Sequence[TimedWord]) -> Caption:
    text = ""
    for word in words:
        text = joined(text, word.text)
    return Caption(text, words[0].start_s, words[-1].end_s)


def joined(text: str, word: str) -> str:
    """Append a word to a text. Adds a space unless the script is written without spaces."""
    is_tight = not text or (_NO_SPACE.match(text[-1]) and _NO_SPACE.match(word[:1]))
    return f"{text}{word}" if is_tight else f"{text} {word}"


def srt(captions: Sequence[Caption]) -> str:
    blocks = (
        f"{number}\n{clock(each.start_s, ',')} --> {clock(each.end_s, ',')}\n{_lines(each.text)}\n"
        for number, each in enumerate(_ordered(captions), start=1)
    )
    return "\n".join(blocks)


def vtt(captions: Sequence[Caption]) -> str:
    blocks = (
        f"{clock(each.start_s)} --> {clock(each.end_s)}\n{_lines(html.escape(each.text, quote=False))}\n"
        for each in _ordered(captions)
    )
    return "\n".join(["WEBVTT\n", *blocks])


def _ordered(captions: Sequence[Caption]) -> Iterator[Caption]:
    """Adjust the times so that captions do not overlap and each is shown long enough to read."""
    ended_s = 0.0
    for each in captions:
        start_s = max(each.start_s, ended_s)
        ended_s = max(each.end_s, start_s + 0.05)
        yield Caption(each.text, start_s, ended_s)


def clock(seconds: float, mark: str = ".") -> str:
    """Format a time as hours, minutes, seconds and milliseconds, with `mark` before the milliseconds."""
    ms = round(1000 * seconds)
    return f"{ms // 3_600_000:02}:{ms // 60_000 % 60:02}:{ms // 1000 % 60:02}{mark}{ms % 1000:03}"


def _lines(text: str) -> str:
    """Break text that is too long for one line at the space nearest its middle."""
    if len(text) <= _LINE_CHARS:
        return text
    spaces = [found.start() for found in re.finditer(" ", text)]
    if not spaces or len(text) > 2 * MAX_CHARS:
        return text
    middle = min(spaces, key=lambda at: abs(at - len(text) / 2))
    return f"{text[:middle]}\n{text[middle + 1 :]}"
