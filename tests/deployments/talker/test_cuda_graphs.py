from pathlib import Path

import numpy as np
import pytest
import torch

from deployments.config import TalkerConfig
from deployments.protocol import Sampling
from deployments.random_checkpoint import Options, write_checkpoint
from deployments.released import SHAPES
from deployments.talker.engine import Engine
from tests.deployments.talker.driving import ask, speak, speak_all

pytestmark = pytest.mark.gpu


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "checkpoint", SHAPES["tiny-CustomVoice"], Options(dtype=torch.float32))
    return tmp_path / "checkpoint"


def load(checkpoint: Path) -> Engine:
    config = TalkerConfig(device="cuda", dtype="float32", max_num_seqs=4, max_model_len=256)
    return Engine(checkpoint, config)


def test_captured_predictor_gives_the_codes_of_the_plain_one(checkpoint: Path) -> None:
    samplings = [
        Sampling(),
        Sampling(subtalker_top_p=0.7),
        Sampling(subtalker_dosample=False),
        Sampling(subtalker_top_k=7),
    ]
    requests = [ask(sampling=sampling, seed=number, ignore_eos=True) for number, sampling in enumerate(samplings)]
    plain, captured = load(checkpoint), load(checkpoint)
    captured.runner.capture()

    expected = speak_all(plain, requests)
    spoken = speak_all(captured, requests)

    assert captured.runner.graphs is not None
    assert captured.runner.graphs.num_eager == 0
    for one, other in zip(spoken, expected, strict=True):
        np.testing.assert_array_equal(one.codes, other.codes)


def test_unlimited_top_k_runs_without_a_graph_and_is_counted(checkpoint: Path) -> None:
    engine = load(checkpoint)
    engine.runner.capture()

    spoken = speak(engine, ask(frames=5, sampling=Sampling(subtalker_top_k=0), ignore_eos=True))

    assert engine.runner.graphs is not None
    assert engine.runner.graphs.num_eager == len(spoken.codes) == 5
