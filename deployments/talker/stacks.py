"""The seam between a step and the networks: one call for a pass of the talker, one for a frame of the predictor."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from deployments.talker.attention import attend_rows
from deployments.talker.kv_cache import KVCache
from deployments.talker.model.predictor import SampleCode
from deployments.talker.model.talker import Talker


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the rows of one pass of the talker stand. Rows of one sequence may stand side by side: a prefill."""

    positions: Tensor  # [rows] int32
    slots: Tensor  # [rows] int64: cache index each row's key and value go to
    block_tables: Tensor  # [rows, blocks] int32
    lengths: Tensor  # [rows] int32: positions each row attends to, its own included


class RunTalker(Protocol):
    """A pass of the talker's decoder stack."""

    def __call__(self, inputs: Tensor, rows: Rows, length: int) -> Tensor:
        """Input rows [rows, hidden] -> hidden states [rows, hidden]. No row attends beyond `length` positions."""
        ...


class RunPrompt(Protocol):
    """A pass of the talker's decoder stack over many prompt rows."""

    def __call__(self, inputs: Tensor, rows: Rows, owners: Tensor, length: int) -> Tensor:
        """As `RunTalker`. `length` 0: each owner's [rows] rows begin at position 0, else there is one owner."""
        ...


RunPredictor = Callable[[Tensor, Tensor, SampleCode], tuple[Tensor, Tensor]]
"""(hidden [rows, hidden], code0 [rows], how to sample) -> codes [rows, groups], sums of embeddings [rows, hidden]."""


@dataclass(frozen=True, slots=True)
class Networks:
    """How the passes of a step are run."""

    name: str
    talker: RunTalker
    prompt: RunPrompt
    predictor: RunPredictor


def plain_networks(talker: Talker, cache: KVCache) -> Networks:
    """Plain PyTorch, on any device."""
    return Networks("plain", PlainTalker(talker, cache), PlainPrompt(talker, cache), PlainPredictor(talker))


def exact_networks(talker: Talker, cache: KVCache) -> Networks:
    """Plain PyTorch in which a row's result does not depend on where the other rows of its pass stand."""
    run_talker = PlainTalker(talker, cache)

    def run_prompt(inputs: Tensor, rows: Rows, owners: Tensor, length: int) -> Tensor:
        return run_talker(inputs, rows, length)

    return Networks("exact", run_talker, run_prompt, PlainPredictor(talker))


class PlainTalker:
    """The stack operation by operation, each row attending to its own gathered context."""

    def __init__(self, talker: Talker, cache: KVCache) -> None:
        self.talker, self.cache = talker, cache

    def __call__(self, inputs: Tensor, rows: Rows, length: int) -> Tensor:
        """See RunTalker."""
        hidden: Tensor = self.talker(inputs, rows.positions, _GatheredContext(self.cache, rows, length))
        return hidden


class PlainPrompt:
    """The stack over prompt rows that all look at one context: that of the pass itself, or that of one sequence."""

    def __init__(self, talker: Talker, cache: KVCache) -> None:
        self.talker, self.cache = talker, cache

    def __call__(self, inputs: Tensor, rows: Rows, owners: Tensor, length: int) -> Tensor:
        """Rows of sequences `owners` [rows]; `length` 0: all of them from position 0 on, else all of one sequence."""
        positions = rows.positions
        if length:
            offsets = torch.arange(length, device=positions.device)
            context = rows.block_tables[0, offsets // self.cache.block_size].long() * self.cache.block_size
            context = context + offsets % self.cache.block_size
            mask = offsets <= positions[:, None]
        else:
            context = rows.slots
            mask = (owners[:, None] == owners) & (positions <= positions[:, None])
        hidden: Tensor = self.talker(inputs, positions, _SharedContext(self.cache, rows.slots, context, mask))
        return hidden


class PlainPredictor:
    """The predictor as the model defines it."""

    def __init__(self, talker: Talker) -> None:
        self.talker = talker

    def __call__(self, hidden: Tensor, code0: Tensor, sample: SampleCode) -> tuple[Tensor, Tensor]:
        """See RunPredictor."""
        embed0 = self.talker.model.codec_embedding(code0)
        frames: tuple[Tensor, Tensor] = self.talker.code_predictor(hidden, code0, embed0, sample=sample)
        return frames


class _GatheredContext:
    """The `Attend` of one pass: writes the rows' keys and values, then gathers each row's context."""

    def __init__(self, cache: KVCache, rows: Rows, length: int) -> None:
        self.cache, self.slots = cache, rows.slots
        offsets = torch.arange(length, device=rows.positions.device)
        blocks = rows.block_tables[:, offsets // cache.block_size].long()
        self.mask = (offsets < rows.lengths[:, None])[:, None, None]
        self.context = blocks * cache.block_size + offsets % cache.block_size

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.slots] = key
        values[self.slots] = value
        context = self.context
        return attend_rows(query, keys[context].transpose(1, 2), values[context].transpose(1, 2), self.mask)


class _SharedContext:
    """The `Attend` of one pass in which every row looks at the same context, as far as `mask` lets it."""

    def __init__(self, cache: KVCache, slots: Tensor, context: Tensor, mask: Tensor) -> None:
        self.cache, self.slots, self.context, self.mask = cache, slots, context, mask

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.slots] = key
        values[self.slots] = value
        repeats = query.shape[1] // key.shape[1]
        seen_keys, seen_values = (
            each[self.context].transpose(0, 1).repeat_interleave(repeats, 0) for each in (keys, values)
        )
        queries = query.transpose(0, 1)
        return F.scaled_dot_product_attention(queries, seen_keys, seen_values, attn_mask=self.mask).transpose(0, 1)
