"""The speaker encoder with random weights. `make report-faults` tests with its own weights."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from talkray_tools.speaker_encoder import VoiceJudge


@pytest.mark.parametrize("seconds", [0.001, 0.05, 1.37, 1.59, 1.6, 1.61, 5.0])
def test_speech_of_any_length_has_a_vector(seconds: float, tmp_path: Path) -> None:
    layers = nn.ModuleDict({"lstm": nn.LSTM(40, 256, 3), "linear": nn.Linear(256, 256)})
    torch.save({"model_state": layers.state_dict()}, tmp_path / "pretrained.pt")
    speech = np.random.default_rng(0).standard_normal(int(24000 * seconds)).astype(np.float32) / 10
    vector = VoiceJudge(tmp_path / "pretrained.pt", 24000).vector(speech)
    assert vector.shape == (256,)
    assert vector.norm().item() == pytest.approx(1.0)
