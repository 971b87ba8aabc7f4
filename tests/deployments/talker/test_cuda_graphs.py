"""Captured steps give the codes of steps that run as they are, and those of the CPU."""

from pathlib import Path

import numpy as np
import pytest
import torch

from deployments.config import TalkerConfig
from deployments.protocol import Sampling
from deployments.talker.engine.device import EngineDevice
from deployments.talker.engine.engine import Engine
from deployments.talker.engine.startup import build_engine, warm_up
from tests.deployments.talker.driving import GREEDY, Spoken, ask, speak_all

pytestmark = pytest.mark.gpu

LONG_TEXT = "A text that is a good deal longer than the other ones, so that its prompt takes several passes. " * 8
REQUESTS = [
    ask(sampling=sampling, seed=number, ignore_eos=True, non_streaming_mode=number % 2 == 0)
    for number, sampling in enumerate(
        [
            Sampling(),
            Sampling(subtalker_top_p=0.7),
            Sampling(subtalker_dosample=False),
            Sampling(subtalker_top_k=0),
            Sampling(repetition_penalty=1.5, top_k=3),
        ]
    )
]
GREEDY_REQUESTS = [
    ask("Hello there.", sampling=GREEDY, frames=30),
    ask("Another one.", sampling=GREEDY, frames=25, non_streaming_mode=False),
    ask(LONG_TEXT, sampling=GREEDY, frames=20),
    ask("Instructed.", sampling=GREEDY, frames=25, instructions="Speak slowly."),
]


def load(checkpoint: Path, *, device: str = "cuda") -> Engine:
    config = TalkerConfig(device=device, max_num_seqs=4, max_model_len=1024)
    chosen = EngineDevice(config)
    chosen.dtype = torch.float32
    return build_engine(checkpoint, config, on=chosen)


def assert_same(spoken: list[Spoken], expected: list[Spoken]) -> None:
    for one, other in zip(spoken, expected, strict=True):
        np.testing.assert_array_equal(one.codes, other.codes)
        assert one.reason is other.reason


def test_captured_steps_give_the_codes_of_plain_ones(checkpoint: Path) -> None:
    plain, captured = load(checkpoint), load(checkpoint)
    warm_up(captured)
    before = captured.runner.graphs.num_eager
    assert_same(speak_all(captured, REQUESTS, steps_between=2), speak_all(plain, REQUESTS, steps_between=2))
    assert captured.runner.graphs.num_eager == before


def test_greedy_codes_are_those_of_the_cpu(checkpoint: Path) -> None:
    captured = load(checkpoint)
    warm_up(captured)
    expected = speak_all(load(checkpoint, device="cpu"), GREEDY_REQUESTS)
    assert_same(speak_all(captured, GREEDY_REQUESTS), expected)
    assert_same(speak_all(captured, GREEDY_REQUESTS, steps_between=3), expected)
    assert captured.runner.graphs.num_eager == 0
