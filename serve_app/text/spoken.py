"""Text and its spoken form. Extensions normalize markup, lexicons and numbers; the core speaks a text unchanged."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from serve_app.text.characters import is_speakable

LEFT_OUT = "\ue000"  # private-use character
# For voices that can only speak words: a function that writes text out in words, and one that counts characters that
# the voice cannot speak.
SPOKEN_FORMS = {
    "english": ("deployments.embedded_voice.english:spoken_english", "deployments.embedded_voice.english:unspoken"),
}
UNSPOKEN = "characters that the voice cannot speak"


@dataclass(frozen=True, slots=True)
class TextSpan:
    """Text spoken without an explicit pause in it."""

    text: str  # empty if nothing follows the last pause
    pause_s: float = 0.0  # silence before the text
    speed: float = 1.0
    style: str = ""  # set by an extension: see `Utterance.styles`


@dataclass(frozen=True, slots=True)
class SpokenPiece:
    """Contiguous piece of the text as sent, with its spoken form."""

    written: str  # contains LEFT_OUT for each character that is not read aloud
    spoken: str  # can be concatenated with the spoken form of other pieces
    pause_s: float = 0.0  # silence to insert in place of the piece
    speed: float | None = None  # speed of all following text; None: unchanged
    style: str | None = None  # style of all following text; None: unchanged

    @property
    def is_border(self) -> bool:
        """Whether the texts before and after this piece are spoken separately."""
        return self.pause_s > 0 or self.speed is not None or self.style is not None


@dataclass(frozen=True, slots=True)
class SpokenText:
    """Spoken and omitted parts of a complete text."""

    sent: str
    spans: tuple[TextSpan, ...]
    left_out: Counter[str]  # number of omitted pieces, by kind

    @property
    def style(self) -> str:
        """Style of the complete text, or "" if it has several styles."""
        styles = {span.style for span in self.spans if span.text}
        return styles.pop() if len(styles) == 1 else ""

    @property
    def text(self) -> str:
        return " ".join(span.text for span in self.spans if span.text)

    @property
    def has_words(self) -> bool:
        """Whether the text contains words, even if all of them are omitted."""
        return is_speakable(self.sent)

    def pieces(self) -> Iterator[SpokenPiece]:
        """Yield the complete text, as sent and as spoken."""
        yield SpokenPiece(self.sent, self.text)
