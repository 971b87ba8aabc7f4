"""These run where Triton is: on a GPU, or on CPU tensors in Triton's interpreter (TRITON_INTERPRET=1)."""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED:
    from tests.deployments.talker.kernels.interpreter import accept_numpy_scalars

    accept_numpy_scalars()


@pytest.fixture
def device() -> torch.device:
    if not INTERPRETED and not torch.cuda.is_available():
        pytest.skip("needs a GPU or TRITON_INTERPRET=1")
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture
def dtype(device: torch.device) -> torch.dtype:
    """The interpreter's matrix products know no bfloat16."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16
