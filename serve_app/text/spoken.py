"""A text and what of it is spoken. Extensions read markup, lexicons and figures; the core speaks what it is given."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

LEFT_OUT = "\ue000"  # of no script
# Of a voice that speaks nothing but words: what makes them, and what counts the characters that it cannot speak.
SPOKEN_FORMS = {
    "english": ("deployments.embedded_voice.english:spoken_english", "deployments.embedded_voice.english:unspoken"),
}
UNSPOKEN = "characters that the voice cannot speak"


@dataclass(frozen=True, slots=True)
class TextSpan:
    """Text that is spoken without a stated pause."""

    text: str  # empty where nothing follows the last pause
    pause_s: float = 0.0  # silence before it
    speed: float = 1.0
    style: str = ""  # of an extension: see `Utterance.styles`


@dataclass(frozen=True, slots=True)
class SpokenPiece:
    """Consecutive text as it was sent, and what it is in speech."""

    written: str  # with LEFT_OUT for each character that is not read aloud
    spoken: str  # joins with that of other pieces
    pause_s: float = 0.0  # silence in its place
    speed: float | None = None  # of all text after it; None: as before
    style: str | None = None  # the same

    @property
    def is_border(self) -> bool:
        """Whether text before it and after it is spoken apart."""
        return self.pause_s > 0 or self.speed is not None or self.style is not None


@dataclass(frozen=True, slots=True)
class SpokenText:
    """The spoken and the omitted parts of a whole text."""

    sent: str
    spans: tuple[TextSpan, ...]
    left_out: Counter[str]  # how often each thing is not read aloud

    @property
    def max_segment_chars(self) -> int | None:
        """Of a segment of a long text; None: the model's."""
        return None

    @property
    def style(self) -> str:
        """The style of the whole text; "" if it has several."""
        styles = {span.style for span in self.spans if span.text}
        return styles.pop() if len(styles) == 1 else ""

    @property
    def text(self) -> str:
        return " ".join(span.text for span in self.spans if span.text)

    def pieces(self) -> Iterator[SpokenPiece]:
        """All of the text, as it was sent and as it is spoken."""
        yield SpokenPiece(self.sent, self.text)


class WrittenSoFar(Protocol):
    """A text that is still being written."""

    text: str  # as it was sent
    parts: list[SpokenPiece]  # the same, and what it is in speech
