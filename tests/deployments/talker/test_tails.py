"""Speech that goes on from a tail: the tail is read, and neither delivered nor counted."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deployments.protocol import Reference, SynthesisRequest, Tail
from deployments.talker.engine.engine import Engine
from deployments.talker.engine.startup import build_engine
from deployments.talker.model.input_tables import MAX_PASS_POSITIONS
from tests.deployments.talker.conftest import CONFIG
from tests.deployments.talker.driving import ask, resumed, speak
from tests.deployments.talker.test_live_text import live, run_dry, write

Kinds = Callable[[str], Engine]
TEXT = "What follows the tail is new."
WORDS = "of this. "
VOICES = ("CustomVoice", "VoiceDesign", "Base")


def codes(frames: int, seed: int = 0) -> np.ndarray[tuple[int, int], np.dtype[np.int16]]:
    return np.random.default_rng(seed).integers(0, 2048, (frames, 16)).astype(np.int16)


TAIL = Tail(WORDS, codes(12))


def request(kind: str, *, frames: int = 20, tail: Tail | None = TAIL, **changes: object) -> SynthesisRequest:
    who: dict[str, object] = {"voice": "ryan"} if kind == "CustomVoice" else {"voice": None}
    if kind == "VoiceDesign":
        who["instructions"] = "A calm voice."
    if kind == "Base":
        audio = np.random.default_rng(0).uniform(-0.5, 0.5, 12000).astype(np.float32)
        who["reference"] = Reference(audio, "What is said.")
    asked = ask(TEXT, frames=frames, ignore_eos=True, tail=tail, **who, **changes)
    return replace(asked, reference_codes=codes(10, 1)) if kind == "Base" else asked


@pytest.mark.parametrize("kind", VOICES)
@pytest.mark.parametrize("full_text", [False, True])
def test_only_new_frames_are_delivered_and_the_tail_changes_them(engine_of: Kinds, kind: str, full_text: bool) -> None:
    engine = engine_of(kind)
    joined = speak(engine, request(kind, non_streaming_mode=full_text))
    alone = speak(engine, request(kind, non_streaming_mode=full_text, tail=None))
    assert len(joined.codes) == len(alone.codes) == 20
    assert joined.num_text_tokens == alone.num_text_tokens + 1  # the space in front, a token of this tokenizer
    assert not np.array_equal(joined.codes, alone.codes)


@pytest.mark.parametrize("kind", VOICES)
@pytest.mark.parametrize("place", [1, 7, 19])
def test_a_stream_with_a_tail_goes_on_elsewhere(engine_of: Kinds, kind: str, place: int) -> None:
    engine = engine_of(kind)
    whole = speak(engine, request(kind))
    rest = speak(engine, resumed(request(kind), whole.codes[:place]))
    assert np.array_equal(rest.codes, whole.codes[place:])
    assert rest.reason is whole.reason


@pytest.mark.parametrize("full_text", [False, True])
def test_the_rows_are_those_of_one_text_that_is_resumed_behind_the_tail(engine: Engine, full_text: bool) -> None:
    """The talker reads the same as if a single segment had been spoken so far; the rows only begin to count later."""
    joined = engine.prompts.build(request("CustomVoice", non_streaming_mode=full_text))
    tokens = engine.prompts.tokenizer
    body = tokens.encode(WORDS + TEXT)
    whole = engine.prompts.build_from_ids(
        request("CustomVoice", tail=None, non_streaming_mode=full_text), body, has_all_text=True
    )
    num_frames = len(TAIL.codes)
    text = [*whole.text_ids, *np.pad(whole.trailing, (0, 99), constant_values=engine.model_config.tokens.tts_pad)]
    assert joined.num_positions == whole.num_positions + num_frames
    assert list(joined.text_ids) == text[: len(whole.text_ids) + num_frames]
    assert list(joined.codec_ids[: -num_frames or None]) == list(whole.codec_ids)
    num_new = len(tokens.encode_exact(" " + TEXT))
    assert (joined.num_text_tokens, joined.text_start) == (num_new, whole.text_start + len(body) - num_new)


def test_limits_are_those_of_the_text_alone(engine: Engine) -> None:
    def limit(tail: Tail | None) -> object:
        sequence = engine.input_processor.build_sequence(
            0, request("CustomVoice", frames=5000, tail=tail, non_streaming_mode=False)
        )
        assert sequence is not None
        return sequence.prompt.num_positions + sequence.limit.frames, sequence.limit.reason

    assert limit(TAIL) == limit(None)  # here the context ends both
    for frames in (1, 9):
        assert len(speak(engine, request("CustomVoice", frames=frames)).codes) == frames


def test_a_live_text_with_a_tail_is_spoken_as_if_it_had_come_at_once(engine: Engine) -> None:
    asked = request("CustomVoice", non_streaming_mode=False)
    assert np.array_equal(write(engine, [TEXT[:9], TEXT[9:]], asked).codes, speak(engine, asked).codes)
    engine.add(0, live(asked))
    engine.append_text(0, TEXT[:3], is_last=False)  # fewer tokens than the tail has frames
    assert run_dry(engine) == []
    engine.abort(0)


@pytest.mark.parametrize("length", [200, 230])
def test_a_tail_that_takes_a_second_pass_is_left_out(tiny_checkpoint: Callable[[str], Path], length: int) -> None:
    engine = build_engine(tiny_checkpoint("CustomVoice"), CONFIG.model_copy(update={"max_model_len": 1024}))
    full = request("CustomVoice", non_streaming_mode=True)

    def positions(tail: Tail | None) -> int:
        asked = replace(full, text="a " * length, tail=tail)
        sequence = engine.input_processor.build_sequence(0, asked)
        assert sequence is not None
        return sequence.prompt.num_positions

    tail = Tail("b " * 20, codes(25))
    fits = positions(None) + 40 + 25 <= MAX_PASS_POSITIONS
    assert fits is (length == 200)
    assert (positions(tail) > positions(None)) is fits
    assert positions(tail) <= MAX_PASS_POSITIONS
