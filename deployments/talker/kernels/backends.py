"""Attention over paged contexts, by our kernel or by flash-attn's: chosen once, when the engine starts."""

import importlib.util
import logging
from typing import Any, Protocol

import torch
from torch import Tensor

from deployments.talker.attention import Context
from deployments.talker.kernels.paged_attention import (
    MIN_BLOCK,
    PagedScratch,
    attend_paged,
    prepare_rows,
    splits_for,
)
from deployments.talker.kernels.qkv import HeadNorms, Heads

logger = logging.getLogger(__name__)

_FLASH_PAGE = 256  # rows that a page of flash-attn's paged kernel is a multiple of


class PagedBackend(Protocol):
    """Attention of one new position per row, from the rows of the QKV product on."""

    name: str

    def __call__(self, qkv: Tensor, norms: HeadNorms, caches: tuple[Tensor, Tensor], context: Context) -> Tensor:
        """Write the rows' keys and values [slots, kv_heads, head_dim]; returns [rows, heads * head_dim]."""
        ...


class TritonAttention:
    """One kernel for everything: it reads the block tables and splits long contexts."""

    name = "triton"

    def __init__(self, heads: Heads, *, block_size: int, pdl: bool) -> None:
        self.heads, self.block_size, self.pdl = heads, block_size, pdl
        self._scratch: dict[int, tuple[PagedScratch, Tensor]] = {}

    def __call__(self, qkv: Tensor, norms: HeadNorms, caches: tuple[Tensor, Tensor], context: Context) -> Tensor:
        """As `PagedBackend`; the result is valid until the next call with as many rows."""
        rows = len(qkv)
        if rows not in self._scratch:
            scratch = PagedScratch(rows, self.heads, splits_for(rows), qkv.device)
            self._scratch[rows] = scratch, qkv.new_empty((rows, self.heads.query * self.heads.dim))
        scratch, out = self._scratch[rows]
        attend_paged(qkv, norms, self.heads, caches, context, self.block_size, scratch, out, pdl=self.pdl)
        return out


class FlashAttention:
    """Our kernel up to the cache write, then flash-attn's paged decode."""

    name = "flash_attn"

    def __init__(self, heads: Heads, *, block_size: int, pdl: bool) -> None:
        assert block_size % _FLASH_PAGE == 0
        self.heads, self.block_size, self.pdl = heads, block_size, pdl
        self._attend: Any = importlib.import_module("flash_attn").flash_attn_with_kvcache
        self._queries: dict[int, Tensor] = {}

    def __call__(self, qkv: Tensor, norms: HeadNorms, caches: tuple[Tensor, Tensor], context: Context) -> Tensor:
        rows = len(qkv)
        if rows not in self._queries:
            self._queries[rows] = qkv.new_empty((rows, 1, self.heads.query, self.heads.dim))
        queries = self._queries[rows]
        prepare_rows(qkv, norms, self.heads, caches, context, queries, pdl=self.pdl)
        pages = (cache.view(-1, self.block_size, self.heads.key, self.heads.dim) for cache in caches)
        out: Tensor = self._attend(
            queries, *pages, cache_seqlens=context.lengths, block_table=context.block_tables, causal=True
        )
        return out.view(rows, -1)


def choose_backend(wanted: str, heads: Heads, *, block_size: int, dtype: torch.dtype, pdl: bool = True) -> PagedBackend:
    """`wanted`: "triton", "flash_attn" or "auto", which is our own: it measures as fast or faster.

    Raises ValueError, with the reason, where flash-attn is demanded and cannot be used, or no kernel takes the blocks.
    """
    if block_size % MIN_BLOCK:
        raise ValueError(f"KV blocks hold a multiple of {MIN_BLOCK} positions on a GPU, not {block_size}")
    if wanted != "flash_attn":
        logger.info("attention backend: triton")
        return TritonAttention(heads, block_size=block_size, pdl=pdl)
    missing = _why_not_flash(block_size, dtype)
    if missing is not None:
        raise ValueError(f"attention backend flash_attn: {missing}")
    logger.info("attention backend: flash_attn %s", importlib.import_module("flash_attn").__version__)
    return FlashAttention(heads, block_size=block_size, pdl=pdl)


def _why_not_flash(block_size: int, dtype: torch.dtype) -> str | None:
    """The reason why flash-attn cannot be used, None where it can."""
    if importlib.util.find_spec("flash_attn") is None:
        return "flash-attn is not installed"
    if block_size % _FLASH_PAGE:
        return f"flash-attn needs KV blocks of a multiple of {_FLASH_PAGE} positions, they have {block_size}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"flash-attn computes in half precision, the model is {dtype}"
    return None
