"""Attention within a frame: one new position per row over at most sixteen positions, fused with the work around it.

The kernel includes QK-norm, RoPE, the cache write and the softmax. It reads the new position's key and
value from the QKV product instead of the cache, so it does not have to wait for the write.
"""

import triton
import triton.language as tl
from torch import Tensor

from deployments.gpu.launch import wait_for_predecessor
from deployments.talker.kernels.qkv import HeadNorms, Heads, new_position, rotated


@triton.jit(do_not_specialize=["position"])
def _frame_attention(
    qkv, q_weight, k_weight, cos, sin, keys, values, out, position, eps,
    heads: tl.constexpr, kv_heads: tl.constexpr, head_dim: tl.constexpr, length: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Run one program of one warp per (row, query head). Caches are [rows, kv_heads, length, head_dim].

    All tensors have the shape [length, head_dim / 2]. Values of one position are repeated, so no value moves between
    threads.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    group: tl.constexpr = heads // kv_heads
    half: tl.constexpr = head_dim // 2
    dtype: tl.constexpr = keys.dtype.element_ty
    kv_head = head // group
    past = tl.arange(0, length)[:, None]
    column = tl.arange(0, half)[None, :]
    both = past * 0 + column
    cached = (row * kv_heads + kv_head).to(tl.int64) * length * head_dim + past * head_dim + column
    known = (past < position) & (column < half)
    # These positions were written by the previous pass or an earlier one.
    past_1 = tl.load(keys + cached, mask=known, other=0.0, cache_modifier=".cg").to(tl.float32)
    past_2 = tl.load(keys + cached + half, mask=known, other=0.0, cache_modifier=".cg").to(tl.float32)
    values_1 = tl.load(values + cached, mask=known, other=0.0, cache_modifier=".cg").to(tl.float32)
    values_2 = tl.load(values + cached + half, mask=known, other=0.0, cache_modifier=".cg").to(tl.float32)
    cosines, sines = tl.load(cos + position * half + both), tl.load(sin + position * half + both)
    wq_1, wq_2 = tl.load(q_weight + both).to(tl.float32), tl.load(q_weight + half + both).to(tl.float32)
    wk_1, wk_2 = tl.load(k_weight + both).to(tl.float32), tl.load(k_weight + half + both).to(tl.float32)
    wait_for_predecessor(pdl)
    qkv_row = qkv + row * (heads + 2 * kv_heads) * head_dim
    query, key = qkv_row + head * head_dim + both, qkv_row + (heads + kv_head) * head_dim + both
    value = qkv_row + (heads + kv_heads + kv_head) * head_dim + both
    q_1, q_2 = tl.load(query).to(tl.float32), tl.load(query + half).to(tl.float32)
    k_1, k_2 = tl.load(key).to(tl.float32), tl.load(key + half).to(tl.float32)
    v_1, v_2 = tl.load(value).to(tl.float32), tl.load(value + half).to(tl.float32)
    q_1, q_2 = rotated(q_1, q_2, wq_1, wq_2, cosines, sines, eps, head_dim)
    k_1, k_2 = rotated(k_1, k_2, wk_1, wk_2, cosines, sines, eps, head_dim)
    q_1, q_2 = q_1.to(dtype).to(tl.float32), q_2.to(dtype).to(tl.float32)
    is_new = (past == position) & (column < half)
    k_1 = tl.where(is_new, k_1.to(dtype).to(tl.float32), past_1)
    k_2 = tl.where(is_new, k_2.to(dtype).to(tl.float32), past_2)
    v_1, v_2 = tl.where(is_new, v_1, values_1), tl.where(is_new, v_2, values_2)
    is_writer = tl.where(head % group == 0, is_new, False)
    tl.store(keys + cached, k_1.to(dtype), mask=is_writer)
    tl.store(keys + cached + half, k_2.to(dtype), mask=is_writer)
    tl.store(values + cached, v_1.to(dtype), mask=is_writer)
    tl.store(values + cached + half, v_2.to(dtype), mask=is_writer)
    products = tl.sum(q_1 * k_1 + q_2 * k_2, axis=1)[:, None]
    scores = tl.where(past <= position, products * (head_dim**-0.5), float("-inf"))
    weights = tl.exp(scores - tl.max(scores, axis=0)[None, :])
    total = tl.sum(weights, axis=0)
    attended_1, attended_2 = tl.sum(weights * v_1, axis=0) / total, tl.sum(weights * v_2, axis=0) / total
    target = out + (row * heads + head) * head_dim + tl.arange(0, half)
    tl.store(target, attended_1.to(dtype))
    tl.store(target + half, attended_2.to(dtype))


@triton.jit
def _frame_start_attention(
    qkv, q_weight, k_weight, cos, sin, keys, values, out, num_rows, eps,
    heads: tl.constexpr, kv_heads: tl.constexpr, head_dim: tl.constexpr, length: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Run `_frame_attention` for positions 0 and 1 together. Row `rows + r` is position 1 of row `r`."""
    wait_for_predecessor(pdl)
    row, head = tl.program_id(0), tl.program_id(1)
    group: tl.constexpr = heads // kv_heads
    half: tl.constexpr = head_dim // 2
    dtype: tl.constexpr = keys.dtype.element_ty
    column = tl.arange(0, half)[None, :]
    wide = tl.arange(0, head_dim)[None, :]
    member = (head * group + tl.arange(0, group))[:, None]
    qkv_width: tl.constexpr = (heads + 2 * kv_heads) * head_dim
    _, _, k_1, k_2, value = new_position(
        qkv + row * qkv_width, q_weight, k_weight, cos, sin, 0, head, eps, heads, kv_heads, head_dim, dtype
    )
    q_1, q_2, next_1, next_2, next_value = new_position(
        qkv + (num_rows + row) * qkv_width, q_weight, k_weight, cos, sin, 1, head, eps, heads, kv_heads, head_dim, dtype
    )
    place = (row * kv_heads + head).to(tl.int64) * length * head_dim
    tl.store(keys + place + column, k_1.to(dtype))
    tl.store(keys + place + half + column, k_2.to(dtype))
    tl.store(values + place + wide, value.to(dtype))
    tl.store(keys + place + head_dim + column, next_1.to(dtype))
    tl.store(keys + place + head_dim + half + column, next_2.to(dtype))
    tl.store(values + place + head_dim + wide, next_value.to(dtype))
    zero = (tl.sum(q_1 * k_1, axis=1) + tl.sum(q_2 * k_2, axis=1)) * (head_dim**-0.5)
    one = (tl.sum(q_1 * next_1, axis=1) + tl.sum(q_2 * next_2, axis=1)) * (head_dim**-0.5)
    share = (1.0 / (1.0 + tl.exp(zero - one)))[:, None]
    tl.store(
        out + row * heads * head_dim + member * head_dim + wide, tl.broadcast_to(value, [group, head_dim]).to(dtype)
    )
    attended = value * (1.0 - share) + next_value * share
    tl.store(out + (num_rows + row) * heads * head_dim + member * head_dim + wide, attended.to(dtype))


def attend_frame(qkv: Tensor, norms: HeadNorms, heads: Heads, caches: tuple[Tensor, Tensor], position: int,
                 out: Tensor, *, pdl: bool = False) -> None:  # fmt: skip
    """Compute attention from each row's new `position` to all existing positions of its frame.

    `caches` are keys and values [rows, kv_heads, length, head_dim] with room for `position`. `out` is [rows, heads *
    head_dim].
    """
    keys, values = caches
    _frame_attention[(qkv.shape[0], heads.query)](
        qkv, norms.query, norms.key, norms.cos, norms.sin, keys, values, out, position, norms.eps,
        heads=heads.query, kv_heads=heads.key, head_dim=heads.dim, length=keys.shape[2], pdl=pdl,
        num_warps=1, launch_pdl=pdl,
    )  # fmt: skip


def attend_frame_start(qkv: Tensor, norms: HeadNorms, heads: Heads, caches: tuple[Tensor, Tensor], out: Tensor, *,
                       pdl: bool = False) -> None:  # fmt: skip
    """Compute attention for positions 0 and 1 of each frame in one pass. Each position takes half of the rows."""
    keys, values = caches
    num_rows = qkv.shape[0] // 2
    _frame_start_attention[(num_rows, heads.key)](
        qkv, norms.query, norms.key, norms.cos, norms.sin, keys, values, out, num_rows, norms.eps,
        heads=heads.query, kv_heads=heads.key, head_dim=heads.dim, length=keys.shape[2], pdl=pdl,
        num_warps=2, launch_pdl=pdl,
    )  # fmt: skip
