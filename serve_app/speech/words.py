"""Words of a text with their times in its audio."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from deployments.protocol import PcmChunk


@dataclass(frozen=True, slots=True)
class Word:
    """A word as written, and its time in the utterance's audio, after a change of speed."""

    text: str
    start: int  # characters of the written text before it
    end: int
    start_s: float
    end_s: float
    is_estimate: bool = False  # whether its time is an estimate


class WordSource(Protocol):
    """The words of one utterance, as its chunks arrive."""

    @property
    def text(self) -> str:
        """The text so far, as written."""
        ...

    def feed(self, chunk: PcmChunk) -> None:
        """Take the utterance's next chunk. The ends of more words may then be known."""
        ...

    def take(self) -> list[Word]:
        """The words whose end has become known since the last call, in order."""
        ...


def marked(words: Iterable[Word]) -> dict[str, object]:
    """The extra field of a message with the times of words, if any of them is an estimate."""
    return {"estimated": True} if any(word.is_estimate for word in words) else {}


def word_entries(words: Iterable[Word]) -> list[dict[str, object]]:
    """The words for JSON, in seconds of the audio."""
    return [{"word": word.text, "start": round(word.start_s, 3), "end": round(word.end_s, 3)} for word in words]
