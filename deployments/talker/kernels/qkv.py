"""Per-head normalization, and rotation by position, of the queries and keys in rows of a QKV product.

Rows are [rows, (heads + 2 * kv_heads) * head_dim].
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norm weights and rotary tables for queries and keys."""

    query: Tensor  # [head_dim] weight of the query RMSNorm
    key: Tensor  # [head_dim]
    cos: Tensor  # [positions, head_dim / 2] float32
    sin: Tensor  # [positions, head_dim / 2] float32
    eps: float


@dataclass(frozen=True, slots=True)
class Heads:
    """Number of query heads, number of key heads, and their dimension."""

    query: int
    key: int
    dim: int


@triton.jit
def rotated(first, second, weight_1, weight_2, cos, sin, eps, head_dim: tl.constexpr):
    """Apply RMSNorm and rotate-half to the two halves [..., head_dim / 2] of heads, in float32."""
    scale = tl.rsqrt((tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / head_dim + eps)[:, None]
    first, second = first * scale * weight_1, second * scale * weight_2
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def new_position(
    qkv, q_weight, k_weight, cos, sin, position, head, eps,
    heads: tl.constexpr, kv_heads: tl.constexpr, head_dim: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Return a row's queries 2 x [group, half], key 2 x [1, half] and value [1, head_dim], rounded to `dtype`."""
    group: tl.constexpr = heads // kv_heads
    half: tl.constexpr = head_dim // 2
    column = tl.arange(0, half)[None, :]
    cosines = tl.load(cos + position * half + column)
    sines = tl.load(sin + position * half + column)
    member = (head * group + tl.arange(0, group))[:, None]
    q_1 = tl.load(qkv + member * head_dim + column).to(tl.float32)
    q_2 = tl.load(qkv + member * head_dim + half + column).to(tl.float32)
    key = qkv + (heads + head) * head_dim
    k_1 = tl.load(key + column).to(tl.float32)
    k_2 = tl.load(key + half + column).to(tl.float32)
    value = tl.load(qkv + (heads + kv_heads + head) * head_dim + tl.arange(0, head_dim)[None, :]).to(tl.float32)
    wq_1, wq_2 = tl.load(q_weight + column).to(tl.float32), tl.load(q_weight + half + column).to(tl.float32)
    wk_1, wk_2 = tl.load(k_weight + column).to(tl.float32), tl.load(k_weight + half + column).to(tl.float32)
    q_1, q_2 = rotated(q_1, q_2, wq_1, wq_2, cosines, sines, eps, head_dim)
    k_1, k_2 = rotated(k_1, k_2, wk_1, wk_2, cosines, sines, eps, head_dim)
    q_1, q_2 = q_1.to(dtype).to(tl.float32), q_2.to(dtype).to(tl.float32)
    return q_1, q_2, k_1.to(dtype).to(tl.float32), k_2.to(dtype).to(tl.float32), value
