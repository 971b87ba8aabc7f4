"""The paged KV cache, and the assignment of its blocks to sequences.

The layout is one contiguous tensor `blocks` [layers, 2, num_blocks, block_size, kv_heads, head_dim]. Index 0 of the
second dimension contains keys, index 1 values. flash-attn's paged functions take `blocks[layer, 0]` and
`blocks[layer, 1]`. A *slot* is `block * block_size + offset`, an index into the flat views `keys[layer]` and
`values[layer]`. Block 0 is reserved for padded rows. On a GPU a block has 64 positions, or 256 with flash-attn, which
does not support smaller blocks.
"""

from collections import deque
from dataclasses import dataclass

import torch

from deployments.errors import EngineError
from deployments.talker.model.model_config import TransformerConfig

GIB = 1 << 30
# Memory used by the CUDA context and its loaded kernels, which is allocated before anything can be measured
CONTEXT_BYTES = 600 << 20
# Other memory that steps use: predictor tables, activations, matrix library workspaces, and graphs
_STEP_BYTES = 900 << 20
BESIDE_BYTES = CONTEXT_BYTES + _STEP_BYTES

# Context lengths are rounded up to a multiple of this, so that shapes repeat.
LENGTH_STEP = 64


class KVCache:
    """Keys and values of all sequences in blocks. The block manager maps positions to slots."""

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
        return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


@dataclass(frozen=True, slots=True)
class CacheBounds:
    """Memory settings for the KV cache, and the sizes derived from them."""

    fraction: float  # share of the GPU's memory
    least_bytes: int  # keys and values for one sequence of maximum length
    most_bytes: int  # keys and values for a full batch of such sequences

    def kv_bytes(self, total: int, loaded: int, *, others_bytes: int = 0) -> int:
        """Return the bytes for keys and values on a GPU with `total` bytes. Raises EngineError if there are too few.

        `loaded` is the size of the weights and codec. `others_bytes` is the memory used by other processes.
        """
        allowed = int(self.fraction * total) - CONTEXT_BYTES - loaded - _STEP_BYTES
        room = min(allowed, total - others_bytes - CONTEXT_BYTES - loaded - _STEP_BYTES)
        if room < self.least_bytes:
            raise EngineError(self._too_little(total, loaded, others_bytes, is_shared=allowed > room))
        return min(room, self.most_bytes)

    def _too_little(self, total: int, loaded: int, others_bytes: int, *, is_shared: bool) -> str:
        needed = CONTEXT_BYTES + loaded + _STEP_BYTES + self.least_bytes
        may = f"talker.gpu_memory_fraction {self.fraction:g} allows {self.fraction * total / GIB:.1f} GiB"
        if is_shared:
            may = f"others use {others_bytes / GIB:.1f} GiB"
        return (
            f"too little GPU memory: {may} of {total / GIB:.1f} GiB, the engine needs {needed / GIB:.1f} GiB"
            f" (a fraction of {needed / total:.2g}): {loaded / GIB:.1f} GiB for weights and codec,"
            f" {(CONTEXT_BYTES + _STEP_BYTES) / GIB:.1f} GiB for CUDA and a step, {self.least_bytes / GIB:.2f} GiB for"
            " one sequence of maximum length. Use a larger talker.gpu_memory_fraction, a smaller"
            " talker.max_model_len or talker.max_num_seqs, a 0.6B model, or codec.placement: pool"
        )


class GpuMemory:
    """GPU memory that is available for keys and values.

    Keys and values are allocated after the weights and codec, whose size is then known, and leave room for the memory
    that a step uses. Create this object before loading anything, because it attributes used memory to other processes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free_before, self.total = torch.cuda.mem_get_info(device)

    def kv_bytes(self, bounds: CacheBounds) -> int:
        """Return the bytes for keys and values, once all else is loaded. Raises EngineError if there are too few."""
        free, _ = torch.cuda.mem_get_info(self.device)
        loaded = self._free_before - free
        return bounds.kv_bytes(self.total, loaded, others_bytes=self.total - self._free_before - CONTEXT_BYTES)


class BlockManager:
    """Allocator of fixed-size KV blocks. Block 0 is reserved for padded rows."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 1, "the cache needs one scratch block and at least one other block"
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = deque(range(1, num_blocks))
        # Free blocks that the last step does not use, which may still be running. They are at the front of the queue.
        self.num_unused = len(self._free)
        self._tables: dict[int, list[int]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def used_ratio(self) -> float:
        return 1.0 - self.num_free / (self.num_blocks - 1)

    @property
    def capacity(self) -> int:
        """Number of positions that a single sequence could use."""
        return (self.num_blocks - 1) * self.block_size

    def begin_step(self) -> None:
        """Count the free blocks as unused. Blocks that are freed later may still be used by the step that begins."""
        self.num_unused = len(self._free)

    def blocks_for(self, num_positions: int) -> int:
        return -(-num_positions // self.block_size)

    def has_blocks(self, sequence_id: int, num_positions: int) -> bool:
        """Return whether a sequence already has enough blocks for `num_positions` positions."""
        return num_positions <= len(self._tables.get(sequence_id, ())) * self.block_size

    def can_allocate(self, sequence_id: int, num_positions: int) -> bool:
        """Return whether `allocate` would succeed."""
        return self._missing(sequence_id, num_positions) <= self.num_free

    def allocate(self, sequence_id: int, num_positions: int) -> None:
        """Allocate blocks for a sequence until it has room for `num_positions`. Requires `can_allocate`."""
        missing = self._missing(sequence_id, num_positions)
        assert missing <= self.num_free, f"{missing} blocks wanted, {self.num_free} of {self.num_blocks} free"
        table = self._tables.setdefault(sequence_id, [])
        table.extend(self._free.popleft() for _ in range(missing))
        self.num_unused = max(0, self.num_unused - missing)

    def free(self, sequence_id: int) -> None:
        """Free all of a sequence's blocks, if it has any."""
        self._free.extend(self._tables.pop(sequence_id, ()))

    def table(self, sequence_id: int) -> list[int]:
        """Return a sequence's blocks in order of position."""
        return self._tables[sequence_id]

    def check_integrity(self) -> None:
        """Assert that each block belongs either to the free list or to exactly one sequence."""
        held = sorted([*self._free, *(block for table in self._tables.values() for block in table)])
        assert held == list(range(1, self.num_blocks)), f"blocks lost or held twice: {held}"

    def _missing(self, sequence_id: int, num_positions: int) -> int:
        return max(0, self.blocks_for(num_positions) - len(self._tables.get(sequence_id, ())))
