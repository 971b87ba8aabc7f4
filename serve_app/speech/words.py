"""Words of a text with their timestamps in the audio."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from deployments.protocol import PcmChunk


@dataclass(frozen=True, slots=True)
class Word:
    """Word as written, with its timestamps in the utterance's audio after any speed change."""

    text: str
    start: int  # offset in characters in the written text
    end: int
    start_s: float
    end_s: float
    is_estimate: bool = False  # whether the timestamps are estimated


class WordSource(Protocol):
    """Words of one utterance, which become known as its chunks arrive."""

    @property
    def text(self) -> str:
        """Text written so far."""
        ...

    def feed(self, chunk: PcmChunk) -> None:
        """Process the utterance's next chunk, which may determine the ends of more words."""
        ...

    def take(self) -> list[Word]:
        """Return the words whose end has become known since the last call, in order."""
        ...


def marked(words: Iterable[Word]) -> dict[str, object]:
    """Return the extra field of a message with word timestamps, if any timestamp is an estimate."""
    return {"estimated": True} if any(word.is_estimate for word in words) else {}


def word_entries(words: Iterable[Word]) -> list[dict[str, object]]:
    """Convert words for JSON, with timestamps in seconds of audio."""
    return [{"word": word.text, "start": round(word.start_s, 3), "end": round(word.end_s, 3)} for word in words]
