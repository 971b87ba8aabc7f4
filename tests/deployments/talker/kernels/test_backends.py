import importlib.util
import logging

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton: make kernels installs it")

from deployments.talker.kernels.paged_attention import choose_attention
from deployments.talker.kernels.qkv import Heads

HEADS = Heads(4, 2, 32)


@pytest.fixture
def no_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


def test_unasked_the_built_in_kernel_serves(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        backend = choose_attention("auto", HEADS, block_size=256, dtype=torch.bfloat16)
    assert backend.name == "triton"
    assert caplog.messages == ["attention backend: triton"]


@pytest.mark.usefixtures("no_flash")
def test_demanding_flash_attn_says_why_not() -> None:
    with pytest.raises(ValueError, match="flash-attn is not installed"):
        choose_attention("flash_attn", HEADS, block_size=256, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("block_size", "dtype", "reason"),
    [(64, torch.bfloat16, "multiple of 256 positions, but they have 64"), (256, torch.float32, "half precision")],
)
def test_flash_attn_refuses(block_size: int, dtype: torch.dtype, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(ValueError, match=reason):
        choose_attention("flash_attn", HEADS, block_size=block_size, dtype=dtype)


def test_blocks_that_no_kernel_takes() -> None:
    with pytest.raises(ValueError, match="multiple of 16 positions, not 8"):
        choose_attention("auto", HEADS, block_size=8, dtype=torch.bfloat16)
