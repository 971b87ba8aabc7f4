import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deployments.talker.model.model_config import ModelConfig
from deployments.talker.model.talker import Talker
from talkray_tools.released import SHAPES


@pytest.fixture
def dtype(device: torch.device) -> torch.dtype:
    """The interpreter's matrix products know no bfloat16."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


@pytest.fixture
def talker(tmp_path: Path, device: torch.device) -> Talker:
    """In float32, so that codes have to be equal."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["tiny-CustomVoice"].config))
    talker = Talker(replace(ModelConfig.load(tmp_path), num_code_groups=4)).to(device).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in talker.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(1 + 0.2 * drawn if "norm" in name else drawn * parameter.shape[-1] ** -0.5)
    talker.prepare(max_positions=128)
    return talker
