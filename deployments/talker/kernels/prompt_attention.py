"""Attention among the rows of packed prompts: each row sees the rows of its own sequence up to itself.

A sequence's rows stand in the order of their positions, so that no row sees a later one.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from deployments.gpu.launch import wait_for_predecessor
from deployments.talker.kernels.paged_attention import prepare_rows
from deployments.talker.kernels.qkv import HeadNorms, Heads
from deployments.talker.state.batch_state import Context

_QUERIES = 16  # rows of a program: the tensor cores' smallest product
_KEYS = 128  # rows whose scores are in registers at a time


@triton.jit
def _prompt_attention(
    queries, keys, values, slots, owners, positions, out, num_rows,
    heads: tl.constexpr, kv_heads: tl.constexpr, head_dim: tl.constexpr, block: tl.constexpr, tile: tl.constexpr,
    tiles: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """One program per head and `block` queries. Caches [slots, kv_heads, head_dim]."""
    wait_for_predecessor(pdl)
    head = tl.program_id(0)
    mine = tl.program_id(1) * block + tl.arange(0, block)
    wide = tl.arange(0, head_dim)[None, :]
    is_mine = mine < num_rows
    my_owner = tl.load(owners + mine, mask=is_mine, other=-1)[:, None]
    my_position = tl.load(positions + mine, mask=is_mine, other=0)[:, None]
    place = (mine[:, None] * heads + head) * head_dim + wide
    query = tl.load(queries + place, mask=is_mine[:, None], other=0.0)
    top = tl.full([block], float("-inf"), tl.float32)
    total = tl.zeros([block], tl.float32)
    acc = tl.zeros([block, head_dim], tl.float32)
    last = tl.minimum((tl.program_id(1) + 1) * block, num_rows)
    for number in tl.static_range(tiles):
        every = number * tile + tl.arange(0, tile)
        is_row = every < last
        slot = tl.load(slots + every, mask=is_row, other=0)[:, None]
        context = (slot * kv_heads + head // (heads // kv_heads)) * head_dim + wide
        key = tl.load(keys + context, mask=is_row[:, None], other=0.0)
        value = tl.load(values + context, mask=is_row[:, None], other=0.0)
        owner = tl.load(owners + every, mask=is_row, other=-2)[None, :]
        position = tl.load(positions + every, mask=is_row, other=0)[None, :]
        scores = tl.dot(query, key.T, input_precision="ieee") * (head_dim**-0.5)
        scores = tl.where((owner == my_owner) & (position <= my_position), scores, float("-inf"))
        higher = tl.maximum(tl.maximum(top, tl.max(scores, axis=1)), -1e30)
        weights = tl.exp(scores - higher[:, None])
        fade = tl.exp(top - higher)
        acc = tl.dot(weights.to(value.dtype), value, acc * fade[:, None], input_precision="ieee")
        top, total = higher, total * fade + tl.sum(weights, axis=1)
    total = tl.where(is_mine, total, 1.0)  # a padding row sees no row
    tl.store(out + place, (acc / total[:, None]).to(out.dtype.element_ty), mask=is_mine[:, None])


@dataclass(slots=True)
class PromptAttention:
    """The attention backend of a pass whose rows begin at their sequences' position 0."""

    heads: Heads
    owners: Tensor  # [rows] int32 or int64: rows of one sequence have one owner
    pdl: bool

    name = "prompt"

    def __call__(self, qkv: Tensor, norms: HeadNorms, caches: tuple[Tensor, Tensor], context: Context) -> Tensor:
        num_rows, heads = len(qkv), self.heads
        queries = qkv.new_empty((num_rows, heads.query, heads.dim))
        out = qkv.new_empty((num_rows, heads.query * heads.dim))
        prepare_rows(qkv, norms, heads, caches, context, queries, pdl=self.pdl)
        attend_prompt(queries, caches, context, self.owners, heads, out, pdl=self.pdl)
        return out


def attend_prompt(queries: Tensor, caches: tuple[Tensor, Tensor], context: Context, owners: Tensor, heads: Heads,
                  out: Tensor, *, pdl: bool = False) -> None:  # fmt: skip
    """Queries [rows, heads, head_dim] over keys and values at the rows' own slots -> out [rows, heads * head_dim]."""
    num_rows = len(queries)
    keys, values = caches
    tile = min(_KEYS, max(_QUERIES, triton.next_power_of_2(num_rows)))
    _prompt_attention[(heads.query, triton.cdiv(num_rows, _QUERIES))](
        queries, keys, values, context.slots, owners, context.positions, out, num_rows,
        heads=heads.query, kv_heads=heads.key, head_dim=heads.dim, block=_QUERIES, tile=tile,
        tiles=triton.cdiv(num_rows, tile), pdl=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
