import importlib.util
import logging

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton: make kernels installs it")

from deployments.talker.kernels.paged_attention import choose_attention
from deployments.talker.kernels.qkv import Heads

HEADS = Heads(4, 2, 32)


def test_unasked_the_built_in_kernel_serves(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        backend = choose_attention("auto", HEADS, block_size=256, dtype=torch.bfloat16)
    assert backend.name == "triton"
    assert caplog.messages == ["attention backend: triton"]


@pytest.mark.parametrize(("setting", "installed", "shape", "reason"), [
    ("flash_attn", None, (256, torch.bfloat16), "flash-attn is not installed"),
    ("flash_attn", "flash_attn", (64, torch.bfloat16), "multiple of 256 positions, but they have 64"),
    ("flash_attn", "flash_attn", (256, torch.float32), "half precision"),
    ("auto", None, (8, torch.bfloat16), "multiple of 16 positions, not 8"),
])  # fmt: skip
def test_a_refusal_gives_its_reason(
    setting: str, installed: str | None, shape: tuple[int, torch.dtype], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed)
    with pytest.raises(ValueError, match=reason):
        choose_attention(setting, HEADS, block_size=shape[0], dtype=shape[1])
