"""Attention of one new position per row, with everything around it: QK-norm, RoPE, the cache write, the softmax.

Both kernels read the rows of the QKV product [rows, (heads + 2 * kv_heads) * head_dim]. The new position's key and
value are taken from there, not from the cache, so nothing waits for the write.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deployments.talker.attention import attend_rows
from deployments.talker.kernels.launch import wait_for_predecessor
from deployments.talker.model.layers import rotate

MIN_BLOCK = 16  # positions: the tensor cores' smallest product
_MAX_TILE = 64  # positions of a paged context that one iteration covers


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """What turns raw queries and keys into what attention compares."""

    query: Tensor  # [head_dim] weight of the queries' RMSNorm
    key: Tensor  # [head_dim]
    cos: Tensor  # [positions, head_dim / 2] float32
    sin: Tensor  # [positions, head_dim / 2] float32
    eps: float


@dataclass(frozen=True, slots=True)
class Heads:
    """How many heads share how many keys."""

    query: int
    key: int
    dim: int


@triton.jit
def _rotated(first, second, weight_1, weight_2, cos, sin, eps, head_dim: tl.constexpr):
    """RMSNorm and rotate-half of [..., head_dim / 2] twice, in float32."""
    scale = tl.rsqrt((tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / head_dim + eps)[:, None]
    first, second = first * scale * weight_1, second * scale * weight_2
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _new_position(
    qkv, q_weight, k_weight, cos, sin, position, head, eps,
    heads: tl.constexpr, kv_heads: tl.constexpr, head_dim: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Queries [group, half] twice, key [1, half] twice and value [1, head_dim] of a row, float32 rounded to `dtype`."""
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
    q_1, q_2 = _rotated(q_1, q_2, wq_1, wq_2, cosines, sines, eps, head_dim)
    k_1, k_2 = _rotated(k_1, k_2, wk_1, wk_2, cosines, sines, eps, head_dim)
    q_1, q_2 = q_1.to(dtype).to(tl.float32), q_2.to(dtype).to(tl.float32)
    return q_1, q_2, k_1.to(dtype).to(tl.float32), k_2.to(dtype).to(tl.float32), value


@triton.jit(do_not_specialize=["position"])
def _frame_attention(
    qkv, q_weight, k_weight, cos, sin, keys, values, out, position, eps,
    heads: tl.constexpr, kv_heads: tl.constexpr, head_dim: tl.constexpr, length: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """One program of one warp per (row, query head). Caches [rows, kv_heads, length, head_dim].

    Everything has the shape [length, head_dim / 2], what belongs to one position repeated: no values change threads.
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
    # Earlier positions were written by the previous pass at the latest.
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
    q_1, q_2 = _rotated(q_1, q_2, wq_1, wq_2, cosines, sines, eps, head_dim)
    k_1, k_2 = _rotated(k_1, k_2, wk_1, wk_2, cosines, sines, eps, head_dim)
    q_1, q_2 = q_1.to(dtype).to(tl.float32), q_2.to(dtype).to(tl.float32)
    is_new = (past == position) & (column < half)
    k_1 = tl.where(is_new, k_1.to(dtype).to(tl.float32), past_1)
    k_2 = tl.where(is_new, k_2.to(dtype).to(tl.float32), past_2)
    v_1, v_2 = tl.where(is_new, v_1, values_1), tl.where(is_new, v_2, values_2)
    is_writer = is_new & (head % group == 0)
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
    qkv, q_weight, k_weight, cos, sin, keys, values, out, rows, eps,
    heads: tl.constexpr, kv_heads: tl.constexpr, head_dim: tl.constexpr, length: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """As `_frame_attention` for positions 0 and 1 at once: row `rows + r` is position 1 of row `r`."""
    wait_for_predecessor(pdl)
    row, head = tl.program_id(0), tl.program_id(1)
    group: tl.constexpr = heads // kv_heads
    half: tl.constexpr = head_dim // 2
    dtype: tl.constexpr = keys.dtype.element_ty
    column = tl.arange(0, half)[None, :]
    wide = tl.arange(0, head_dim)[None, :]
    member = (head * group + tl.arange(0, group))[:, None]
    qkv_width: tl.constexpr = (heads + 2 * kv_heads) * head_dim
    _, _, k_1, k_2, value = _new_position(
        qkv + row * qkv_width, q_weight, k_weight, cos, sin, 0, head, eps, heads, kv_heads, head_dim, dtype
    )
    q_1, q_2, next_1, next_2, next_value = _new_position(
        qkv + (rows + row) * qkv_width, q_weight, k_weight, cos, sin, 1, head, eps, heads, kv_heads, head_dim, dtype
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
    tl.store(out + (rows + row) * heads * head_dim + member * head_dim + wide, attended.to(dtype))


@triton.jit
def _load_context(
    keys, values, table, start, end, head,
    kv_heads: tl.constexpr, head_dim: tl.constexpr, block_size: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Keys [tile, head_dim / 2] twice and values [tile, head_dim] of positions from `start` on, zero from `end` on."""
    half: tl.constexpr = head_dim // 2
    offset = tl.arange(0, tile)[:, None]
    inside = start + offset < end
    block = tl.load(table + start // block_size, mask=start < end, other=0, cache_modifier=".cg").to(tl.int64)
    slot = block * block_size + start % block_size + offset
    context = (slot * kv_heads + head) * head_dim
    key = keys + context + tl.arange(0, half)[None, :]
    value = values + context + tl.arange(0, head_dim)[None, :]
    key_1 = tl.load(key, mask=inside, other=0.0, cache_modifier=".cg")
    key_2 = tl.load(key + half, mask=inside, other=0.0, cache_modifier=".cg")
    return key_1, key_2, tl.load(value, mask=inside, other=0.0, cache_modifier=".cg")


@triton.jit
def _fold(q_1, q_2, k_1, k_2, value, inside, top, total, acc, scale: tl.constexpr):
    """One more tile of a softmax whose maximum, sum and weighted values so far are `top`, `total` and `acc`."""
    scores = tl.dot(q_1, k_1.T, input_precision="ieee")
    scores = tl.dot(q_2, k_2.T, scores, input_precision="ieee") * scale
    scores = tl.where(inside[None, :], scores, float("-inf"))
    higher = tl.maximum(tl.maximum(top, tl.max(scores, axis=1)), -1e30)
    weights = tl.exp(scores - higher[:, None])
    fade = tl.exp(top - higher)
    acc = tl.dot(weights.to(value.dtype), value, acc * fade[:, None], input_precision="ieee")
    return higher, total * fade + tl.sum(weights, axis=1), acc


@triton.jit
def _paged_attention(
    qkv, q_weight, k_weight, cos, sin, keys, values, positions, slots, tables, lengths, parts, statistics, arrived, out,
    table_stride, eps,
    heads: tl.constexpr, kv_heads: tl.constexpr, head_dim: tl.constexpr, block_size: tl.constexpr,
    tile: tl.constexpr, splits: tl.constexpr, stages: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """One program per (row, kv head, split of the context). Caches [slots, kv_heads, head_dim].

    The last program of a row's head merges, always in the order of the splits: the sum does not depend on who is last.
    """
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = heads // kv_heads
    half: tl.constexpr = head_dim // 2
    padded: tl.constexpr = 16 if group < 16 else group
    dtype: tl.constexpr = keys.dtype.element_ty
    scale: tl.constexpr = head_dim**-0.5
    column = tl.arange(0, half)[None, :]
    wide = tl.arange(0, head_dim)[None, :]
    in_tile = tl.arange(0, tile)
    # Places and earlier positions were written before the predecessor began: the first tile is under way at once.
    position = tl.load(positions + row, cache_modifier=".cg")
    known = tl.load(lengths + row, cache_modifier=".cg") - 1
    share = tl.cdiv(tl.cdiv(known, tile), splits) * tile
    begin = split * share
    end = tl.minimum(begin + share, known)
    table = tables + row * table_stride
    k_1, k_2, value = _load_context(keys, values, table, begin, end, head, kv_heads, head_dim, block_size, tile)
    cosines, sines = tl.load(cos + position * half + column), tl.load(sin + position * half + column)
    wq_1, wq_2 = tl.load(q_weight + column).to(tl.float32), tl.load(q_weight + half + column).to(tl.float32)
    wait_for_predecessor(pdl)
    qkv_row = qkv + row.to(tl.int64) * (heads + 2 * kv_heads) * head_dim
    # Queries padded to the tensor cores' 16 rows: members past the group repeat its last one and are never stored.
    member = tl.minimum(tl.arange(0, padded), group - 1)[:, None] + head * group
    q_1 = tl.load(qkv_row + member * head_dim + column).to(tl.float32)
    q_2 = tl.load(qkv_row + member * head_dim + half + column).to(tl.float32)
    q_1, q_2 = _rotated(q_1, q_2, wq_1, wq_2, cosines, sines, eps, head_dim)
    q_1, q_2 = q_1.to(dtype), q_2.to(dtype)
    top = tl.full([padded], float("-inf"), tl.float32)
    total = tl.zeros([padded], tl.float32)
    acc = tl.zeros([padded, head_dim], tl.float32)
    if split == 0:
        key = qkv_row + (heads + head) * head_dim
        new_1, new_2 = tl.load(key + column).to(tl.float32), tl.load(key + half + column).to(tl.float32)
        wk_1, wk_2 = tl.load(k_weight + column).to(tl.float32), tl.load(k_weight + half + column).to(tl.float32)
        new_1, new_2 = _rotated(new_1, new_2, wk_1, wk_2, cosines, sines, eps, head_dim)
        new_value = tl.load(qkv_row + (heads + kv_heads + head) * head_dim + wide)
        new = (tl.load(slots + row) * kv_heads + head) * head_dim
        tl.store(keys + new + column, new_1.to(dtype))
        tl.store(keys + new + half + column, new_2.to(dtype))
        tl.store(values + new + wide, new_value.to(dtype))
        new_1, new_2 = new_1.to(dtype).to(tl.float32), new_2.to(dtype).to(tl.float32)
        top = (tl.sum(q_1.to(tl.float32) * new_1, axis=1) + tl.sum(q_2.to(tl.float32) * new_2, axis=1)) * scale
        total += 1.0
        acc += new_value.to(tl.float32)
    top, total, acc = _fold(q_1, q_2, k_1, k_2, value, begin + in_tile < end, top, total, acc, scale)
    for start in tl.range(begin + tile, end, tile, num_stages=stages):
        k_1, k_2, value = _load_context(keys, values, table, start, end, head, kv_heads, head_dim, block_size, tile)
        top, total, acc = _fold(q_1, q_2, k_1, k_2, value, start + in_tile < end, top, total, acc, scale)
    own = (tl.arange(0, padded) < group)[:, None]
    place = (row * heads + member) * head_dim + wide
    if splits == 1:
        tl.store(out + place, (acc / total[:, None]).to(dtype), mask=own)
    else:
        is_own = tl.arange(0, padded) < group
        chunk = (row * kv_heads + head) * splits
        lane = tl.arange(0, padded)
        tl.store(parts + ((chunk + split) * group + lane[:, None]) * head_dim + wide, acc, mask=own)
        tl.store(statistics + ((chunk + split) * group + lane) * 2, top, mask=is_own)
        tl.store(statistics + ((chunk + split) * group + lane) * 2 + 1, total, mask=is_own)
        tl.debug_barrier()
        before = tl.atomic_add(arrived + row * kv_heads + head, 1, sem="acq_rel")
        if before == splits - 1:
            tl.debug_barrier()
            tl.store(arrived + row * kv_heads + head, 0)
            every = tl.arange(0, splits)
            for mine in tl.static_range(group):
                stat = statistics + ((chunk + every) * group + mine) * 2
                tops = tl.load(stat, cache_modifier=".cg")
                totals = tl.load(stat + 1, cache_modifier=".cg")
                weight = tl.exp(tops - tl.max(tops, axis=0))
                piece = parts + ((chunk + every[:, None]) * group + mine) * head_dim + wide
                merged = tl.sum(tl.load(piece, cache_modifier=".cg") * weight[:, None], axis=0)
                merged = merged / tl.sum(totals * weight, axis=0)
                target = out + (row * heads + head * group + mine) * head_dim + tl.arange(0, head_dim)
                tl.store(target, merged.to(dtype))


def attend_frame(qkv: Tensor, norms: HeadNorms, heads: Heads, caches: tuple[Tensor, Tensor], position: int,
                 out: Tensor, *, pdl: bool = False) -> None:  # fmt: skip
    """Attention over one frame's few positions, of which `position` is new.

    `caches`: keys and values [rows, kv_heads, length, head_dim] with room for `position`;
    `out` [rows, heads * head_dim].
    """
    keys, values = caches
    _frame_attention[(qkv.shape[0], heads.query)](
        qkv, norms.query, norms.key, norms.cos, norms.sin, keys, values, out, position, norms.eps,
        heads=heads.query, kv_heads=heads.key, head_dim=heads.dim, length=keys.shape[2], pdl=pdl,
        num_warps=1, launch_pdl=pdl,
    )  # fmt: skip


def attend_frame_start(qkv: Tensor, norms: HeadNorms, heads: Heads, caches: tuple[Tensor, Tensor], out: Tensor, *,
                       pdl: bool = False) -> None:  # fmt: skip
    """Positions 0 and 1 of frames in one pass: the first half of the rows of `qkv` and `out`, and the second."""
    keys, values = caches
    rows = qkv.shape[0] // 2
    _frame_start_attention[(rows, heads.key)](
        qkv, norms.query, norms.key, norms.cos, norms.sin, keys, values, out, rows, norms.eps,
        heads=heads.query, kv_heads=heads.key, head_dim=heads.dim, length=keys.shape[2], pdl=pdl,
        num_warps=2, launch_pdl=pdl,
    )  # fmt: skip


def reference_qkv(qkv: Tensor, norms: HeadNorms, heads: Heads, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised and rotated queries and keys, and values: [rows, heads, head_dim] each."""
    rows = qkv.shape[0]
    split = qkv.view(rows, -1, heads.dim).split((heads.query, heads.key, heads.key), dim=1)
    cos, sin = (table[positions].to(qkv.dtype).repeat(1, 2)[:, None] for table in (norms.cos, norms.sin))

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, (heads.dim,), weight.to(x.dtype), norms.eps)

    query, key = norm(split[0], norms.query), norm(split[1], norms.key)
    return rotate(query, (cos, sin)), rotate(key, (cos, sin)), split[2]


def reference_attend_frame(qkv: Tensor, norms: HeadNorms, heads: Heads, caches: tuple[Tensor, Tensor],
                           position: int) -> Tensor:  # fmt: skip
    """What `attend_frame` writes to `out`; it writes the caches alike."""
    positions = torch.full((qkv.shape[0],), position, device=qkv.device)
    query, key, value = reference_qkv(qkv, norms, heads, positions)
    keys, values = caches
    keys[:, :, position], values[:, :, position] = key, value
    past = slice(None, position + 1)
    return attend_rows(query, keys[:, :, past], values[:, :, past], None).flatten(1)


@dataclass(frozen=True, slots=True)
class Context:
    """Where the rows of a decode step stand. `lengths` counts the new position, which is `positions + 1`."""

    positions: Tensor  # [rows] int32
    slots: Tensor  # [rows] int64: where the new key and value go
    block_tables: Tensor  # [rows, max_blocks] int32
    lengths: Tensor  # [rows] int32


class PagedScratch:
    """What the programs of a split context leave for the one that merges."""

    def __init__(self, rows: int, heads: Heads, splits: int, device: torch.device) -> None:
        self.splits = splits
        self.parts = torch.empty((rows, splits, heads.query, heads.dim), dtype=torch.float32, device=device)
        self.statistics = torch.empty((rows, splits, heads.query, 2), dtype=torch.float32, device=device)
        self.arrived = torch.zeros((rows, heads.key), dtype=torch.int32, device=device)


def splits_for(rows: int) -> int:
    """Into how many programs a row's context is cut: enough to fill the GPU at eight heads a row."""
    wanted: int = triton.next_power_of_2(64 // max(1, rows))
    return max(1, min(8, wanted))


def attend_paged(qkv: Tensor, norms: HeadNorms, heads: Heads, caches: tuple[Tensor, Tensor], context: Context,
                 block_size: int, scratch: PagedScratch, out: Tensor, *, pdl: bool = False, warps: int = 4,
                 stages: int = 2, tile: int = _MAX_TILE) -> None:  # fmt: skip
    """Attention over paged contexts; the new keys and values are written to their slots.

    `caches`: keys and values [slots, kv_heads, head_dim] of one layer; `out` [rows, heads * head_dim]. A block holds a
    multiple of MIN_BLOCK positions.
    """
    keys, values = caches
    rows = qkv.shape[0]
    _paged_attention[(rows, heads.key, scratch.splits)](
        qkv, norms.query, norms.key, norms.cos, norms.sin, keys, values, context.positions, context.slots,
        context.block_tables, context.lengths, scratch.parts, scratch.statistics, scratch.arrived, out,
        context.block_tables.stride(0), norms.eps,
        heads=heads.query, kv_heads=heads.key, head_dim=heads.dim, block_size=block_size,
        tile=min(tile, block_size & -block_size), splits=scratch.splits, stages=stages, pdl=pdl,
        num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip


def reference_attend_paged(qkv: Tensor, norms: HeadNorms, heads: Heads, caches: tuple[Tensor, Tensor],
                           context: Context, block_size: int) -> Tensor:  # fmt: skip
    """What `attend_paged` writes to `out`; it writes the caches alike."""
    query, key, value = reference_qkv(qkv, norms, heads, context.positions.long())
    keys, values = caches
    keys[context.slots], values[context.slots] = key, value
    attended = []
    for row, length in enumerate(context.lengths.tolist()):
        positions = torch.arange(length, device=qkv.device)
        slots = context.block_tables[row, positions // block_size].long() * block_size + positions % block_size
        own_keys, own_values = (tensor[slots].transpose(0, 1)[None] for tensor in (keys, values))
        attended.append(attend_rows(query[row : row + 1], own_keys, own_values, None))
    return torch.cat(attended).flatten(1)


@triton.jit
def _prepare_rows(
    qkv, q_weight, k_weight, cos, sin, keys, values, positions, slots, queries, eps,
    heads: tl.constexpr, kv_heads: tl.constexpr, head_dim: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """One program per (row, kv head): queries for a foreign attention kernel, key and value to their slot."""
    wait_for_predecessor(pdl)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group: tl.constexpr = heads // kv_heads
    half: tl.constexpr = head_dim // 2
    dtype: tl.constexpr = keys.dtype.element_ty
    column = tl.arange(0, half)[None, :]
    position = tl.load(positions + row)
    q_1, q_2, k_1, k_2, value = _new_position(
        qkv + row * (heads + 2 * kv_heads) * head_dim, q_weight, k_weight, cos, sin, position, head, eps,
        heads, kv_heads, head_dim, dtype,
    )  # fmt: skip
    new = (tl.load(slots + row) * kv_heads + head) * head_dim
    tl.store(keys + new + column, k_1.to(dtype))
    tl.store(keys + new + half + column, k_2.to(dtype))
    tl.store(values + new + tl.arange(0, head_dim)[None, :], value.to(dtype))
    member = (head * group + tl.arange(0, group))[:, None]
    tl.store(queries + (row * heads + member) * head_dim + column, q_1.to(dtype))
    tl.store(queries + (row * heads + member) * head_dim + half + column, q_2.to(dtype))


def prepare_rows(qkv: Tensor, norms: HeadNorms, heads: Heads, caches: tuple[Tensor, Tensor], context: Context,
                 queries: Tensor, *, pdl: bool = False) -> None:  # fmt: skip
    """Everything of `attend_paged` but the attention: fill `queries` [rows, heads, head_dim] and the new slots."""
    keys, values = caches
    _prepare_rows[(qkv.shape[0], heads.key)](
        qkv, norms.query, norms.key, norms.cos, norms.sin, keys, values, context.positions, context.slots, queries,
        norms.eps, heads=heads.query, kv_heads=heads.key, head_dim=heads.dim, pdl=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
