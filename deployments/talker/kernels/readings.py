"""The text position that each row reads: the alignment head's attention, summed over the text's positions."""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from deployments.gpu.launch import wait_for_predecessor
from deployments.talker.kernels.qkv import HeadNorms, Heads, rotated
from deployments.talker.state.batch_state import BatchState, Columns, Context

_TEXT_START, _NUM_TEXT = tl.constexpr(Columns.TEXT_START), tl.constexpr(Columns.NUM_TEXT)
_TILE = 64  # context positions per iteration


@triton.jit
def _read_text(
    rows, packed, qkv, q_weight, cos, sin, keys, positions, tables, lengths, out, packed_width, table_stride, eps,
    head: tl.constexpr, heads: tl.constexpr, kv_heads: tl.constexpr, head_dim: tl.constexpr,
    block_size: tl.constexpr, tile: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Run one program per row, after the attention that wrote the row's key. Rows with no text exit early."""
    wait_for_predecessor(pdl)
    index = tl.program_id(0)
    source = packed + tl.load(rows + index) * packed_width
    text_start, num_text = tl.load(source + _TEXT_START), tl.load(source + _NUM_TEXT)
    length = tl.where(num_text > 0, tl.load(lengths + index), 0)
    half: tl.constexpr = head_dim // 2
    kv_head: tl.constexpr = head * kv_heads // heads
    dtype: tl.constexpr = keys.dtype.element_ty
    column = tl.arange(0, half)[None, :]
    turn = tl.load(positions + index) * half + column
    query = qkv + (index.to(tl.int64) * (heads + 2 * kv_heads) + head) * head_dim + column
    q_1, q_2 = rotated(
        tl.load(query, cache_modifier=".cg").to(tl.float32), tl.load(query + half, cache_modifier=".cg").to(tl.float32),
        tl.load(q_weight + column).to(tl.float32), tl.load(q_weight + half + column).to(tl.float32),
        tl.load(cos + turn), tl.load(sin + turn), eps, head_dim,
    )  # fmt: skip
    q_1, q_2 = q_1.to(dtype).to(tl.float32), q_2.to(dtype).to(tl.float32)
    top, total = float("-inf"), 0.0
    mass, moment = 0.0, 0.0
    for start in range(0, length, tile):
        offset = start + tl.arange(0, tile)
        inside = offset < length
        block = tl.load(tables + index * table_stride + offset // block_size, mask=inside, other=0).to(tl.int64)
        key = keys + ((block * block_size + offset % block_size) * kv_heads + kv_head)[:, None] * head_dim + column
        k_1 = tl.load(key, mask=inside[:, None], other=0.0, cache_modifier=".cg").to(tl.float32)
        k_2 = tl.load(key + half, mask=inside[:, None], other=0.0, cache_modifier=".cg").to(tl.float32)
        scores = (tl.sum(k_1 * q_1, axis=1) + tl.sum(k_2 * q_2, axis=1)) * head_dim**-0.5
        scores = tl.where(inside, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=0))
        weights, fade = tl.exp(scores - higher), tl.exp(top - higher)
        token = offset - text_start
        own = tl.where((token >= 0) & (token < num_text), weights, 0.0)
        total = total * fade + tl.sum(weights, axis=0)
        mass = mass * fade + tl.sum(own, axis=0)
        moment = moment * fade + tl.sum(own * token.to(tl.float32), axis=0)
        top = higher
    total = tl.where(length > 0, total, 1.0)
    tl.store(out + index * 2, mass / total)
    tl.store(out + index * 2 + 1, moment / total)


@dataclass(frozen=True, slots=True)
class AlignmentReader:
    """Reads a batch's text positions from one attention head of one layer."""

    layer: int
    head: int  # index among the layer's query heads
    heads: Heads
    state: BatchState
    rows: Tensor  # [batch] int64: state rows
    out: Tensor  # [batch, 2] float32: see `FrameNetworks.readings`
    pdl: bool

    def read(self, qkv: Tensor, norms: HeadNorms, keys: Tensor, context: Context) -> None:
        """Read from the layer's product `qkv` [rows, ...] and its cache `keys` [slots, kv_heads, head_dim]."""
        packed, tables = self.state.packed, context.block_tables
        _read_text[(len(qkv),)](
            self.rows, packed, qkv, norms.query, norms.cos, norms.sin, keys, context.positions, tables,
            context.lengths, self.out, packed.stride(0), tables.stride(0), norms.eps, head=self.head,
            heads=self.heads.query, kv_heads=self.heads.key, head_dim=self.heads.dim,
            block_size=self.state.size.block_size, tile=_TILE, pdl=self.pdl, num_warps=4, launch_pdl=self.pdl,
        )  # fmt: skip
