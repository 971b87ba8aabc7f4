"""The paged key-value cache, and which blocks of it belong to which sequence.

Layout: one contiguous tensor `blocks` [layers, 2, num_blocks, block_size, kv_heads, head_dim]; index 0 of the second
dimension holds keys, 1 values. flash-attn's paged functions take `blocks[layer, 0]` and `blocks[layer, 1]`. A *slot* is
`block * block_size + offset`, the index into `keys[layer]` and `values[layer]`, which are flat views. Block 0 belongs
to no sequence: padded rows write there. On a GPU a block has 64 positions, 256 with flash-attn, which takes no less.
"""

from collections import deque
from dataclasses import dataclass

import torch

from deployments.errors import EngineError
from deployments.talker.model.model_config import TransformerConfig

GIB = 1 << 30
# CUDA's context with the kernels that are loaded into it: it exists before anything can be measured.
CONTEXT_BYTES = 600 << 20
# Memory besides keys and values: tables of the predictor, activations, workspaces of the matrix library, graphs.
_STEP_BYTES = 900 << 20
BESIDE_BYTES = CONTEXT_BYTES + _STEP_BYTES

# Contexts are gathered in lengths of this many positions, so that shapes repeat.
LENGTH_STEP = 64


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
        return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


@dataclass(frozen=True, slots=True)
class CacheBounds:
    """The settings of the cache, and sizes that follow from them."""

    fraction: float  # share of the GPU's memory
    least_bytes: int  # keys and values of one sequence of the greatest length
    most_bytes: int  # keys and values of a full batch of such sequences

    def kv_bytes(self, total: int, loaded: int, *, others_bytes: int = 0) -> int:
        """Bytes for keys and values on a GPU of `total` bytes, with `loaded` bytes of weights and codec, in addition to
        the memory of other processes.

        Raises EngineError if they are too few.
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
            f" (a fraction of {needed / total:.2g}): {loaded / GIB:.1f} for weights and codec,"
            f" {(CONTEXT_BYTES + _STEP_BYTES) / GIB:.1f} for CUDA and a step, {self.least_bytes / GIB:.2f} for one"
            " sequence of the greatest length. Use a larger talker.gpu_memory_fraction, a smaller"
            " talker.max_model_len or talker.max_num_seqs, a 0.6B model, codec.placement: pool"
        )


class GpuMemory:
    """How much of a GPU's memory is left for keys and values.

    They are allocated after the weights and the codec, whose size is then known, and room is kept for a step's own
    memory. Create it before anything is loaded, because memory in use then belongs to other processes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free_before, self.total = torch.cuda.mem_get_info(device)

    def kv_bytes(self, bounds: CacheBounds) -> int:
        """Bytes for keys and values, once all else is loaded. Raises EngineError if they are too few."""
        free, _ = torch.cuda.mem_get_info(self.device)
        loaded = self._free_before - free
        return bounds.kv_bytes(self.total, loaded, others_bytes=self.total - self._free_before - CONTEXT_BYTES)


class BlockManager:
    """Hands out fixed-size KV blocks. Block 0 is never handed out: padded rows write there."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 1, "one scratch block and at least one to hand out"
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = deque(range(1, num_blocks))
        self._tables: dict[int, list[int]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def used_ratio(self) -> float:
        return 1.0 - self.num_free / (self.num_blocks - 1)

    @property
    def capacity(self) -> int:
        """Positions that one sequence could hold if it were alone."""
        return (self.num_blocks - 1) * self.block_size

    def blocks_for(self, num_positions: int) -> int:
        return -(-num_positions // self.block_size)

    def holds(self, sequence_id: int, num_positions: int) -> bool:
        """Whether a sequence already has enough blocks."""
        return num_positions <= len(self._tables.get(sequence_id, ())) * self.block_size

    def can_hold(self, sequence_id: int, num_positions: int) -> bool:
        """Whether `grow` would succeed."""
        return self._missing(sequence_id, num_positions) <= self.num_free

    def grow(self, sequence_id: int, num_positions: int) -> None:
        """Give a sequence blocks until it holds `num_positions`, which `can_hold` has allowed."""
        missing = self._missing(sequence_id, num_positions)
        assert missing <= self.num_free, f"{missing} blocks wanted, {self.num_free} of {self.num_blocks} free"
        table = self._tables.setdefault(sequence_id, [])
        table.extend(self._free.popleft() for _ in range(missing))

    def free(self, sequence_id: int) -> None:
        """Take all blocks of a sequence back; nothing happens if it has none."""
        self._free.extend(self._tables.pop(sequence_id, ()))

    def table(self, sequence_id: int) -> list[int]:
        """The blocks of a sequence in the order of its positions."""
        return self._tables[sequence_id]

    def check_integrity(self) -> None:
        """Assert that every block is held exactly once, by the free list or by one sequence."""
        held = sorted([*self._free, *(block for table in self._tables.values() for block in table)])
        assert held == list(range(1, self.num_blocks)), f"blocks lost or held twice: {held}"

    def _missing(self, sequence_id: int, num_positions: int) -> int:
        return max(0, self.blocks_for(num_positions) - len(self._tables.get(sequence_id, ())))
