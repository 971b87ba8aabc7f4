"""Chunks of an utterance's audio, as they pass from its segments to the client."""

from dataclasses import dataclass, fields
from operator import attrgetter

import numpy as np

from deployments.protocol import SAMPLE_BYTES, FinishReason, ModelInfo, PcmChunk

# The audio of a text with nothing to speak, because clients take an answer without audio for a failure.
SILENCE_S = 0.1
_fields_of = attrgetter(*(field.name for field in fields(PcmChunk)))


@dataclass(frozen=True, slots=True)
class UtteranceChunk(PcmChunk):
    """A replica's chunk with its place in the utterance. It never leaves the ingress."""

    text_positions: tuple[tuple[float, float], ...] = ()  # (seconds of the utterance's audio, characters spoken)
    seed: int | None = None  # set where it is not the request's
    segment: int = 0  # number of the segment of a long text. The codec begins anew with each.

    @classmethod
    def of(cls, chunk: PcmChunk) -> "UtteranceChunk":
        """A chunk of the only segment."""
        return cls(*_fields_of(chunk))

    def emptied(self) -> "UtteranceChunk":
        """A chunk of the same utterance that brings nothing: no audio, no frames, no end."""
        return UtteranceChunk(
            b"", self.codes[:0], self.num_text_tokens, position=self.position, seed=self.seed, segment=self.segment
        )


def silence(info: ModelInfo) -> UtteranceChunk:
    """A moment without a sound, as the whole of an utterance."""
    codes = np.zeros((0, info.num_code_groups), np.int16)
    pcm = bytes(int(SILENCE_S * info.sample_rate) * SAMPLE_BYTES)
    return UtteranceChunk(pcm, codes, num_text_tokens=0, finish_reason=FinishReason.STOP)
