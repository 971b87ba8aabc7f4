"""English text in its spoken form while it is being written."""

import re
from dataclasses import dataclass

from deployments.voice.english import spoken_english
from deployments.voice.plain_text import is_marked

# What stands in two halves of a text must mean nothing together: the text is cut behind a plain word, once another one
# has begun. Other words may be a part of a number, an abbreviation, an address. What begins with several letters, a
# small vowel among them, keeps a small letter when it is spoken, whatever follows: neither half is taken for shouted.
_WORD = r"(?!St\b)(?:[A-Z]?[a-z]++|[AI])(?:['’][a-z]++)?[,;:?!]?"  # noqa: RUF001
_NEXT = r"(?=[A-Za-z]{2}|a\s)[A-Z]?[a-z]*?[aeiouy]"
_CUT = re.compile(rf"(?<![^\s]){_WORD}(?=[ \t]++{_NEXT})")
_BEGUN = re.compile(rf"\s*+{_NEXT}")
_LINE_END = re.compile(r"[\n\r]|```\w*")  # as `plain_line` has it
_OPENED = re.compile(r"\[[^\[\]]*$|\]\([^()]*$|<[^<>]*$")
_LONGEST_OPENED = 300  # what is never closed opens nothing


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive text as it was written, and as it is spoken; either side joins with that of other parts."""

    written: str
    spoken: str


class LiveEnglish:
    """`spoken_english` of a text that comes in parts: wherever it is cut, the same comes out."""

    def __init__(self) -> None:
        self._rest = ""
        self._is_unmarked = False  # whether `_rest` begins within a line, of plain words so far

    def feed(self, text: str, *, is_last: bool) -> list[Part]:
        """What is certain with `text`; with the last part all that is left, and the sentence ends."""
        self._rest += text
        parts = []
        while end := self._first_cut():
            written, self._rest, self._is_unmarked = self._rest[:end], self._rest[end:], True
            parts.append(Part(written, _spoken_before_a_word(written)))
        if is_last:
            parts.append(Part(self._rest, spoken_english(self._rest)))
            self._rest = ""
        return parts

    @property
    def will_speak(self) -> bool:
        """Whether a word will come of what waits, whatever follows."""
        return _BEGUN.match(self._rest) is not None

    def _first_cut(self) -> int:
        """Where the text can first be cut, 0 where nobody knows yet."""
        for match in _CUT.finditer(self._rest):
            begun = self._rest[: match.end()]
            line = _LINE_END.split(begun)[-1]
            in_marked = is_marked(line) and not (self._is_unmarked and len(line) == len(begun))
            if not in_marked and not _OPENED.search(begun[-_LONGEST_OPENED:]):
                return match.end()
        return 0


def _spoken_before_a_word(text: str) -> str:
    """In the middle of a sentence, with the space behind it: tokens of a word are known with what follows it."""
    return spoken_english(f"{text} so").removesuffix("so.")
