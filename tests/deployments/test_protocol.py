"""What crosses a process comes out as it went in."""

import pickle
from dataclasses import MISSING, fields

import numpy as np
import pytest
from ray import cloudpickle

from deployments.protocol import ClonePrompt, FinishReason, FrameChunk, PcmChunk, Reading

CODES = np.arange(-16, 16, dtype=np.int16).reshape(2, 16)
PROMPT = ClonePrompt(np.ones(4, np.float32), CODES[:1])
BESIDE = {
    "num_text_tokens": 3, "finish_reason": FinishReason.LOOP, "marks": (("codes", 1),),
    "readings": (Reading(4, (0.5, 1.5)),), "clone_prompt": PROMPT, "trail": (("Talker#1", 2),),
}  # fmt: skip
FULL = [
    FrameChunk(CODES, pcm=b"ab", **BESIDE),
    PcmChunk(b"ab", CODES, position=7, text_positions=((0.08, 2.0),), seed=3, segment=1, **BESIDE),
]


@pytest.mark.parametrize("chunk", FULL, ids=lambda chunk: type(chunk).__name__)
@pytest.mark.parametrize("module", [pickle, cloudpickle], ids=lambda module: module.__name__)
def test_a_chunk_with_everything(chunk: FrameChunk | PcmChunk, module: object) -> None:
    received = pickle.loads(module.dumps(chunk, protocol=5))  # type: ignore[attr-defined]  # modules have no types
    assert type(received) is type(chunk)
    for field in fields(chunk):
        sent, got = getattr(chunk, field.name), getattr(received, field.name)
        assert field.default is MISSING or sent != field.default, f"{field.name}: give it a value here"
        if field.name == "codes":
            np.testing.assert_array_equal(got, sent, strict=True)
        elif field.name == "clone_prompt":
            np.testing.assert_array_equal(got.speaker, sent.speaker, strict=True)
        else:
            assert (got, type(got)) == (sent, type(sent)), field.name


@pytest.mark.parametrize("groups", [0, 16])
def test_a_chunk_without_frames_keeps_its_width(groups: int) -> None:
    nothing = np.zeros((0, groups), np.int16)
    for chunk in (FrameChunk(nothing, 0), PcmChunk(b"", nothing, 0)):
        assert pickle.loads(pickle.dumps(chunk)).codes.shape == (0, groups)


def test_the_names_of_endings_are_those_of_the_documentation() -> None:
    assert [*FinishReason] == ["stop", "early", "length", "silence", "loop", "runaway"]
