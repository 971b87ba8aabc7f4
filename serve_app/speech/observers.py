"""Observers of the audio of an utterance while it is sent."""

import logging
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from deployments.protocol import ModelInfo, PcmChunk
from serve_app.speech.segments import Utterance

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Observer(Protocol):
    """Sees the audio of one utterance."""

    def feed(self, chunk: PcmChunk) -> None:
        """Called with each chunk that is sent."""
        ...

    def end(self) -> None:
        """Called after all chunks were sent, but not if the speech fails or the client leaves."""
        ...


Observe = Callable[[Utterance, ModelInfo], Observer | None]


class Observers:
    """The observers of one utterance. If one raises, the error is logged, it sees no more chunks, and the speech
    continues.
    """

    def __init__(self, observe: Mapping[str, Observe], utterance: Utterance, info: ModelInfo) -> None:
        """`observe`: each extension's function, by the extension's name."""
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
            logger.exception("request %s: the extension %s observes it no more", self._request_id, name)
            self._watching.pop(name, None)
            return None
