"""The embedded voice does as it is told: slower, faster, quieter. Other instructions change next to nothing."""

from dataclasses import replace
from statistics import median

import numpy as np
import pytest
import torch

from deployments.codec.backends.registry import load_decoder
from deployments.config import TalkerConfig
from deployments.talker.engine.engine import Engine
from deployments.talker.engine.startup import build_engine
from deployments.weights.store import locate
from tests.deployments.talker.driving import Spoken, ask, speak_all

TEXT = "The train to the coast leaves at nine, and the next one only in the evening."


@pytest.fixture(scope="module")
def embedded() -> Engine:
    return build_engine(locate("embedded"), TalkerConfig(device="cpu"))


def spoken(engine: Engine, instructions: str | None) -> list[Spoken]:
    asked = ask(TEXT, seed=3, frames=400, instructions=instructions, non_streaming_mode=True)
    requests = [replace(asked, voice=voice) for voice in engine.info.voices]
    return speak_all(engine, requests)


def lengths(engine: Engine, instructions: str | None) -> list[int]:
    return [len(each.codes) for each in spoken(engine, instructions)]


@pytest.mark.parametrize(("instructions", "least", "most"), [
    ("Speak slowly.", 1.2, 1.8), ("Speak a bit faster, please.", 0.6, 0.88),
    ("Speak like a pirate.", 0.93, 1.07),
])  # fmt: skip
def test_speed_is_as_told(embedded: Engine, instructions: str, least: float, most: float) -> None:
    pairs = zip(lengths(embedded, instructions), lengths(embedded, None), strict=True)
    assert least <= median(told / plain for told, plain in pairs) <= most


def test_quiet_speech_is_quieter(embedded: Engine) -> None:
    decoder = load_decoder(locate("embedded") / "speech_tokenizer")

    def loudness_db(codes: np.ndarray) -> float:
        with torch.inference_mode():
            audio, _ = decoder.decode(torch.from_numpy(codes.astype(np.int64))[None], [decoder.initial_state()])
        return float(10 * torch.log10(audio.square().mean()))

    told = [loudness_db(np.asarray(each.codes)) for each in spoken(embedded, "Use a quiet voice.")]
    plain = [loudness_db(np.asarray(each.codes)) for each in spoken(embedded, None)]
    assert median(quiet - loud for quiet, loud in zip(told, plain, strict=True)) < -6
