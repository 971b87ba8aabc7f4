"""Conversion of English text to its spoken form while the text is being written."""

import re
from dataclasses import dataclass

from deployments.embedded_voice.english import spoken_english

# The two parts of a split text are normalized separately, so text is split only after a plain word, once the next word
# has begun. Other words may be part of a number, an abbreviation or an address. The next word must begin with several
# letters and contain a lower-case vowel, so its spoken form has lower case, and neither part counts as shouted.
_DEPENDENT = (  # these need a next word
    "St|Dr|Ave|King|Queen|Pope|Emperor|Tsar|Prince|per|Mon|Tues?|Wed|Thu|Thurs|Fri|Sat|Sun|[Cc]ode|otp|[Pp]asscode|"
    "[Pp]assword"
)
_WORD = rf"(?!(?:{_DEPENDENT})\b)(?:[A-Z]?[a-z]++|[AI])(?:['’][a-z]++)?[,;:?!]?"  # noqa: RUF001
_NEXT = r"(?=[A-Za-z]{2}|a\s)[A-Z]?[a-z]*?[aeiouy]"
_CUT = re.compile(rf"(?<![^\s]){_WORD}(?=[ \t]++{_NEXT})")
_BEGUN = re.compile(rf"\s*+{_NEXT}")
_SPACE = re.compile(r"\s(?=\S)")
LONGEST_UNCUT = 1000  # maximum number of characters waiting to be split; normalizing them takes milliseconds


@dataclass(frozen=True, slots=True)
class TextPart:
    """A stretch of text, as written and in spoken form. The parts, concatenated, form the complete text."""

    written: str
    spoken: str


class LiveEnglish:
    """Incremental `spoken_english`, for text that arrives in chunks. The result does not depend on the chunks.

    If there is no good place, text is split after `LONGEST_UNCUT` characters, which limits the work per call.
    """

    def __init__(self) -> None:
        self._rest = ""
        self._seen = 0  # `_rest` has no split before this index

    def feed(self, text: str, *, is_last: bool) -> list[TextPart]:
        """Return spoken text that later text cannot change. For the last part, return the rest and end the sentence."""
        parts = []
        for start in range(0, len(text), LONGEST_UNCUT):
            self._rest += text[start : start + LONGEST_UNCUT]
            while end := self._first_cut():
                written, self._rest, self._seen = self._rest[:end], self._rest[end:], 0
                parts.append(TextPart(written, _spoken_before_a_word(written)))
        if is_last:
            parts.append(TextPart(self._rest, spoken_english(self._rest)))
            self._rest = ""
        return parts

    @property
    def will_speak(self) -> bool:
        """Whether the waiting text will produce a word regardless of what follows."""
        return _BEGUN.match(self._rest) is not None

    def _first_cut(self) -> int:
        """Return the index of the first place where the text can be split; 0 if there is none."""
        while match := _CUT.search(self._rest, self._seen):
            if not self._rest[: match.start()].rstrip()[-1:].isdigit():  # the next word decides how "5 km" is read
                return match.end()
            self._seen = match.end()
        if len(self._rest) <= LONGEST_UNCUT:
            return 0
        spaces = _SPACE.finditer(self._rest, 0, LONGEST_UNCUT + 1)
        return max((space.end() for space in spaces), default=LONGEST_UNCUT)


def _spoken_before_a_word(text: str) -> str:
    """Return the spoken form within a sentence. Ends with a space, which completes the tokens of the last word."""
    return spoken_english(f"{text} so").removesuffix("so.")
