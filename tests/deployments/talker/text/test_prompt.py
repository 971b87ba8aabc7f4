from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from deployments.protocol import Reference, SynthesisRequest
from deployments.talker.engine.engine import Engine
from deployments.talker.engine.startup import build_engine
from deployments.talker.text.prompt import Prompt, PromptBuilder
from deployments.weights.description import describe
from talkray_tools.random_checkpoint import Options, write_checkpoint
from talkray_tools.released import SHAPES
from tests.deployments.talker.conftest import CONFIG

TEXT = "Hello there, world."
REFERENCE_TEXT = "What is said."
LEAD_ROWS = 3  # the role
AUTO_TAGS = 3  # nothink, think_bos, think_eos; a language makes it one more
SPEAKER = 1
Builders = Callable[[str], PromptBuilder]


@pytest.fixture
def builders(engine_of: Callable[[str], Engine]) -> Builders:
    return lambda name: engine_of(name).prompts


@pytest.fixture
def named(builders: Builders) -> PromptBuilder:
    return builders("CustomVoice")


def ask(text: str = TEXT, **changes: object) -> SynthesisRequest:
    fields = {"voice": "ryan", "non_streaming_mode": False, **changes}
    return SynthesisRequest("test", text, **fields)  # type: ignore[arg-type]


def clone(*, seconds: float = 0.5, text: str | None = REFERENCE_TEXT, frames: int | None = 10) -> SynthesisRequest:
    rng = np.random.default_rng(0)
    audio = rng.uniform(-0.5, 0.5, int(24000 * seconds)).astype(np.float32)
    reference = Reference(audio, text, x_vector_only=frames is None)
    codes = None if frames is None else rng.integers(0, 2048, (frames, 16)).astype(np.int16)
    return SynthesisRequest("test", TEXT, reference=reference, reference_codes=codes)


def same(one: Prompt, other: Prompt) -> bool:
    names = ("text_ids", "codec_ids", "trailing")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


@pytest.mark.parametrize("change", [{"tts_model_size": "0b6"}, {"talkray": {"spoken_form": "english"}}])
def test_what_was_not_trained_on_instructions_drops_them(tmp_path: Path, change: dict[str, object]) -> None:
    small = SHAPES["tiny-CustomVoice"].changed(change)
    write_checkpoint(tmp_path / "small", small, Options(dtype=torch.float32))
    engine = build_engine(tmp_path / "small", CONFIG)
    assert same(engine.prompts.build(ask(instructions="Speak slowly.")), engine.prompts.build(ask()))
    assert not engine.info.supports_instructions


def test_a_voice_with_a_spoken_form_follows_instructions_where_its_files_say_so(tmp_path: Path) -> None:
    told = SHAPES["tiny-CustomVoice"].changed({"talkray": {"spoken_form": "english", "follows_instructions": True}})
    write_checkpoint(tmp_path / "told", told, Options(dtype=torch.float32))
    engine = build_engine(tmp_path / "told", CONFIG)
    assert not same(engine.prompts.build(ask(instructions="Speak slowly.")), engine.prompts.build(ask()))
    assert engine.info.supports_instructions
    assert describe(str(tmp_path / "told"), CONFIG, on_gpu=False) == replace(engine.info, name=str(tmp_path / "told"))


@pytest.mark.parametrize("frames", [10, None])
def test_clones_take_no_instructions_as_officially(engine_of: Callable[[str], Engine], frames: int | None) -> None:
    engine, plain = engine_of("Base"), clone(frames=frames)
    instructed = replace(plain, instructions="Speak slowly.")
    assert same(engine.prompts.build(instructed), engine.prompts.build(plain))
    assert not engine.info.supports_instructions


@pytest.mark.parametrize(
    "frames",
    [3, 31, 32, 60],  # text and its end are as long as 32 frames and their beginning
)
def test_a_clone_in_context_has_text_and_frames_side_by_side(builders: Builders, frames: int) -> None:
    builder = builders("Base")
    prompt = builder.build(clone(frames=frames))
    tokens = len(REFERENCE_TEXT) + len(TEXT)  # a token per byte
    head = LEAD_ROWS + AUTO_TAGS + SPEAKER + 1
    assert prompt.num_positions == head + frames + 1
    assert (len(prompt.trailing), prompt.num_text_tokens) == (max(1, tokens + 1 - (frames + 1)), len(TEXT))
    control = builder.config.tokens
    assert prompt.trailing[-1] == (control.tts_eos if tokens + 1 > frames + 1 else control.tts_pad)
