"""Lexicons, which specify how words are pronounced by respelling them, such as "sequel" for "SQL".

Models cannot read phonemes, so lexicons do not contain any.
"""

import re
import xml.etree.ElementTree as ET
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import ClassVar
from xml.parsers import expat
from xml.sax.saxutils import escape, quoteattr

from deployments.embedded_voice.live_english import TextPart
from deployments.errors import InvalidRequest
from serve_app.text.characters import is_ideograph

MAX_WORDS = 1000
LONGEST_WORD, LONGEST_RESPELLING = 80, 200
MAX_PLS_BYTES = 1 << 20
_PLS = "http://www.w3.org/2005/01/pronunciation-lexicon"
# IPA letters that do not occur in ordinary spelling, IPA stress and length marks, stressed vowels in the CMU
# dictionary, and the start of Cartesia's phonemes.
_PHONEMES = re.compile("[\u0250-\u0258\u025a-\u02af\u02b0-\u02b8\u02c8\u02cc\u02d0\u02d1]|<<|\\b[A-Z]{2}[0-2]\\b")
_ATOM = re.compile(r"\s+|\w+|[^\w\s]")
_LONGEST_PART = 256


class Lexicon:
    """Respellings by word. Entries match whole words, and longer entries take precedence.

    Entries in lower case match any case. All other entries match only the same case.
    """

    EMPTY: ClassVar["Lexicon"]

    def __init__(self, words: Mapping[str, str]) -> None:
        """`words` maps words to checked respellings."""
        self.words = dict(words)

    @classmethod
    def checked(cls, words: Mapping[str, str], field: str) -> "Lexicon":
        """Check the words and create a lexicon. Raises InvalidRequest with the field and the wrong word."""
        if len(words) > MAX_WORDS:
            raise InvalidRequest(f"{field} has {len(words)} words. Send at most {MAX_WORDS}.", field)
        return cls({word.strip(): _respelling(word, said, field) for word, said in words.items()})

    def over(self, below: "Lexicon") -> "Lexicon":
        """Merge two lexicons. Entries of this lexicon take precedence over entries of `below`."""
        return Lexicon({**below.words, **self.words}) if self.words and below.words else self if self.words else below

    def __bool__(self) -> bool:
        return bool(self.words)

    @cached_property
    def _by_start(self) -> dict[str, list[int]]:
        """Map from the lower-case first atom of each entry to the lengths of all such entries, longest first."""
        lengths: dict[str, set[int]] = {}
        for word in self.words:
            lengths.setdefault(_atom(word, 0).lower(), set()).add(len(word))
        return {start: sorted(word_lengths, reverse=True) for start, word_lengths in lengths.items()}

    @cached_property
    def _by_length(self) -> list[tuple[int, str]]:
        """Sorted pairs of each entry's length and the entry in lower case."""
        return sorted((len(word), word.lower()) for word in self.words)

    def may_become(self, begun: str, length: int) -> bool:
        """Return whether an entry of this length begins with the text `begun`, ignoring case."""
        place = bisect_left(self._by_length, wanted := (length, begun.lower()))
        found = self._by_length[place : place + 1]  # the first entry at or after `wanted`
        return any(num_chars == length and word.startswith(wanted[1]) for num_chars, word in found)

    def lengths(self, atom: str) -> list[int]:
        return self._by_start.get(atom.lower(), [])

    def find(self, text: str) -> str | None:
        """Return the respelling of `text`, or None if it is not in the lexicon."""
        said = self.words.get(text)
        return self.words.get(text.lower()) if said is None else said


Lexicon.EMPTY = Lexicon({})


class LiveLexicon:
    """Respells text that arrives incrementally. Where the text is split does not affect the result."""

    def __init__(self, lexicon: Lexicon) -> None:
        self._lexicon = lexicon
        self._rest = ""

    def feed(self, text: str, *, is_last: bool) -> list[TextPart]:
        """Return the respelled text that later parts cannot change, or all remaining text if `is_last`."""
        self._rest += text
        parts: list[TextPart] = []
        at = begun = 0
        while at < len(self._rest):
            entry = self._entry(at, is_last=is_last)
            if entry is None:
                break
            end, said = entry
            if said is not None or end - begun > _LONGEST_PART:
                parts += _same(self._rest[begun:at])
                begun = at
            if said is not None:
                parts.append(TextPart(self._rest[at:end], said))
                begun = end
            at = end
        parts += _same(self._rest[begun:at])
        self._rest = self._rest[at:]
        return parts

    def _entry(self, at: int, *, is_last: bool) -> tuple[int, str | None] | None:
        """Return the end of the entry or atom at `at`, and the respelling of an entry. Return None to wait for text."""
        text = self._rest
        atom = _atom(text, at)
        end = at + len(atom)
        if end == len(text) and not is_last and _is_letter(atom[-1]):
            return None
        for length in self._lexicon.lengths(atom):
            until = at + length
            if until > len(text) or (until == len(text) and _is_letter(text[until - 1])):
                if not is_last and self._lexicon.may_become(text[at:], length):
                    return None
                if until > len(text):
                    continue
            said = self._lexicon.find(text[at:until])
            ends = not (until < len(text) and _is_letter(text[until - 1]) and _is_letter(text[until]))
            if said is not None and ends:
                return until, said
        return end, None


def _atom(text: str, at: int) -> str:
    """Return the atom at `at`: the letters of a word, whitespace, or one other character, such as an ideograph."""
    if is_ideograph(text[at]):
        return text[at]
    match = _ATOM.match(text, at, at + LONGEST_WORD + 1)
    assert match is not None, "the pattern matches every character"
    ends = (number for number, char in enumerate(match[0]) if not char.isascii() and is_ideograph(char))
    return match[0][: next(ends, len(match[0]))]


def _is_letter(char: str) -> bool:
    return (char.isalnum() or char == "_") and not is_ideograph(char)


def _same(text: str) -> list[TextPart]:
    return [TextPart(text, text)] if text else []


def _respelling(word: str, said: str, field: str) -> str:
    name = f"{field}.{word.strip()[:LONGEST_WORD]}"
    if not 0 < len(word.strip()) <= LONGEST_WORD or "\n" in word:
        raise InvalidRequest(f"{name}: a word must have 1 to {LONGEST_WORD} characters on one line.", field)
    if len(said) > LONGEST_RESPELLING or "\n" in said:
        raise InvalidRequest(f"{name}: respell it in at most {LONGEST_RESPELLING} characters on one line.", field)
    if phonemes := _PHONEMES.search(said):
        reason = f"{phonemes[0]!r} is a phoneme, and phonemes are not supported"
        raise InvalidRequest(f"{name}: {reason}. Respell the word in letters.", field, "phonemes_not_supported")
    return said.strip()


def from_pls(content: bytes, field: str) -> dict[str, str]:
    """Read the aliases of a W3C Pronunciation Lexicon (PLS 1.0). Raises InvalidRequest for phonemes and invalid PLS."""
    if len(content) > MAX_PLS_BYTES:
        raise InvalidRequest(f"{field} is too long. Send at most {MAX_PLS_BYTES} bytes.", field)
    builder = ET.TreeBuilder()
    parser = expat.ParserCreate(namespace_separator="}")
    parser.StartDoctypeDeclHandler = _refuse_doctype
    parser.StartElementHandler = lambda name, values: builder.start(name.rpartition("}")[2], values)
    parser.EndElementHandler = lambda name: builder.end(name.rpartition("}")[2])
    parser.CharacterDataHandler = builder.data
    try:
        parser.Parse(content, True)
    except (expat.ExpatError, ValueError) as error:
        raise InvalidRequest(f"{field} is not a PLS lexicon: {error}.", field) from None
    words: dict[str, str] = {}
    for lexeme in builder.close().iter("lexeme"):
        graphemes = [(element.text or "").strip() for element in lexeme.iter("grapheme")]
        alias = next((element.text or "" for element in lexeme.iter("alias")), None)
        if alias is None:
            reason = "phonemes are not supported. Use an alias"
            name = next(iter(graphemes), "a lexeme without grapheme")[:LONGEST_WORD]
            raise InvalidRequest(f"{field}: {name}: {reason}.", field, "phonemes_not_supported")
        words |= dict.fromkeys(graphemes, alias)
    return Lexicon.checked(words, field).words


def to_pls(words: Iterable[tuple[str, str]], language: str) -> str:
    """Return a PLS document with an alias for each word."""
    lexemes = (
        f"  <lexeme><grapheme>{escape(word)}</grapheme><alias>{escape(said)}</alias></lexeme>\n" for word, said in words
    )
    head = f'<lexicon version="1.0" xmlns="{_PLS}" alphabet="ipa" xml:lang={quoteattr(language)}>'
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{head}\n{"".join(lexemes)}</lexicon>\n'


def _refuse_doctype(*_: object) -> None:
    raise ValueError("remove the DOCTYPE")


class LexiconSource:
    """Hooks of an extension that stores a lexicon for all requests. This one is empty."""

    async def lexicon_for_all(self) -> Lexicon:
        """Return the respellings for every caller."""
        return Lexicon.EMPTY
