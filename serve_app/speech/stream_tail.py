"""Tail of a stream: the last words and codes, from which later speech can continue."""

from collections import deque

import numpy as np

from deployments.protocol import FinishReason, Frame, PcmChunk, Tail
from serve_app.text.characters import is_ideograph

_MOST_FRAMES, _LEAST_FRAMES = 25, 5  # length of a tail in frames, at most 2 s
_MOST_CHARS = 100


class StreamTail:
    """Collects a stream's last codes."""

    def __init__(self) -> None:
        self._codes: deque[Frame] = deque(maxlen=_MOST_FRAMES)
        self._num_frames = 0
        self._reason: FinishReason | None = None

    def add(self, chunk: PcmChunk) -> None:
        self._codes.extend(chunk.codes)
        self._num_frames += len(chunk.codes)
        self._reason = chunk.finish_reason

    @property
    def is_over(self) -> bool:
        return self._reason is not None

    def tail(self, text: str) -> Tail | None:
        """Return the tail of a stream that has spoken `text`, or None if the stream was cut off or is too short.

        The tail starts at a word boundary, assuming that all characters take the same time to speak.
        """
        text = text.strip()
        if self._reason is not FinishReason.STOP or not text:
            return None
        frames_per_char = self._num_frames / len(text)
        for start in range(max(0, len(text) - _MOST_CHARS), len(text)):
            num_frames = round((len(text) - start) * frames_per_char)
            if num_frames < _LEAST_FRAMES:
                break
            if num_frames <= len(self._codes) and _begins_word(text, start):
                gap = "" if is_ideograph(text[-1]) else " "
                return Tail(text[start:] + gap, np.stack(list(self._codes)[-num_frames:]))
        return None


def _begins_word(text: str, place: int) -> bool:
    is_start = not place or text[place - 1].isspace() or is_ideograph(text[place])
    return is_start and not text[place].isspace()
