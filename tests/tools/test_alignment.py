"""The head that follows the text: the embedded voice names its own, other checkpoints have theirs found."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from deployments.config import TalkerConfig
from deployments.protocol import Codes, Reference, Sampling, SynthesisRequest
from deployments.talker.engine.engine import Engine
from deployments.talker.engine.startup import build_engine
from deployments.talker.model.model_config import ModelConfig
from deployments.weights.description import OWN_FACTS, describe_directory
from deployments.weights.store import locate
from talkray_tools.alignment import find_head
from talkray_tools.random_checkpoint import Options, write_checkpoint
from talkray_tools.released import SHAPES, Shape
from talkray_tools.verify import Check, check_head
from tests.deployments.talker.driving import speak
from tests.tools.planted import plant

TEXTS = ("Hello! This is a plain sentence.", "She has three small boats in the harbour.")
CONFIG = TalkerConfig(device="cpu", threads=1, max_num_seqs=1)
# As the 0.6B: wider text than talker, a predictor as wide as the talker.
SMALL = {"tts_model_size": "0b6", "talker_config": {"text_hidden_size": 128}}
SMALL["talker_config"]["code_predictor_config"] = {"hidden_size": 64}  # type: ignore[index]
BY_KIND: dict[str, dict[str, object]] = {
    "CustomVoice": {"voice": "ryan"},
    "VoiceDesign": {"instructions": "A calm voice."},
    "Base": {"reference": Reference(np.zeros(24000, np.float32), None, x_vector_only=True)},
}
KINDS: dict[str, tuple[str, Callable[[Shape], Shape]]] = {
    "1.7B-CustomVoice": ("CustomVoice", lambda shape: shape),
    "1.7B-VoiceDesign": ("VoiceDesign", lambda shape: shape),
    "1.7B-Base": ("Base", lambda shape: shape),
    "0.6B-CustomVoice": ("CustomVoice", lambda shape: shape.changed(SMALL)),
    "0.6B-Base": ("Base", lambda shape: shape.changed(SMALL)),
    "released tokenizer": ("CustomVoice", lambda shape: shape.with_official_text()),
}
shapes = pytest.mark.parametrize("name", KINDS)


@pytest.fixture(scope="module")
def random(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """By name: a checkpoint of that shape in miniature with random weights."""

    @cache
    def write(name: str) -> Path:
        kind, change = KINDS[name]
        directory = tmp_path_factory.mktemp("random") / "checkpoint"
        write_checkpoint(directory, change(SHAPES[f"tiny-{kind}"]), Options(dtype=torch.float32))
        return directory

    return write


@pytest.fixture(autouse=True)
def _without_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights end where they like."""
    monkeypatch.setattr("deployments.talker.networks.unfused_networks.MIN_NEW_TOKENS", 10**6)


def requests(name: str, texts: tuple[str, ...] = TEXTS, *, in_prompt: bool = False) -> list[SynthesisRequest]:
    plain = SynthesisRequest("x", "", non_streaming_mode=in_prompt, sampling=Sampling(max_new_tokens=61))
    return [
        replace(plain, text=text, seed=seed, **BY_KIND[KINDS[name][0]])  # type: ignore[arg-type]
        for seed, text in enumerate(texts)
    ]


def checked(directory: Path, asked: list[SynthesisRequest]) -> Check:
    engine = build_engine(directory, CONFIG)
    return check_head(engine, [(request, spoken(engine, request)) for request in asked], directory)


def spoken(engine: Engine, request: SynthesisRequest) -> Codes:
    return speak(engine, request).codes


def test_the_embedded_voices_head_is_the_one_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    engine = build_engine(locate("embedded", report=lambda line: None), CONFIG)
    sampling = Sampling(max_new_tokens=100)
    asked = [SynthesisRequest("x", text, voice="nora", seed=n, sampling=sampling) for n, text in enumerate(TEXTS)]
    best, *_ = find_head(engine, [(request, spoken(engine, request)) for request in asked])
    assert (best.layer, best.head) == engine.model_config.text.alignment_head
    assert best.follows


@shapes
def test_a_planted_head_is_found_rated_and_noted(random: Callable[[str], Path], name: str, tmp_path: Path) -> None:
    layer, head = list(KINDS).index(name) % 3, list(KINDS).index(name) % 4
    model = plant(random(name), tmp_path / "model", layer, head)
    before = describe_directory(model, name, CONFIG, on_gpu=False)
    check = checked(model, requests(name))
    assert check.passed, check.detail
    assert f"layer {layer}, head {head}, 0.9" in check.detail
    assert "100% without leaps" in check.detail
    assert json.loads((model / OWN_FACTS).read_text()) == {"alignment_head": [layer, head]}
    after = describe_directory(model, name, CONFIG, on_gpu=False)
    assert after == replace(before, word_times=True), "its fingerprint, too: stored voices stay what they are"
    assert ModelConfig.load(model).text.alignment_head == (layer, head)


@pytest.mark.parametrize("name", ["1.7B-CustomVoice", "1.7B-VoiceDesign", "0.6B-CustomVoice"])
def test_it_is_found_where_the_text_is_in_the_prompt(random: Callable[[str], Path], name: str, tmp_path: Path) -> None:
    """Texts of one length, so that a head follows them all that reads so many positions back."""
    asked = requests(name, ("Hello! This is a plain sentence.", "She has two boats in the harbor."), in_prompt=True)
    sequence = build_engine(random(name), CONFIG).input_processor.build_sequence(0, asked[0])
    assert sequence is not None
    lag = sequence.prompt.num_positions - sequence.prompt.text_start
    check = checked(plant(random(name), tmp_path / "model", lag=lag), asked)
    assert check.passed, check.detail


@shapes
def test_where_no_head_walks_steadily_none_is_noted(random: Callable[[str], Path], name: str) -> None:
    check = checked(random(name), requests(name))
    assert check.passed is None
    assert "none found, so word times are estimates; the best is layer" in check.detail
    assert 0 <= float(check.values["steady"] or 0) < 0.9
    assert not (random(name) / OWN_FACTS).exists()


def test_unwritable_folders_fail(
    random: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = plant(random("1.7B-Base"), tmp_path / "model")

    def read_only(file: Path, *_: object, **__: object) -> int:
        raise OSError(30, "Read-only file system", str(file))

    monkeypatch.setattr(Path, "write_text", read_only)
    check = checked(model, requests("1.7B-Base"))
    assert check.passed is False
    assert f"Read-only file system: '{model / OWN_FACTS}'" in check.detail
    assert 'write {"alignment_head": [0, 1]} into it' in check.detail
