"""Attention for one new position per row over its paged context, with QK-norm, RoPE, cache write and softmax.

The kernel reads the new position's key and value from the QKV product instead of the cache, so it need not wait for the
write. The backend, this kernel or flash-attn, is selected once when the engine starts. Prompts have their own kernel.
"""

import importlib.util
import logging
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from deployments.gpu.launch import wait_for_predecessor
from deployments.talker.kernels.qkv import HeadNorms, Heads, new_position, rotated
from deployments.talker.state.batch_state import Context

logger = logging.getLogger(__name__)

_FLASH_PAGE = 256  # flash-attn's paged kernel requires page sizes that are multiples of this number of rows
MIN_BLOCK = 16  # positions in the tensor cores' smallest product
_MAX_TILE = 64  # positions of a paged context per iteration
# For prompts: rows per program, and rows whose scores are in registers at the same time
_QUERIES, _KEYS = 16, 128


@triton.jit
def _load_context(
    keys, values, table, start, end, head,
    kv_heads: tl.constexpr, head_dim: tl.constexpr, block_size: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Load keys 2 x [tile, head_dim / 2] and values [tile, head_dim] from position `start`, zero from `end` on."""
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
    """Add one tile to an online softmax with maximum `top`, sum `total` and weighted values `acc`."""
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
    qkv, q_weight, k_weight, cos, sin, keys, values, positions, slot_mapping, tables, lengths, parts, statistics,
    arrived, out, table_stride, eps,
    heads: tl.constexpr, kv_heads: tl.constexpr, head_dim: tl.constexpr, block_size: tl.constexpr,
    tile: tl.constexpr, splits: tl.constexpr, stages: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Run one program per (row, kv head, split of the context). Caches are [slots, kv_heads, head_dim].

    The last program for a row's head merges all splits in a fixed order, so the result does not depend on the order in
    which programs run.
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
    # Block tables and earlier positions were written before the predecessor started, so the first tile loads early.
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
    # Queries are padded to the tensor cores' 16 rows. Rows beyond the group repeat its last row and are never stored.
    member = tl.minimum(tl.arange(0, padded), group - 1)[:, None] + head * group
    q_1 = tl.load(qkv_row + member * head_dim + column).to(tl.float32)
    q_2 = tl.load(qkv_row + member * head_dim + half + column).to(tl.float32)
    q_1, q_2 = rotated(q_1, q_2, wq_1, wq_2, cosines, sines, eps, head_dim)
    q_1, q_2 = q_1.to(dtype), q_2.to(dtype)
    top = tl.full([padded], float("-inf"), tl.float32)
    total = tl.zeros([padded], tl.float32)
    acc = tl.zeros([padded, head_dim], tl.float32)
    if split == 0:
        key = qkv_row + (heads + head) * head_dim
        new_1, new_2 = tl.load(key + column).to(tl.float32), tl.load(key + half + column).to(tl.float32)
        wk_1, wk_2 = tl.load(k_weight + column).to(tl.float32), tl.load(k_weight + half + column).to(tl.float32)
        new_1, new_2 = rotated(new_1, new_2, wk_1, wk_2, cosines, sines, eps, head_dim)
        new_value = tl.load(qkv_row + (heads + kv_heads + head) * head_dim + wide)
        new = (tl.load(slot_mapping + row) * kv_heads + head) * head_dim
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


def splits_for(num_rows: int) -> int:
    """Return the number of programs per row's context that fills a GPU when each row has eight heads."""
    wanted: int = triton.next_power_of_2(64 // max(1, num_rows))
    return max(1, min(8, wanted))


@triton.jit
def _prepare_rows(
    qkv, q_weight, k_weight, cos, sin, keys, values, positions, slot_mapping, queries, eps,
    heads: tl.constexpr, kv_heads: tl.constexpr, head_dim: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Run one program per (row, kv head): write queries out for another kernel, and key and value into the cache."""
    wait_for_predecessor(pdl)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group: tl.constexpr = heads // kv_heads
    half: tl.constexpr = head_dim // 2
    dtype: tl.constexpr = keys.dtype.element_ty
    column = tl.arange(0, half)[None, :]
    position = tl.load(positions + row)
    q_1, q_2, k_1, k_2, value = new_position(
        qkv + row * (heads + 2 * kv_heads) * head_dim, q_weight, k_weight, cos, sin, position, head, eps,
        heads, kv_heads, head_dim, dtype,
    )  # fmt: skip
    new = (tl.load(slot_mapping + row) * kv_heads + head) * head_dim
    tl.store(keys + new + column, k_1.to(dtype))
    tl.store(keys + new + half + column, k_2.to(dtype))
    tl.store(values + new + tl.arange(0, head_dim)[None, :], value.to(dtype))
    member = (head * group + tl.arange(0, group))[:, None]
    tl.store(queries + (row * heads + member) * head_dim + column, q_1.to(dtype))
    tl.store(queries + (row * heads + member) * head_dim + half + column, q_2.to(dtype))


def prepare_rows(qkv: Tensor, norms: HeadNorms, heads: Heads, caches: tuple[Tensor, Tensor], context: Context,
                 queries: Tensor, *, pdl: bool = False) -> None:  # fmt: skip
    """Run `TritonAttention` minus the attention: fill `queries` [rows, heads, head_dim] and the new cache slots."""
    keys, values = caches
    _prepare_rows[(qkv.shape[0], heads.key)](
        qkv, norms.query, norms.key, norms.cos, norms.sin, keys, values, context.positions, context.slot_mapping,
        queries, norms.eps, heads=heads.query, kv_heads=heads.key, head_dim=heads.dim, pdl=pdl, num_warps=1,
        launch_pdl=pdl,
    )  # fmt: skip


class PagedBackend(Protocol):
    """Attention backend for one new position per row. Its input is the QKV product."""

    name: str

    def __call__(self, qkv: Tensor, norms: HeadNorms, caches: tuple[Tensor, Tensor], context: Context) -> Tensor:
        """Write the rows' keys and values [slots, kv_heads, head_dim]. Returns [rows, heads * head_dim]."""
        ...


class TritonAttention:
    """Backend with a single kernel, which reads the block tables and splits long contexts."""

    name = "triton"

    def __init__(self, heads: Heads, *, block_size: int, pdl: bool) -> None:
        """Create a backend. `block_size` must be a multiple of MIN_BLOCK."""
        self.heads, self.block_size, self.pdl = heads, block_size, pdl
        self._buffers: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}  # by rows

    def __call__(self, qkv: Tensor, norms: HeadNorms, caches: tuple[Tensor, Tensor], context: Context) -> Tensor:
        """Compute attention. The result is valid until the next call with the same number of rows."""
        num_rows, heads, (keys, values) = len(qkv), self.heads, caches
        if num_rows not in self._buffers:
            self._buffers[num_rows] = self._allocate(qkv)
        parts, statistics, arrived, out = self._buffers[num_rows]
        splits = parts.shape[1]
        _paged_attention[(num_rows, heads.key, splits)](
            qkv, norms.query, norms.key, norms.cos, norms.sin, keys, values, context.positions, context.slot_mapping,
            context.block_tables, context.lengths, parts, statistics, arrived, out, context.block_tables.stride(0),
            norms.eps, heads=heads.query, kv_heads=heads.key, head_dim=heads.dim, block_size=self.block_size,
            tile=min(_MAX_TILE, self.block_size & -self.block_size), splits=splits, stages=2, pdl=self.pdl,
            num_warps=4, launch_pdl=self.pdl,
        )  # fmt: skip
        return out

    def _allocate(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Allocate the splits' partial results, the counters of finished splits, and the result."""
        num_rows, heads, splits, device = len(qkv), self.heads, splits_for(len(qkv)), qkv.device
        parts = torch.empty((num_rows, splits, heads.query, heads.dim), dtype=torch.float32, device=device)
        statistics = torch.empty((num_rows, splits, heads.query, 2), dtype=torch.float32, device=device)
        arrived = torch.zeros((num_rows, heads.key), dtype=torch.int32, device=device)
        return parts, statistics, arrived, qkv.new_empty((num_rows, heads.query * heads.dim))


class FlashAttention:
    """Backend that writes the cache with a Triton kernel, and runs flash-attn's paged decode."""

    name = "flash_attn"

    def __init__(self, heads: Heads, *, block_size: int, pdl: bool) -> None:
        assert block_size % _FLASH_PAGE == 0
        self.heads, self.block_size, self.pdl = heads, block_size, pdl
        self._attend: Any = importlib.import_module("flash_attn").flash_attn_with_kvcache
        self._queries: dict[int, Tensor] = {}

    def __call__(self, qkv: Tensor, norms: HeadNorms, caches: tuple[Tensor, Tensor], context: Context) -> Tensor:
        num_rows = len(qkv)
        if num_rows not in self._queries:
            self._queries[num_rows] = qkv.new_empty((num_rows, 1, self.heads.query, self.heads.dim))
        queries = self._queries[num_rows]
        prepare_rows(qkv, norms, self.heads, caches, context, queries, pdl=self.pdl)
        pages = (cache.view(-1, self.block_size, self.heads.key, self.heads.dim) for cache in caches)
        out: Tensor = self._attend(
            queries, *pages, cache_seqlens=context.lengths, block_table=context.block_tables, causal=True
        )
        return out.view(num_rows, -1)


def choose_attention(
    setting: str, heads: Heads, *, block_size: int, dtype: torch.dtype, pdl: bool = True
) -> PagedBackend:
    """Return the backend for `setting`: "triton", "flash_attn" or "auto". "auto" is "triton", which is as fast.

    Raises ValueError with the reason if flash-attn is requested but not usable, or if the block size is not supported.
    """
    if block_size % MIN_BLOCK:
        raise ValueError(f"KV blocks on a GPU must hold a multiple of {MIN_BLOCK} positions, not {block_size}")
    if setting != "flash_attn":
        logger.info("attention backend: triton")
        return TritonAttention(heads, block_size=block_size, pdl=pdl)
    missing = _why_not_flash(block_size, dtype)
    if missing is not None:
        raise ValueError(f"attention backend flash_attn: {missing}")
    logger.info("attention backend: flash_attn %s", importlib.import_module("flash_attn").__version__)
    return FlashAttention(heads, block_size=block_size, pdl=pdl)


def _why_not_flash(block_size: int, dtype: torch.dtype) -> str | None:
    """Return the reason why flash-attn cannot be used, or None."""
    if importlib.util.find_spec("flash_attn") is None:
        return "flash-attn is not installed"
    if block_size % _FLASH_PAGE:
        return f"flash-attn needs KV blocks of a multiple of {_FLASH_PAGE} positions, but they have {block_size}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"flash-attn supports half precision, but the model is {dtype}"
    return None


@triton.jit
def _prompt_attention(
    queries, keys, values, slot_mapping, owners, positions, out, num_rows,
    heads: tl.constexpr, kv_heads: tl.constexpr, head_dim: tl.constexpr, block: tl.constexpr, tile: tl.constexpr,
    tiles: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Run one program per head and `block` queries. Caches are [slots, kv_heads, head_dim].

    Each row attends to the rows of its own sequence up to itself, in order of their positions.
    """
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
        slot = tl.load(slot_mapping + every, mask=is_row, other=0)[:, None]
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
    total = tl.where(is_mine, total, 1.0)  # padding rows attend to nothing
    tl.store(out + place, (acc / total[:, None]).to(out.dtype.element_ty), mask=is_mine[:, None])


@dataclass(slots=True)
class PromptAttention:
    """Attention backend for a pass in which every sequence starts at position 0."""

    heads: Heads
    owners: Tensor  # [rows] int32 or int64: equal for rows of the same sequence
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
    """Compute attention for queries [rows, heads, head_dim] over the rows' slots. `out` is [rows, heads * head_dim]."""
    num_rows = len(queries)
    keys, values = caches
    tile = min(_KEYS, max(_QUERIES, triton.next_power_of_2(num_rows)))
    _prompt_attention[(heads.query, triton.cdiv(num_rows, _QUERIES))](
        queries, keys, values, context.slot_mapping, owners, context.positions, out, num_rows,
        heads=heads.query, kv_heads=heads.key, head_dim=heads.dim, block=_QUERIES, tile=tile,
        tiles=triton.cdiv(num_rows, tile), pdl=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
