"""Splits long texts into parts, including texts that are still being written."""

# ruff: noqa: RUF001 (part of this file is about characters that look alike)

import re
import unicodedata
from bisect import bisect_right
from functools import partial
from itertools import accumulate

_CLOSING = "\"')\\]»”’」』）》"
_CJK = "\u3040-\u30ff\u3400-\u9fff"
_PARAGRAPH = re.compile(r"\n\s*?\n")
_SENTENCE = re.compile(
    rf"(?<![.!?؟।…])[.!?؟।…]++(?:[\xa0\u202f ]?»|[{_CLOSING}“])*+(?=\s|\Z)"
    rf"|(?<=[A-Za-z])[.!?]++(?=[{_CJK}])|[。！？]++[{_CLOSING}]*+"
)
_CLAUSE = re.compile(rf"[,;:—][{_CLOSING}“]*+(?=\s)|\s[–-](?=\s)|[，、；：]")
_WORD = re.compile(r"\s(?=\S)")
_SPACE = re.compile(r"\s")
# A sentence does not end after these abbreviations or after a single letter, except English "I".
_ABBREVIATIONS = (
    r"mrs?|ms|dra?|profa?|ste?|sra?|srta|sigg?|dott|ing|avv|hr|fr|fa|mme?|mlle|pr|rev|gen|exm[oa]|jr|av|ul|dña|ee|uu"
    r"|e\.g|i\.e|z\.b|d\.h|u\.a|p\.ex|p\.es|p\.ej|bzw|ca|cfr?|vgl|ggf|inkl|zzgl|evtl|bspw|approx|aprox|env|vs"
    r"|ул|им|проф|акад|гр|см|напр|т\.е|inc|ltd|u\.s"
)
_BEFORE_NUMBERS = "nos?|nr|figs?|vol|pp|págs?|pag|art|cap|kap|abb|bd|núm|nº|tel|стр|рис|гл"
_NOT_AN_END = re.compile(
    rf"(?:\b(?:{_ABBREVIATIONS}|[^\W\d_])\.|《[^》]*》"
    r"|\b(?:am|im|vom|zum|zur|beim|der|die|das|dem|den|des) \d{1,3}\.|\d{4}\. \d\d?\. \d\d?\.)$",
    re.I,
)
_NOT_BEFORE_NUMBERS = re.compile(rf"(?:\b(?:{_BEFORE_NUMBERS})|str|\d)\.$", re.I)
_LISTED = re.compile(r"(^|\D[.!?]\s)\d\d?\.$")
_I = re.compile(r"[a-z] I\.$")
_DOTS = re.compile(r"(?:\.\.|…)\W*$")
_NEXT = re.compile(r"[\s—–\-«„“\"'(\[¿¡‘「『]*+(.)", re.S)
# Speech tags after a quotation, such as "he said".
_SAID = re.compile(rf"と|って|\s*(?:라고|이라고|하고|고)|[{_CJK}]{{1,4}}(?:说道?|[问喊答叫]道?)[。，：]")
_CONTEXT = 24  # characters to check before an end
_AHEAD = 8  # characters to check after an end
_WIDE_WEIGHT = 3  # an ideograph takes about as long to speak as three letters


def split_text(text: str, max_chars: int) -> list[str]:
    """Split `text` into parts of at most `max_chars` characters. Wide characters count as three.

    Parts neither begin nor end with whitespace, and contain all other characters in order. A part ends at the end of a
    paragraph or, failing that, of a sentence, a clause or a word. Only words longer than a part are split.
    """
    positions = _positions(text)
    parts, start = [], 0
    while positions[-1] - positions[start] > max_chars:
        limit = max(start + 1, bisect_right(positions, positions[start] + max_chars) - 1)
        middle = bisect_right(positions, positions[start] + max_chars / 2) - 1
        end = _best_end(text, start, middle, limit)
        parts.append(text[start:end].strip())
        start = end
    return [part for part in (*parts, text[start:].strip()) if part]


class LiveSplit:
    """Splitter for text that is spoken while the client is still writing it.

    A segment ends with the first sentence whose end is in the second half of the segment, or with the first clause in
    the last quarter. Otherwise, it ends before the first word that does not fit. Each character is measured only once,
    however the text arrives.
    """

    def __init__(self, max_chars: int) -> None:
        """Create the splitter. `max_chars`: see `split_text`."""
        self._max_chars = max_chars
        self._text = ""  # text of the current segment
        self._given = 0  # number of characters already returned
        self._positions = [0]  # positions in `_text`
        self._sure = 0  # the segment ends at or after this offset
        self._space = self._looked = 0  # last whitespace; sentences and clauses before `_looked` were checked

    def feed(self, text: str) -> list[str]:
        """Return the text that can be spoken now, in one part per segment."""
        texts = [""]
        for start in range(0, len(text), self._max_chars):
            self._add(text[start : start + self._max_chars])
            while end := self._end():
                texts[-1] += self._take(end)
                texts.append("")
                self.restart()
            texts[-1] += self._take(min(max(self._reached(3), self._space), self._sure))
        return texts

    def finish(self) -> list[str]:
        return [self._take(len(self._text))]

    def restart(self) -> None:
        """Start a new segment after the current text."""
        rest = self._text[self._given :]
        self._text = ""
        self._given = 0
        self._positions = [0]
        self._space = 0
        self._looked = 0
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
        """Return the last offset with at most this many quarters of a segment before it."""
        return bisect_right(self._positions, self._max_chars * quarters / 4) - 1

    def _end(self) -> int:
        """Return the end of the segment, or 0 while the segment may continue."""
        text = self._text
        middle, late, limit = map(self._reached, (2, 3, 4))
        self._sure = len(text)
        if middle >= len(text) - 1:
            return 0
        known = len(text) - _AHEAD  # whether a sentence ends here depends on the text that follows
        matches = [match for match in _SENTENCE.finditer(text, self._looked) if match.end() > middle]
        open_matches = [match for match in matches if match.end() > known]
        ends = [match.end() for match in matches if match.end() > known or _ends_sentence(text, match.end())]
        first = min(
            ends + [end for end in _ends(_CLAUSE, text, self._looked, len(text)) if end > late], default=len(text)
        )
        if first <= min(known, limit):
            return first
        words = _ends(_WORD, text, late, limit + 1) if len(text) > limit else [len(text)]
        last = words[-1] if words else max(1, limit)
        if limit <= known:
            return last
        self._sure = min(first, last)
        self._looked = min(self._space, self._looked if first < len(text) else len(text))
        self._looked = min([self._looked, *(match.start() for match in open_matches)])
        return 0


def _positions(text: str, before: int = 0) -> list[int]:
    """Return the cumulative length at each offset of `text`, in narrow characters, starting from `before`."""
    if text.isascii():
        return list(range(before, before + len(text) + 1))
    widths = (_WIDE_WEIGHT if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)
    return list(accumulate(widths, initial=before))


def _best_end(text: str, start: int, middle: int, limit: int) -> int:
    """Return the end of the part that begins at `start`, at most `limit`.

    In the first half of the part, up to `middle`, ends of paragraphs, sentences and clauses are ignored, because very
    short parts sound disjointed.
    """
    for find_ends in (partial(_ends, _PARAGRAPH), sentence_ends, partial(_ends, _CLAUSE)):
        if good := [end for end in find_ends(text, start, limit + 1) if middle < end <= limit]:
            return good[-1]
    words = _ends(_WORD, text, start, limit + 1)
    return words[-1] if words and words[-1] > start else _hard_end(text, start, limit)


def sentence_ends(text: str, start: int, stop: int) -> list[int]:
    """Return where sentences end, from `start` up to `stop`."""
    return [end for end in _ends(_SENTENCE, text, start, stop) if _ends_sentence(text, end)]


def _ends(pattern: re.Pattern[str], text: str, start: int, stop: int) -> list[int]:
    return [match.end() for match in pattern.finditer(text, start, stop)]


def _ends_sentence(text: str, end: int) -> bool:
    before, behind = text[max(0, end - _CONTEXT) : end], text[end : end + _AHEAD]
    if _NOT_AN_END.search(before) and not _I.search(before):
        return False
    if listed := _LISTED.search(before):
        opener = before[: listed.end(1)].rstrip()
        return _NOT_AN_END.search(opener) is not None or _NOT_BEFORE_NUMBERS.search(opener) is not None
    match = _NEXT.match(behind)
    following = match[1] if match else ""
    if following.islower() or (following.isdigit() and _NOT_BEFORE_NUMBERS.search(before)):
        return False
    is_uncased = following.isalpha() and not following.isupper()
    if is_uncased and _DOTS.search(before) and behind[:1].isspace():
        return False
    return not (before[-1] in _CLOSING + "“" and _SAID.match(behind))


def _hard_end(text: str, start: int, limit: int) -> int:
    """Return `limit`, or the last offset before it that does not separate a character from its accents and joiners."""
    end = limit
    while end > start + 1 and _continues(text, end):
        end -= 1
    return limit if _continues(text, end) else end


def _continues(text: str, position: int) -> bool:
    if position == len(text):
        return False
    return unicodedata.category(text[position])[0] == "M" or "\u200d" in text[position - 1 : position + 1]
