"""English text in its spoken form while it is being written."""

import re
from dataclasses import dataclass

from deployments.embedded_voice.english import is_marked, spoken_english

# The two halves of a cut text are read alone, so the text is cut only after a plain word, once another word has begun.
# Other words may be a part of a number, an abbreviation or an address. The next word begins with several letters, one
# of them a small vowel, so that a small letter remains when it is spoken: neither half is then taken for shouted.
_WORD = r"(?!St\b)(?:[A-Z]?[a-z]++|[AI])(?:['’][a-z]++)?[,;:?!]?"  # noqa: RUF001
_NEXT = r"(?=[A-Za-z]{2}|a\s)[A-Z]?[a-z]*?[aeiouy]"
_CUT = re.compile(rf"(?<![^\s]){_WORD}(?=[ \t]++{_NEXT})")
_BEGUN = re.compile(rf"\s*+{_NEXT}")
_LINE_END = re.compile(r"[\n\r]|```\w*")  # the same as in `plain_line`
_FENCE_CHARS = 2  # a fence that has begun may have so many
_OPENED = re.compile(r"\[[^\[\]]*$|\]\([^()]*$|<[^<>]*$")
_LONGEST_OPENED = 300  # markup that is never closed opens nothing; a line is marked by then
_LINE = re.compile(r"\n(?=[ \t]*+\S)")  # the next one begins with more than an empty line would end
_SPACE = re.compile(r"\s(?=\S)")
LONGEST_UNCUT = 1000  # characters that wait for a place to be cut at: speaking so many takes milliseconds


@dataclass(frozen=True, slots=True)
class TextPart:
    """Consecutive text as it was written, and as it is spoken; either side joins with that of other parts."""

    written: str
    spoken: str


class LiveEnglish:
    """`spoken_english` of a text that comes in parts: wherever it is cut, the same comes out.

    A line that can nowhere be cut, as one of a list, is cut after `LONGEST_UNCUT` characters all the same: the work of
    one call is bounded by its text.
    """

    def __init__(self) -> None:
        self._rest = ""
        self._is_unmarked = False  # whether `_rest` begins within a line, of plain words so far
        self._seen = self._line = 0  # `_rest` has no cut before `_seen`; the line there begins at `_line`
        self._is_marked = False  # whether that line ends like a sentence

    def feed(self, text: str, *, is_last: bool) -> list[TextPart]:
        """The spoken text that is certain with `text`; with the last part the rest, and the sentence ends."""
        parts = []
        for start in range(0, len(text), LONGEST_UNCUT):
            self._rest += text[start : start + LONGEST_UNCUT]
            while end := self._first_cut():
                parts.append(self._cut(end))
        if is_last:
            parts.append(TextPart(self._rest, spoken_english(self._rest)))
            self._rest = ""
        return parts

    @property
    def will_speak(self) -> bool:
        """Whether the waiting text becomes a word with any later text."""
        return _BEGUN.match(self._rest) is not None

    def _cut(self, end: int) -> TextPart:
        written, self._rest = self._rest[:end], self._rest[end:]
        self._is_unmarked = written[-1] != "\n"
        self._seen, self._line, self._is_marked = 0, 0, False
        return TextPart(written, _spoken_before_a_word(written))

    def _first_cut(self) -> int:
        """The first place where the text can be cut; 0 while there is none."""
        while match := _CUT.search(self._rest, self._seen):
            self._begin_line(match.end())
            self._is_marked = self._is_marked or self._marks(match.end())
            if not self._is_marked and not self._is_within_brackets(match.end()):
                return match.end()
            self._seen = self._line_end(match.end()) if self._is_marked else match.end()
        if len(self._rest) <= LONGEST_UNCUT:
            return 0
        ends = (_last_end(pattern, self._rest[: LONGEST_UNCUT + 1]) for pattern in (_LINE, _SPACE))
        return next(filter(None, ends), LONGEST_UNCUT)

    def _begin_line(self, end: int) -> None:
        for line_end in _LINE_END.finditer(self._rest, self._line, end):
            self._line, self._is_marked = line_end.end(), False

    def _marks(self, end: int) -> bool:
        """Whether the line is marked, as far as `end`."""
        if self._is_unmarked and self._line == 0:
            return False
        return is_marked(self._rest[self._line : min(end, self._line + _LONGEST_OPENED)])

    def _line_end(self, start: int) -> int:
        """The end of the marked line that contains `start`: no cut is before it."""
        found = _LINE_END.search(self._rest, start)
        return found.start() if found else max(start, len(self._rest) - _FENCE_CHARS)

    def _is_within_brackets(self, end: int) -> bool:
        return _OPENED.search(self._rest[max(0, end - _LONGEST_OPENED) : end]) is not None


def _spoken_before_a_word(text: str) -> str:
    """The spoken form in the middle of a sentence, with a space at its end, because that completes a word's tokens."""
    return spoken_english(f"{text} so").removesuffix("so.")


def _last_end(pattern: re.Pattern[str], text: str) -> int:
    """The end of the last match, or 0."""
    return max((match.end() for match in pattern.finditer(text)), default=0)
