"""A text and its spoken form. Extensions handle markup, lexicons and numbers; the core speaks text as it is given."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

LEFT_OUT = "\ue000"  # a character of no script
# For a voice that speaks only words: the function that makes them, and the one that counts characters that it cannot
# speak.
SPOKEN_FORMS = {
    "english": ("deployments.embedded_voice.english:spoken_english", "deployments.embedded_voice.english:unspoken"),
}
UNSPOKEN = "characters that the voice cannot speak"


@dataclass(frozen=True, slots=True)
class TextSpan:
    """Text that is spoken without an explicit pause in it."""

    text: str  # empty if nothing follows the last pause
    pause_s: float = 0.0  # silence before it
    speed: float = 1.0
    style: str = ""  # of an extension: see `Utterance.styles`


@dataclass(frozen=True, slots=True)
class SpokenPiece:
    """A consecutive piece of text as it was sent, and its spoken form."""

    written: str  # with LEFT_OUT for each character that is not read aloud
    spoken: str  # concatenates with that of other pieces
    pause_s: float = 0.0  # silence in its place
    speed: float | None = None  # of all text after it; None: unchanged
    style: str | None = None  # the same

    @property
    def is_border(self) -> bool:
        """Whether the texts before and after it are spoken separately."""
        return self.pause_s > 0 or self.speed is not None or self.style is not None


@dataclass(frozen=True, slots=True)
class SpokenText:
    """The spoken and the omitted parts of a whole text."""

    sent: str
    spans: tuple[TextSpan, ...]
    left_out: Counter[str]  # how often each kind of thing is not read aloud

    @property
    def max_segment_chars(self) -> int | None:
        """The limit of a long text's segments; None: the model's."""
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
    parts: list[SpokenPiece]  # the same text with its spoken forms
