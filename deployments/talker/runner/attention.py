"""Attention of rows over the paged cache in plain PyTorch, and where the rows of a pass stand."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from deployments.talker.engine.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class Context:
    """Where the rows of one pass of the talker stand. Rows of one sequence may stand side by side: a prefill."""

    positions: Tensor  # [rows] int32
    slots: Tensor  # [rows] int64: cache index each row's key and value go to
    block_tables: Tensor  # [rows, blocks] int32
    lengths: Tensor  # [rows] int32: positions each row attends to, its own included


def attend_rows(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """[rows, heads, head_dim] over twice [rows, kv_heads, length, head_dim] -> [rows, heads, head_dim].

    `mask` [rows, 1, 1, length] is True where a row may look, None where it may look everywhere. On CPU these are plain
    matrix products: how the fused kernel splits its work, and so how it rounds, depends on the other rows.
    """
    if query.device.type != "cpu":
        return F.scaled_dot_product_attention(query[:, :, None], keys, values, attn_mask=mask, enable_gqa=True)[:, :, 0]
    num_rows, heads, head_dim = query.shape
    grouped = query.view(num_rows, keys.shape[1], heads // keys.shape[1], head_dim)
    scores = torch.matmul(grouped, keys.transpose(2, 3)) * head_dim**-0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.matmul(scores.softmax(-1), values).view(num_rows, heads, head_dim)


class GatheredAttention:
    """The `Attend` of one pass: writes the rows' keys and values, then gathers each row's context."""

    def __init__(
        self, cache: KVCache, context: Context, length: int, *, followed: tuple[int, int] | None = None
    ) -> None:
        """`followed`: the layer and the head whose weights are kept."""
        self.cache, self.slots, self._followed = cache, context.slots, followed
        self.weights: Tensor | None = None  # [rows, length] float32
        offsets = torch.arange(length, device=context.positions.device)
        blocks = context.block_tables[:, offsets // cache.block_size].long()
        self.mask = (offsets < context.lengths[:, None])[:, None, None]
        self.context = blocks * cache.block_size + offsets % cache.block_size

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.slots] = key
        values[self.slots] = value
        context = self.context
        seen = keys[context].transpose(1, 2)
        if self._followed is not None and layer == self._followed[0]:
            self.weights = self._weights(query, seen, self._followed[1])
        return attend_rows(query, seen, values[context].transpose(1, 2), self.mask)

    def _weights(self, query: Tensor, keys: Tensor, head: int) -> Tensor:
        """[rows, heads, head_dim], [rows, kv_heads, length, head_dim] -> [rows, length]."""
        own = keys[:, head * keys.shape[1] // query.shape[1]]
        scores: Tensor = (own.float() @ query[:, head, :, None].float())[..., 0] * query.shape[2] ** -0.5
        return scores.masked_fill(~self.mask[:, 0, 0], -torch.inf).softmax(-1)


class SharedAttention:
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
