"""Text as it is, but for characters that cannot be spoken, while it is being written."""

import re
import unicodedata

from deployments.embedded_voice.live_english import TextPart
from serve_app.speech.characters import clean, is_speakable

_LONGEST_CLUSTER = 64  # characters to search for a boundary; Unicode's stream-safe format stacks at most 30 marks
_LONGEST_REST = 1024  # characters without a boundary that are kept; ordinary text has far fewer


class LivePlain:
    """`clean` for a text that comes in parts. The parts give the same spoken text, however the text is cut."""

    def __init__(self) -> None:
        self._rest = ""
        self._space = ""  # to put in front of the next word
        self._has_spoken = False

    def feed(self, text: str, *, is_last: bool) -> list[TextPart]:
        """The spoken text that no later part can change; with `is_last` all of the rest."""
        self._rest += text
        takes_all = is_last or len(self._rest) > _LONGEST_REST
        end = len(self._rest) if takes_all else _last_boundary(self._rest)
        known, self._rest = self._rest[:end], self._rest[end:]
        return [TextPart(word, self._spoken(word)) for word in _words(known)]

    @property
    def will_speak(self) -> bool:
        return is_speakable(clean(self._rest))

    def _spoken(self, word: str) -> str:
        """The word with a space in front, unless it is the first word."""
        if word[:1].isspace():
            self._space = " " if self._has_spoken else ""
        spoken = clean(word)
        if not spoken:
            return ""
        spoken, self._space, self._has_spoken = self._space + spoken, "", True
        return spoken


def _words(text: str) -> list[str]:
    """`text` in words, each with the whitespace in front of it."""
    return re.findall(r"\s*\S+|\s+", text)


def _last_boundary(text: str) -> int:
    """The last place in `text` at which no later character can combine with an earlier one; 0 if it is not near."""
    for place in range(len(text) - 1, max(0, len(text) - _LONGEST_CLUSTER), -1):
        char = text[place]
        if char.isspace() or unicodedata.category(char)[0] not in "MC":
            before, behind = _normal(text[:place]), _normal(text[place:])
            if before + behind == _normal(text):
                return place
    return 0


def _normal(text: str) -> str:
    return unicodedata.normalize("NFC", text)
