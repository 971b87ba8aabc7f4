"""Where a long text may be cut so that its parts can be spoken one after the other."""

import re
import unicodedata
from bisect import bisect_right
from itertools import accumulate

_CLOSING = "\"')\\]»”’」』）"  # noqa: RUF001
_PARAGRAPH = re.compile(r"\n\s*?\n")
_SENTENCE = re.compile(rf"[.!?؟।]++[{_CLOSING}]*+(?=\s)|[。！？]++[{_CLOSING}]*+")  # noqa: RUF001
_CLAUSE = re.compile(rf"[,;:—][{_CLOSING}]*+(?=\s)|\s[–-](?=\s)|[，、；：]")  # noqa: RUF001
_WORD = re.compile(r"\s(?=\S)")
_NOT_AN_END = re.compile(
    r"(?:\b(?:mr|mrs|ms|dr|prof|st|no|nos|fig|vol|vs|jr|sr|inc|ltd|approx|e\.g|i\.e|u\.s|ca|cf|bzw|z\.b)|\b[a-z])\.$",
    re.I,
)
_LONGEST_ABBREVIATION = 8
_WIDE_WEIGHT = 3  # an ideograph takes about as long to say as three letters


def split_text(text: str, max_chars: int) -> list[str]:
    """`text` in parts of at most `max_chars` characters, of which wide ones count three.

    The parts, which neither begin nor end with whitespace, hold every other character in order. Parts end where a
    paragraph does, else a sentence, a clause, a word; only a longer word is cut.
    """
    positions = [0, *accumulate(_WIDE_WEIGHT if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)]
    parts, start = [], 0
    while positions[-1] - positions[start] > max_chars:
        limit = max(start + 1, bisect_right(positions, positions[start] + max_chars) - 1)
        end = _best_end(text, start, limit)
        parts.append(text[start:end].strip())
        start = end
    return [part for part in (*parts, text[start:].strip()) if part]


def _best_end(text: str, start: int, limit: int) -> int:
    """Where the part that begins at `start` ends, at `limit` at the latest.

    An end in the first half is only taken between words: parts that are too short sound cut off from each other.
    """
    middle = (start + limit) // 2
    for pattern in (_PARAGRAPH, _SENTENCE, _CLAUSE):
        ends = [match.end() for match in pattern.finditer(text, start, min(limit + 1, len(text)))]
        good = [end for end in ends if middle < end <= limit and not (pattern is _SENTENCE and _abbreviates(text, end))]
        if good:
            return good[-1]
    words = [match.end() for match in _WORD.finditer(text, start, min(limit + 1, len(text)))]
    return words[-1] if words and words[-1] > start else _hard_end(text, start, limit)


def _abbreviates(text: str, end: int) -> bool:
    return _NOT_AN_END.search(text[max(0, end - _LONGEST_ABBREVIATION) : end]) is not None


def _hard_end(text: str, start: int, limit: int) -> int:
    """`limit`, or the place before it that does not tear a character from its accents and joiners."""
    end = limit
    while end > start + 1 and _continues(text, end):
        end -= 1
    return limit if _continues(text, end) else end


def _continues(text: str, position: int) -> bool:
    if position == len(text):
        return False
    return unicodedata.category(text[position])[0] == "M" or "\u200d" in text[position - 1 : position + 1]
