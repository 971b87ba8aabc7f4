"""English text in its spoken form while it is being written."""

import re
from dataclasses import dataclass

from deployments.embedded_voice.english import spoken_english

# The two halves of a cut text are read alone, so the text is cut only after a plain word, once another word has begun.
# Other words may be a part of a number, an abbreviation or an address. The next word begins with several letters, one
# of them a small vowel, so that a small letter remains when it is spoken: neither half is then taken for shouted.
_DEPENDENT = "St|Dr|Ave|King|Queen|Pope|Emperor|Tsar|Prince|per|Mon|Tues?|Wed|Thu|Thurs|Fri|Sat|Sun"  # on the next one
_WORD = rf"(?!(?:{_DEPENDENT})\b)(?:[A-Z]?[a-z]++|[AI])(?:['’][a-z]++)?[,;:?!]?"  # noqa: RUF001
_NEXT = r"(?=[A-Za-z]{2}|a\s)[A-Z]?[a-z]*?[aeiouy]"
_CUT = re.compile(rf"(?<![^\s]){_WORD}(?=[ \t]++{_NEXT})")
_BEGUN = re.compile(rf"\s*+{_NEXT}")
_SPACE = re.compile(r"\s(?=\S)")
LONGEST_UNCUT = 1000  # most characters that wait for a place to cut: speaking this many takes milliseconds


@dataclass(frozen=True, slots=True)
class TextPart:
    """Consecutive text as it was written, and as it is spoken; either side joins with that of other parts."""

    written: str
    spoken: str


class LiveEnglish:
    """`spoken_english` of a text that arrives in parts. The result is the same wherever the text is cut.

    Text without a place to cut is still cut after `LONGEST_UNCUT` characters, so its text bounds the work of one call.
    """

    def __init__(self) -> None:
        self._rest = ""
        self._seen = 0  # `_rest` has no cut before

    def feed(self, text: str, *, is_last: bool) -> list[TextPart]:
        """Returns the spoken text that is certain with `text`; with the last part the rest, and ends the sentence."""
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
        """Whether the waiting text becomes a word with any later text."""
        return _BEGUN.match(self._rest) is not None

    def _first_cut(self) -> int:
        """The first place where the text can be cut; 0 if there is none."""
        while match := _CUT.search(self._rest, self._seen):
            if not self._rest[: match.start()].rstrip()[-1:].isdigit():  # "5 km" may describe what follows
                return match.end()
            self._seen = match.end()
        if len(self._rest) <= LONGEST_UNCUT:
            return 0
        spaces = _SPACE.finditer(self._rest, 0, LONGEST_UNCUT + 1)
        return max((space.end() for space in spaces), default=LONGEST_UNCUT)


def _spoken_before_a_word(text: str) -> str:
    """The spoken form in the middle of a sentence, with a space at its end, because that completes a word's tokens."""
    return spoken_english(f"{text} so").removesuffix("so.")
