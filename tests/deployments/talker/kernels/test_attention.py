import sys
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

pytest.importorskip("triton", reason="needs Triton: make kernels installs it")

from deployments.talker.kernels import paged_attention
from deployments.talker.kernels.frame_attention import attend_frame, attend_frame_start
from deployments.talker.kernels.paged_attention import FlashAttention, TritonAttention
from deployments.talker.kernels.qkv import HeadNorms, Heads
from deployments.talker.state.batch_state import Context
from tools.kernels.reference import reference_attend_frame, reference_attend_paged

HEADS = Heads(4, 2, 32)
POSITIONS = 400


def norms(dtype: torch.dtype, device: torch.device) -> HeadNorms:
    angles = torch.arange(POSITIONS, device=device)[:, None] / (1e4 ** (torch.arange(16, device=device) / 16))
    weights = (torch.rand(HEADS.dim, device=device).to(dtype) + 0.5 for _ in range(2))
    return HeadNorms(*weights, angles.cos(), angles.sin(), 1e-6)


def rows_of(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(count, (HEADS.query + 2 * HEADS.key) * HEADS.dim, device=device).to(dtype)


def tolerance(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 4e-2


def test_a_frame_position_by_position(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    shape = (3, HEADS.key, 16, HEADS.dim)
    caches = torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)
    expected_caches = caches[0].double(), caches[1].double()
    shared = norms(dtype, device)
    for position in range(16):
        qkv = rows_of(3, dtype, device)
        out = torch.full((3, HEADS.query * HEADS.dim), torch.nan, dtype=dtype, device=device)
        attend_frame(qkv, shared, HEADS, caches, position, out)
        expected = reference_attend_frame(qkv.double(), shared, HEADS, expected_caches, position)
        torch.testing.assert_close(out.double(), expected, atol=tolerance(dtype), rtol=tolerance(dtype))
    torch.testing.assert_close(caches[0].double(), expected_caches[0], atol=tolerance(dtype), rtol=tolerance(dtype))
    torch.testing.assert_close(caches[1].double(), expected_caches[1], atol=tolerance(dtype), rtol=tolerance(dtype))


def test_the_first_two_positions_at_once(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    shape = (3, HEADS.key, 16, HEADS.dim)
    caches = torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)
    expected_caches = caches[0].double(), caches[1].double()
    shared, qkv = norms(dtype, device), rows_of(6, dtype, device)
    out = torch.full((6, HEADS.query * HEADS.dim), torch.nan, dtype=dtype, device=device)
    attend_frame_start(qkv, shared, HEADS, caches, out)
    for position, half in enumerate((slice(0, 3), slice(3, 6))):
        expected = reference_attend_frame(qkv[half].double(), shared, HEADS, expected_caches, position)
        torch.testing.assert_close(out[half].double(), expected, atol=tolerance(dtype), rtol=tolerance(dtype))
    torch.testing.assert_close(caches[0].double(), expected_caches[0], atol=tolerance(dtype), rtol=tolerance(dtype))
    torch.testing.assert_close(caches[1].double(), expected_caches[1], atol=tolerance(dtype), rtol=tolerance(dtype))


def flash_attn_with_kvcache(
    queries: Tensor, keys: Tensor, values: Tensor, *, cache_seqlens: Tensor, block_table: Tensor, causal: bool
) -> Tensor:
    """flash-attn's paged decode of one position per row, in PyTorch. Pages are [pages, block, key heads, dim]."""
    assert causal
    pages = ([keys[table].flatten(0, 1), values[table].flatten(0, 1)] for table in block_table.long())
    contexts = ([page[:end].transpose(0, 1) for page in each] for each, end in zip(pages, cache_seqlens, strict=True))
    attended = [
        scaled_dot_product_attention(query.transpose(0, 1), *context, enable_gqa=True).transpose(0, 1)
        for query, context in zip(queries, contexts, strict=True)
    ]
    return torch.stack(attended)


@pytest.mark.parametrize(("kind", "splits", "block_size"), [
    *((TritonAttention, splits, block_size) for splits in (1, 4) for block_size in (16, 64)), (FlashAttention, 1, 256)
])  # fmt: skip
def test_paged_contexts(
    kind: type[TritonAttention | FlashAttention], splits: int, block_size: int, dtype: torch.dtype,
    device: torch.device, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    flash_attn = SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)
    monkeypatch.setitem(sys.modules, "flash_attn", cast("ModuleType", flash_attn))
    monkeypatch.setattr(paged_attention, "splits_for", lambda rows: splits)
    torch.manual_seed(splits)
    lengths = torch.tensor([1, 16, 150], dtype=torch.int32, device=device)
    blocks = 160 // block_size + 1
    tables = (torch.randperm(3 * blocks, device=device) + 1).view(3, blocks).int()
    positions = lengths - 1
    own_block = tables.gather(1, (positions // block_size).long()[:, None])[:, 0].long()
    context = Context(positions, own_block * block_size + positions % block_size, tables, lengths)
    shape = ((3 * blocks + 1) * block_size, HEADS.key, HEADS.dim)
    caches = torch.randn(shape, device=device).to(dtype), torch.randn(shape, device=device).to(dtype)
    expected_caches = caches[0].double(), caches[1].double()
    shared, attend = norms(dtype, device), kind(HEADS, block_size=block_size, pdl=False)
    for _ in range(2):  # the second call finds the counters as the first left them
        qkv = rows_of(3, dtype, device)
        out = attend(qkv, shared, caches, context)
        expected = reference_attend_paged(qkv.double(), shared, HEADS, expected_caches, context, block_size)
        torch.testing.assert_close(out.double(), expected, atol=tolerance(dtype), rtol=tolerance(dtype))
    torch.testing.assert_close(caches[0].double(), expected_caches[0], atol=tolerance(dtype), rtol=tolerance(dtype))
