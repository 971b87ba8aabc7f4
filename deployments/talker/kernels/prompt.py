"""Attention among the rows of packed prompts: each row sees the rows of its own sequence up to itself."""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from deployments.kernel_launch import wait_for_predecessor
from deployments.talker.attention import Context
from deployments.talker.kernels.paged_attention import prepare_rows
from deployments.talker.kernels.qkv import HeadNorms, Heads

MAX_PROMPT_ROWS = 128  # all scores of a head stay in registers


@triton.jit
def _prompt_attention(
    queries, keys, values, slots, owners, positions, out, rows,
    heads: tl.constexpr, kv_heads: tl.constexpr, head_dim: tl.constexpr, block: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """One program per head and 16 queries. Caches [slots, kv_heads, head_dim]."""
    wait_for_predecessor(pdl)
    head = tl.program_id(0)
    mine = tl.program_id(1) * 16 + tl.arange(0, 16)
    every = tl.arange(0, block)
    wide = tl.arange(0, head_dim)[None, :]
    is_row, is_mine = every < rows, mine < rows
    slot = tl.load(slots + every, mask=is_row, other=0)[:, None]
    context = (slot * kv_heads + head // (heads // kv_heads)) * head_dim + wide
    query = tl.load(queries + (mine[:, None] * heads + head) * head_dim + wide, mask=is_mine[:, None], other=0.0)
    key = tl.load(keys + context, mask=is_row[:, None], other=0.0)
    scores = tl.dot(query, key.T, input_precision="ieee") * (head_dim**-0.5)
    own, position = tl.load(owners + every, mask=is_row, other=-1), tl.load(positions + every, mask=is_row, other=0)
    my_owner = tl.load(owners + mine, mask=is_mine, other=-1)
    my_position = tl.load(positions + mine, mask=is_mine, other=0)
    seen = (own[None, :] == my_owner[:, None]) & (position[None, :] <= my_position[:, None])
    scores = tl.where(seen, scores, float("-inf"))
    weights = tl.exp(scores - tl.max(scores, axis=1)[:, None])
    weights = weights / tl.sum(weights, axis=1)[:, None]
    value = tl.load(values + context, mask=is_row[:, None], other=0.0)
    attended = tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    place = (mine[:, None] * heads + head) * head_dim + wide
    tl.store(out + place, attended.to(out.dtype.element_ty), mask=is_mine[:, None])


@dataclass(slots=True)
class PromptAttention:
    """The attention backend of a pass whose rows begin at their sequences' position 0."""

    heads: Heads
    owners: Tensor  # [rows] int32 or int64: rows of one sequence have one owner
    pdl: bool

    name = "prompt"

    def __call__(self, qkv: Tensor, norms: HeadNorms, caches: tuple[Tensor, Tensor], context: Context) -> Tensor:
        """As `PagedBackend`."""
        rows, heads = len(qkv), self.heads
        queries = qkv.new_empty((rows, heads.query, heads.dim))
        out = qkv.new_empty((rows, heads.query * heads.dim))
        prepare_rows(qkv, norms, heads, caches, context, queries, pdl=self.pdl)
        attend_prompt(queries, caches, context, self.owners, heads, out, pdl=self.pdl)
        return out


def attend_prompt(queries: Tensor, caches: tuple[Tensor, Tensor], context: Context, owners: Tensor, heads: Heads,
                  out: Tensor, *, pdl: bool = False) -> None:  # fmt: skip
    """Queries [rows, heads, head_dim] over what is at the rows' own slots -> out [rows, heads * head_dim]."""
    rows = len(queries)
    assert rows <= MAX_PROMPT_ROWS
    keys, values = caches
    _prompt_attention[(heads.query, triton.cdiv(rows, 16))](
        queries, keys, values, context.slots, owners, context.positions, out, rows,
        heads=heads.query, kv_heads=heads.key, head_dim=heads.dim, block=max(16, triton.next_power_of_2(rows)),
        pdl=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
