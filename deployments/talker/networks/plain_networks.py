"""Networks in PyTorch, for any device."""

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from deployments.talker.model.layers import attend_rows
from deployments.talker.networks.frame_networks import FrameNetworks, NetworkKind
from deployments.talker.networks.unfused_networks import UnfusedNetworks
from deployments.talker.state.batch_state import Context
from deployments.talker.state.kv_cache import KVCache


class GatheredAttention:
    """`Attend` callback for one pass that stores the rows' keys and values, and gathers each row's context."""

    def __init__(
        self, cache: KVCache, context: Context, length: int, *, followed: tuple[int, int] | None = None
    ) -> None:
        """Prepare for one pass. `followed` is the layer and head whose attention weights are kept."""
        self.cache, self.slot_mapping, self._followed = cache, context.slot_mapping, followed
        self.weights: Tensor | None = None  # [rows, length] float32
        offsets = torch.arange(length, device=context.positions.device)
        blocks = context.block_tables[:, offsets // cache.block_size].long()
        self.mask = (offsets < context.lengths[:, None])[:, None, None]
        self.context = blocks * cache.block_size + offsets % cache.block_size

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.slot_mapping] = key
        values[self.slot_mapping] = value
        context = self.context
        seen = keys[context].transpose(1, 2)
        if self._followed is not None and layer == self._followed[0]:
            self.weights = self._weights(query, seen, self._followed[1])
        return attend_rows(query, seen, values[context].transpose(1, 2), self.mask)

    def _weights(self, query: Tensor, keys: Tensor, head: int) -> Tensor:
        """Return weights [rows, length] for [rows, heads, head_dim] and [rows, kv_heads, length, head_dim]."""
        head_keys = keys[:, head * keys.shape[1] // query.shape[1]]
        scores: Tensor = (head_keys.float() @ query[:, head, :, None].float())[..., 0] * query.shape[2] ** -0.5
        return scores.masked_fill(~self.mask[:, 0, 0], -torch.inf).softmax(-1)


class SharedAttention:
    """`Attend` callback for one pass in which all rows share one context, restricted for each row by `mask`."""

    def __init__(self, cache: KVCache, slot_mapping: Tensor, context: Tensor, mask: Tensor) -> None:
        self.cache, self.slot_mapping, self.context, self.mask = cache, slot_mapping, context, mask

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.slot_mapping] = key
        values[self.slot_mapping] = value
        repeats = query.shape[1] // key.shape[1]
        seen_keys, seen_values = (
            each[self.context].transpose(0, 1).repeat_interleave(repeats, 0) for each in (keys, values)
        )
        queries = query.transpose(0, 1)
        return F.scaled_dot_product_attention(queries, seen_keys, seen_values, attn_mask=self.mask).transpose(0, 1)


def run_together(networks: FrameNetworks, owners: Tensor, inputs: Tensor, context: Context, length: int) -> Tensor:
    """Run `_run_prompt` with one context for all rows: the pass itself, or with `length` that of one sequence."""
    positions, cache = context.positions, networks.cache
    if length:
        offsets = torch.arange(length, device=positions.device)
        seen = context.block_tables[0, offsets // cache.block_size].long() * cache.block_size
        seen = seen + offsets % cache.block_size
        mask = offsets <= positions[:, None]
    else:
        seen = context.slot_mapping
        mask = (owners[:, None] == owners) & (positions <= positions[:, None])
    hidden: Tensor = networks.talker(inputs, positions, SharedAttention(cache, context.slot_mapping, seen, mask))
    return hidden


class PlainNetworks(UnfusedNetworks):
    """Networks of the `plain` kind. All rows of a prompt share one context, so rounding depends on the pass."""

    kind: NetworkKind = "plain"

    def _first_logits(self, hidden: Tensor) -> Tensor:
        return self.talker.logits(hidden)

    def _step(self, inputs: Tensor, context: Context, length: int) -> tuple[Tensor, Tensor | None]:
        attention = GatheredAttention(self.cache, context, length, followed=self.config.text.alignment_head)
        return self.talker(inputs, context.positions, attention), attention.weights

    def _run_prompt(self, owners: Tensor, inputs: Tensor, context: Context, length: int) -> Tensor:
        return run_together(self, owners, inputs, context, length)


class ExactNetworks(PlainNetworks):
    """Networks of the `exact` kind. Each row of a prompt attends to its own gathered context.

    A row's result is the same in all passes with the same number of rows.
    """

    kind: NetworkKind = "exact"

    def _run_prompt(self, owners: Tensor, inputs: Tensor, context: Context, length: int) -> Tensor:
        hidden: Tensor = self.talker(inputs, context.positions, GatheredAttention(self.cache, context, length))
        return hidden
