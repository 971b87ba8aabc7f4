from dataclasses import fields

import numpy as np

from deployments.protocol import FinishReason, PcmChunk, Reading
from serve_app.speech.utterance_chunk import UtteranceChunk


def test_a_replicas_chunk_keeps_all_that_it_has() -> None:
    codes = np.ones((2, 16), np.int16)
    sent = PcmChunk(
        b"ab", codes, 3, FinishReason.LOOP, 7, (("codes", 1),), (Reading(4, (0.5,)),), None, (("Talker", 2),)
    )
    chunk = UtteranceChunk.of(sent)
    assert [getattr(chunk, field.name) for field in fields(PcmChunk)] == [
        getattr(sent, field.name) for field in fields(PcmChunk)
    ]
    assert (chunk.text_positions, chunk.seed, chunk.segment) == ((), None, 0)
