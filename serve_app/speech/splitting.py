"""Where a long text may be cut, also while it is being written."""

import re
import sys
import unicodedata
from bisect import bisect_right
from itertools import accumulate

_CLOSING = "\"')\\]»”’」』）"  # noqa: RUF001
_PARAGRAPH = re.compile(r"\n\s*?\n")
_SENTENCE = re.compile(rf"[.!?؟।]++[{_CLOSING}]*+(?=\s)|[。！？]++[{_CLOSING}]*+")  # noqa: RUF001
_CLAUSE = re.compile(rf"[,;:—][{_CLOSING}]*+(?=\s)|\s[–-](?=\s)|[，、；：]")  # noqa: RUF001
_WORD = re.compile(r"\s(?=\S)")
_SPACE = re.compile(r"\s")
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
    positions = _positions(text)
    parts, start = [], 0
    while positions[-1] - positions[start] > max_chars:
        limit = max(start + 1, bisect_right(positions, positions[start] + max_chars) - 1)
        end = _best_end(text, start, limit)
        parts.append(text[start:end].strip())
        start = end
    return [part for part in (*parts, text[start:].strip()) if part]


class LiveSplit:
    """Segments of a text that is being spoken while it comes.

    A segment ends with the first sentence whose end is in its second half, or the first clause in its last quarter, or
    else before the word that is too much. Each character is measured once, however the text is cut.
    """

    def __init__(self, max_chars: int) -> None:
        """`max_chars` as in `split_text`."""
        self._max_chars = max_chars
        self._text = ""  # of the segment
        self._given = 0  # characters of it
        self._positions = [0]  # of `_text`
        self._space = self._looked = 0  # its last whitespace; no end of a sentence or clause is before this place

    def feed(self, text: str) -> list[str]:
        """The text that can be spoken now, of the current segment and of later ones."""
        texts = [""]
        for start in range(0, len(text), self._max_chars):
            self._add(text[start : start + self._max_chars])
            while end := self._end():
                texts[-1] += self._take(end)
                texts.append("")
                self.restart()
            texts[-1] += self._take(max(self._reached(3), self._space))
        return texts

    def finish(self) -> list[str]:
        return [self._take(len(self._text))]

    def restart(self) -> None:
        """A segment has ended with the text so far."""
        rest = self._text[self._given :]
        self._text, self._given, self._positions, self._space, self._looked = "", 0, [0], 0, 0
        self._add(rest)

    def _add(self, text: str) -> None:
        text = text if self._given else (self._text + text).lstrip()
        if not self._given:
            self._text, self._positions = "", [0]
        before = len(self._text)
        self._text += text
        self._positions += _positions(text, self._positions.pop())
        self._space = max((match.start() for match in _SPACE.finditer(self._text, before)), default=self._space)

    def _take(self, end: int) -> str:
        start, self._given = self._given, max(self._given, end)
        return self._text[start : self._given]

    def _reached(self, quarters: int) -> int:
        """The last place in the text with so many quarters of a segment, or less, before it."""
        return bisect_right(self._positions, self._max_chars * quarters / 4) - 1

    def _end(self) -> int:
        """Where the segment ends, 0 as long as it may go on."""
        text, (middle, late, limit) = self._text, map(self._reached, (2, 3, 4))
        if middle >= len(text) - 1:
            return 0
        sentences = [end for end in _ends(_SENTENCE, text, self._looked) if end > middle]
        clauses = [end for end in _ends(_CLAUSE, text, self._looked) if end > late]
        first = min(sentences + clauses, default=len(text))
        if first < len(text) and first <= limit:
            return first
        self._looked = self._space
        if self._positions[-1] <= self._max_chars:
            return 0
        words = _ends(_WORD, text, late, limit + 1)
        return words[-1] if words else max(1, limit)


def _positions(text: str, before: int = 0) -> list[int]:
    """The length before each place in `text` and before its end, in narrow characters, after `before` of them."""
    if text.isascii():
        return list(range(before, before + len(text) + 1))
    widths = (_WIDE_WEIGHT if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)
    return list(accumulate(widths, initial=before))


def _best_end(text: str, start: int, limit: int) -> int:
    """Where the part that begins at `start` ends, at `limit` at the latest.

    An end in the first half is only taken between words: parts that are too short sound cut off from each other.
    """
    middle = (start + limit) // 2
    for pattern in (_PARAGRAPH, _SENTENCE, _CLAUSE):
        if good := [end for end in _ends(pattern, text, start, limit + 1) if middle < end <= limit]:
            return good[-1]
    words = _ends(_WORD, text, start, limit + 1)
    return words[-1] if words and words[-1] > start else _hard_end(text, start, limit)


def _ends(pattern: re.Pattern[str], text: str, start: int, stop: int = sys.maxsize) -> list[int]:
    """Where matches of `pattern` within these places end; an abbreviation ends no sentence."""
    ends = [match.end() for match in pattern.finditer(text, start, stop)]
    if pattern is not _SENTENCE:
        return ends
    return [end for end in ends if not _NOT_AN_END.search(text[max(0, end - _LONGEST_ABBREVIATION) : end])]


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
