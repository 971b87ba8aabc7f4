"""English text in its spoken form while it is being written."""

import re
from dataclasses import dataclass

from deployments.voice.english import spoken_english
from deployments.voice.plain_text import is_marked

# What stands in two halves of a text must mean nothing together: the text is cut between two plain words, once what
# follows the second is there. Other words may be a part of a number, an abbreviation, an address.
_WORD = r"(?!St\b)[A-Z]?[a-z]++(?:['’][a-z]++)?"  # noqa: RUF001
_CUT = re.compile(rf"(?<![^\s]){_WORD}(?=[ \t]++{_WORD}\s)")
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
        self._has_spoken = False

    def feed(self, text: str, *, is_last: bool) -> list[Part]:
        """What is certain with `text`; with the last part all that is left, and the sentence ends."""
        self._rest += text
        parts = []
        while end := self._first_cut():
            written, self._rest, self._is_unmarked = self._rest[:end], self._rest[end:], True
            parts.append(Part(written, self._joined(_spoken_before_a_word(written))))
        if is_last:
            parts.append(Part(self._rest, self._joined(spoken_english(self._rest))))
            self._rest = ""
        return parts

    def _first_cut(self) -> int:
        """Where the text can first be cut, 0 where nobody knows yet."""
        for match in _CUT.finditer(self._rest):
            begun = self._rest[: match.end()]
            line = begun[begun.rfind("\n") + 1 :]
            in_marked = is_marked(line) and not (self._is_unmarked and len(line) == len(begun))
            if not in_marked and not _OPENED.search(begun[-_LONGEST_OPENED:]):
                return match.end()
        return 0

    def _joined(self, spoken: str) -> str:
        joined = f" {spoken}" if spoken and self._has_spoken else spoken
        self._has_spoken = self._has_spoken or bool(spoken)
        return joined


def _spoken_before_a_word(text: str) -> str:
    """In the middle of a sentence, as `spoken_english` ends one."""
    return spoken_english(f"{text} so").removesuffix(" so.")
