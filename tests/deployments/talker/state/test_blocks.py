"""What the scheduler's tests do not see: they allocate and free blocks in every order."""

import pytest

from deployments.talker.state.kv_cache import BlockManager


def test_out_of_blocks_changes_nothing() -> None:
    blocks = BlockManager(num_blocks=4, block_size=2)
    blocks.allocate(1, 3)
    before = list(blocks.table(1))
    assert blocks.can_allocate(1, 6)
    assert not blocks.can_allocate(1, 7)
    for sequence, num_positions in [(1, 7), (2, 3)]:
        with pytest.raises(AssertionError, match="1 of 4 free"):
            blocks.allocate(sequence, num_positions)
    assert blocks.table(1) == before
    assert blocks.num_free == 1
    blocks.check_integrity()
    blocks.allocate(1, 6)


def test_integrity_notices_a_lost_and_a_doubled_block() -> None:
    lost, doubled = BlockManager(num_blocks=4, block_size=2), BlockManager(num_blocks=4, block_size=2)
    lost._free.pop()
    doubled._tables[1] = [2]
    for blocks in (lost, doubled):
        with pytest.raises(AssertionError, match="lost or held twice"):
            blocks.check_integrity()
