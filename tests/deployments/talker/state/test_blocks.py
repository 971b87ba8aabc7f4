import random

import pytest

from deployments.talker.state.kv_cache import BlockManager


def test_a_sequence_grows_by_whole_blocks() -> None:
    blocks = BlockManager(num_blocks=6, block_size=4)
    assert (blocks.num_free, blocks.capacity) == (5, 20)
    for num_positions, num_free in [(0, 5), (1, 4), (4, 4), (5, 3), (3, 3), (20, 0)]:
        blocks.grow(1, num_positions)
        assert blocks.num_free == num_free
    blocks.check_integrity()


def test_out_of_blocks_changes_nothing() -> None:
    blocks = BlockManager(num_blocks=4, block_size=2)
    blocks.grow(1, 3)
    before = list(blocks.table(1))
    assert blocks.can_hold(1, 6)
    assert not blocks.can_hold(1, 7)
    for sequence, num_positions in [(1, 7), (2, 3)]:
        with pytest.raises(AssertionError, match="1 of 4 free"):
            blocks.grow(sequence, num_positions)
    assert blocks.table(1) == before
    assert blocks.num_free == 1
    blocks.check_integrity()
    blocks.grow(1, 6)


def test_blocks_follow_the_positions_and_stay_when_the_sequence_grows() -> None:
    blocks = BlockManager(num_blocks=5, block_size=4)
    blocks.grow(1, 4)
    blocks.grow(2, 4)
    blocks.grow(1, 8)
    first, second = blocks.table(1)
    assert second != first + 1  # another sequence's block lies between
    blocks.grow(1, 9)
    assert blocks.table(1)[:2] == [first, second]


def test_integrity_notices_a_lost_and_a_doubled_block() -> None:
    lost, doubled = BlockManager(num_blocks=4, block_size=2), BlockManager(num_blocks=4, block_size=2)
    lost._free.pop()
    doubled._tables[1] = [2]
    for blocks in (lost, doubled):
        with pytest.raises(AssertionError, match="lost or held twice"):
            blocks.check_integrity()


@pytest.mark.parametrize("seed", range(5))
def test_random_operations_keep_every_block_accounted_for(seed: int) -> None:
    rng = random.Random(seed)
    blocks = BlockManager(num_blocks=20, block_size=3)
    lengths: dict[int, int] = {}
    refused = 0
    for _ in range(400):
        sequence = rng.randrange(6)
        wanted = lengths.get(sequence, 0) + rng.randrange(1, 12)
        if rng.random() < 0.25:
            blocks.free(sequence)
            lengths.pop(sequence, None)
        elif blocks.can_hold(sequence, wanted):
            blocks.grow(sequence, wanted)
            lengths[sequence] = wanted
        else:
            refused += 1
            with pytest.raises(AssertionError, match="blocks wanted"):
                blocks.grow(sequence, wanted)
        blocks.check_integrity()
        held = [block for each, length in lengths.items() for block in blocks.table(each)[: blocks.blocks_for(length)]]
        assert len(held) == len(set(held)) == blocks.num_blocks - 1 - blocks.num_free
        assert 0 not in held
    assert refused > 10
