"""The paged key-value cache.

Layout: one contiguous tensor `blocks` [layers, 2, num_blocks, block_size, kv_heads, head_dim]; index 0 of the second
dimension holds keys, 1 values. `blocks[layer, 0]` and `blocks[layer, 1]` are what flash-attn's paged functions take.
A *slot* is `block * block_size + offset`, the index into `keys[layer]` and `values[layer]`, which are flat views.
Block 0 belongs to nobody: padded rows write there. On a GPU a block has 64 positions, 256 with flash-attn, which takes
no less.
"""

import torch

from deployments.talker.model.config import TransformerConfig

# Contexts are gathered in lengths of this many positions, so that shapes repeat.
_LENGTH_STEP = 64


def padded_length(num_positions: int) -> int:
    """The length a context of `num_positions` is gathered in."""
    return -(-num_positions // _LENGTH_STEP) * _LENGTH_STEP


class KVCache:
    """Keys and values of all sequences in blocks. The mapping from positions to slots is the block manager's."""

    def __init__(
        self, config: TransformerConfig, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_size = block_size
        shape = (config.num_layers, 2, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.blocks = torch.zeros(shape, dtype=dtype, device=device)
        flat = self.blocks.view(config.num_layers, 2, num_blocks * block_size, config.num_kv_heads, config.head_dim)
        self.keys, self.values = flat[:, 0], flat[:, 1]  # each [layers, slots, kv_heads, head_dim]

    @staticmethod
    def bytes_per_position(config: TransformerConfig, dtype: torch.dtype) -> int:
        """Memory of one position of one sequence."""
        return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
