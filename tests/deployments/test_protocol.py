"""What crosses a process comes out as it went in."""

import pickle
from dataclasses import MISSING, fields, replace

import numpy as np
import pytest
from ray import cloudpickle

from deployments.protocol import ClonePrompt, FinishReason, FrameChunk, PcmChunk, Reading, Reference, Tail

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


def test_chunks_are_joined_in_full() -> None:
    """Whichever of them has audio, marks, readings, a prompt or a trail."""
    chunks = [
        FrameChunk(CODES[:1], 2, pcm=b"ab", readings=(Reading(0, (0.5,)),), trail=(("Talker#1", 2),)),
        FrameChunk(CODES[1:], 5, pcm=b"cd", marks=(("codes", 1),), clone_prompt=PROMPT),
        FrameChunk(
            CODES[:0], 3, FinishReason.LOOP, pcm=b"ef", readings=(Reading(1, (1.5,)),), trail=(("Talker#2", 3),)
        ),
    ]
    joined = FrameChunk.join(chunks)
    np.testing.assert_array_equal(joined.codes, CODES)
    assert (joined.num_text_tokens, joined.finish_reason, joined.pcm) == (5, FinishReason.LOOP, b"abcdef")
    assert joined.readings == (Reading(0, (0.5,)), Reading(1, (1.5,)))
    assert (joined.marks, joined.clone_prompt) == ((("codes", 1),), PROMPT)
    assert joined.trail == (("Talker#1", 2), ("Talker#2", 3))


def test_what_is_left_of_a_chunk_without_its_audio() -> None:
    emptied = FULL[1].emptied()  # type: ignore[union-attr]
    assert emptied.is_heartbeat
    assert (emptied.position, emptied.seed, emptied.segment, emptied.num_text_tokens) == (7, 3, 1, 3)
    assert not replace(emptied, codes=CODES).is_heartbeat


@pytest.mark.parametrize(("text", "gap"), [("Hello. ", " "), ("你好。", ""), ("", "")])
def test_a_tail_says_what_stands_before_the_text_that_follows(text: str, gap: str) -> None:
    assert Tail(text, CODES).gap == gap


@pytest.mark.parametrize(("x_vector_only", "prompt", "is_enough"), [
    (False, PROMPT, True),
    (False, ClonePrompt(PROMPT.speaker, None), False),  # the samples are still needed for codes
    (True, ClonePrompt(PROMPT.speaker, None), True), (False, None, False),
])  # fmt: skip
def test_a_prompt_replaces_samples_if_enough(x_vector_only: bool, prompt: ClonePrompt | None, is_enough: bool) -> None:
    reference = Reference(np.zeros(8, np.float32), "Hi.", x_vector_only)
    with_prompt = reference.with_prompt(prompt)
    if is_enough:
        assert (with_prompt.audio, with_prompt.prompt, with_prompt.key) == (None, prompt, reference.key)
        assert with_prompt.with_prompt(ClonePrompt(PROMPT.speaker, None)) is with_prompt
    else:
        assert with_prompt is reference


def test_the_names_of_endings_are_those_of_the_documentation() -> None:
    assert [*FinishReason] == ["stop", "early", "length", "silence", "loop", "runaway"]
