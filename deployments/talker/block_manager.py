"""Which KV blocks belong to which sequence. Pure bookkeeping, no tensors."""

from collections import deque

import numpy as np
from numpy.typing import NDArray


class OutOfBlocksError(Exception):
    """No free block is left; the caller preempts a sequence or waits."""


class BlockManager:
    """Hands out fixed-size KV blocks. Block 0 is never handed out: padded rows write there."""

    SCRATCH = 0

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

    def can_hold(self, sequence: int, num_positions: int) -> bool:
        """Whether `grow` would succeed."""
        return self._missing(sequence, num_positions) <= self.num_free

    def grow(self, sequence: int, num_positions: int) -> None:
        """Give `sequence` blocks until it holds `num_positions`; raises OutOfBlocksError and changes nothing."""
        missing = self._missing(sequence, num_positions)
        if missing > self.num_free:
            raise OutOfBlocksError(f"{missing} blocks wanted, {self.num_free} of {self.num_blocks} free")
        table = self._tables.setdefault(sequence, [])
        table.extend(self._free.popleft() for _ in range(missing))

    def free(self, sequence: int) -> None:
        """Take all blocks of `sequence` back; nothing happens where it has none."""
        self._free.extend(self._tables.pop(sequence, ()))

    def table(self, sequence: int) -> list[int]:
        """The blocks of a sequence in the order of its positions."""
        return self._tables[sequence]

    def slots(self, sequence: int, num_positions: int) -> NDArray[np.int64]:
        """Cache indices [num_positions] of a sequence's first positions."""
        blocks = np.array(self._tables[sequence][: self.blocks_for(num_positions)], dtype=np.int64)
        slots = blocks[:, None] * self.block_size + np.arange(self.block_size)
        return slots.ravel()[:num_positions]

    def check_integrity(self) -> None:
        """Assert that every block is held exactly once, by the free list or by one sequence."""
        held = sorted([*self._free, *(block for table in self._tables.values() for block in table)])
        assert held == list(range(1, self.num_blocks)), f"blocks lost or held twice: {held}"

    def _missing(self, sequence: int, num_positions: int) -> int:
        return max(0, self.blocks_for(num_positions) - len(self._tables.get(sequence, ())))
