"""Attention among packed prompts against plain PyTorch."""

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton: make kernels installs it")

from deployments.talker.kernels.paged_attention import attend_prompt
from deployments.talker.kernels.qkv import Heads
from deployments.talker.state.batch_state import Context
from tools.kernels.reference import reference_attend_prompt

HEADS = Heads(4, 2, 16)
SIZES = [5, 1, 9, 3]  # rows of each prompt


@pytest.mark.parametrize(("sizes", "padding"), [(SIZES, 0), (SIZES, 14), ([30, 150, 3], 9)])
def test_rows_see_what_is_before_them(device: torch.device, dtype: torch.dtype, sizes: list[int], padding: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = sum(sizes) + padding
    owners = torch.cat([torch.full((size,), number) for number, size in enumerate(sizes)] + [torch.full((padding,), 9)])
    positions = torch.cat([torch.arange(size) for size in sizes] + [torch.zeros(padding, dtype=torch.long)])
    slots = torch.cat((torch.randperm(200, generator=generator)[: rows - padding] + 1, torch.zeros(padding).long()))
    caches = tuple(torch.randn(204, 2, 16, generator=generator).to(device, dtype) for _ in range(2))
    queries = torch.randn(rows, 4, 16, generator=generator).to(device, dtype)
    context = Context(positions.int().to(device), slots.to(device), torch.zeros(rows, 1).int().to(device),
                      positions.int().to(device) + 1)  # fmt: skip
    out = torch.full((rows, 64), torch.nan, device=device, dtype=dtype)
    attend_prompt(queries, (caches[0], caches[1]), context, owners.to(device), HEADS, out)
    expected = reference_attend_prompt(queries, (caches[0], caches[1]), context, owners.to(device))
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
