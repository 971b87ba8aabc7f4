"""Observers of an utterance's audio as it is sent, and the timestamps of its words."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from deployments.protocol import ModelInfo, PcmChunk
from serve_app.speech.segments import Utterance

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Observer(Protocol):
    """Receives one utterance's audio."""

    def feed(self, chunk: PcmChunk) -> None:
        """Process a chunk that is being sent, before the request's speed is applied."""
        ...

    def end(self) -> None:
        """Finish after all chunks have been sent. Not called if synthesis fails or the client disconnects."""
        ...


Observe = Callable[[Utterance, ModelInfo], Observer | None]


class Observers:
    """Observers of one utterance. If an observer raises, the error is logged, the observer is removed, and speech
    continues.
    """

    def __init__(self, observe: Mapping[str, Observe], utterance: Utterance, info: ModelInfo) -> None:
        """Start the observers. `observe`: each extension's function, by extension name."""
        self._request_id = utterance.synthesis.request_id
        self._watching: dict[str, Observer] = {}
        for name, begin in observe.items():
            if (observer := self._tried(name, lambda begin=begin: begin(utterance, info))) is not None:  # type: ignore[misc]
                self._watching[name] = observer

    def feed(self, chunk: PcmChunk) -> None:
        for name, observer in list(self._watching.items()):
            self._tried(name, lambda observer=observer: observer.feed(chunk))  # type: ignore[misc]

    def end(self) -> None:
        for name, observer in list(self._watching.items()):
            self._tried(name, observer.end)

    def _tried(self, name: str, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except Exception:
            logger.exception("request %s: the extension %s failed and no longer observes it", self._request_id, name)
            self._watching.pop(name, None)
            return None


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
