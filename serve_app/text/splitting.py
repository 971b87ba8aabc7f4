"""Splits long texts into parts."""

# ruff: noqa: RUF001 (part of this file is about characters that look alike)

import re
import unicodedata
from bisect import bisect_right
from functools import partial
from itertools import accumulate

_CLOSING = "\"')\\]»”’」』）》"
_CJK = "\u3040-\u30ff\u3400-\u9fff"
_PARAGRAPH = re.compile(r"\n\s*?\n")
SENTENCE = re.compile(
    rf"(?<![.!?؟।…])[.!?؟।…]++(?:[\xa0\u202f ]?»|[{_CLOSING}“])*+(?=\s|\Z)"
    rf"|(?<=[A-Za-z])[.!?]++(?=[{_CJK}])|[。！？]++[{_CLOSING}]*+"
)
CLAUSE = re.compile(rf"[,;:—][{_CLOSING}“]*+(?=\s)|\s[–-](?=\s)|[，、；：]")
WORD = re.compile(r"\s(?=\S)")
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
AHEAD = 8  # characters to check after an end
_WIDE_WEIGHT = 3  # an ideograph takes about as long to speak as three letters


def split_text(text: str, max_chars: int) -> list[str]:
    """Split `text` into parts of at most `max_chars` characters. Wide characters count as three.

    Parts neither begin nor end with whitespace, and contain all other characters in order. A part ends at the end of a
    paragraph or, failing that, of a sentence, a clause or a word. Only words longer than a part are split.
    """
    positions = lengths(text)
    parts, start = [], 0
    while positions[-1] - positions[start] > max_chars:
        limit = max(start + 1, bisect_right(positions, positions[start] + max_chars) - 1)
        middle = bisect_right(positions, positions[start] + max_chars / 2) - 1
        end = _best_end(text, start, middle, limit)
        parts.append(text[start:end].strip())
        start = end
    return [part for part in (*parts, text[start:].strip()) if part]


def lengths(text: str, before: int = 0) -> list[int]:
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
    for find_ends in (partial(pattern_ends, _PARAGRAPH), sentence_ends, partial(pattern_ends, CLAUSE)):
        if good := [end for end in find_ends(text, start, limit + 1) if middle < end <= limit]:
            return good[-1]
    words = pattern_ends(WORD, text, start, limit + 1)
    return words[-1] if words and words[-1] > start else _hard_end(text, start, limit)


def sentence_ends(text: str, start: int, stop: int) -> list[int]:
    """Return where sentences end, from `start` up to `stop`."""
    return [end for end in pattern_ends(SENTENCE, text, start, stop) if ends_sentence(text, end)]


def pattern_ends(pattern: re.Pattern[str], text: str, start: int, stop: int) -> list[int]:
    return [match.end() for match in pattern.finditer(text, start, stop)]


def ends_sentence(text: str, end: int) -> bool:
    before, behind = text[max(0, end - _CONTEXT) : end], text[end : end + AHEAD]
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
