import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from deployments.talker.model.layers import attend_rows

ROWS, HEADS, KV_HEADS, HEAD_DIM = 3, 4, 2, 16


def random_inputs(length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    query = torch.randn(ROWS, HEADS, HEAD_DIM, generator=generator)
    keys, values = (torch.randn(ROWS, KV_HEADS, length, HEAD_DIM, generator=generator) for _ in range(2))
    return query, keys, values


@pytest.mark.parametrize("length", [5, 64, 300])
@pytest.mark.parametrize("padded", [320, 1024, 2048])
def test_padding_changes_no_bit(length: int, padded: int) -> None:
    """A row's context is padded to the longest in its batch."""
    query, keys, values = random_inputs(length)
    own = -(-length // 64) * 64
    mask = (torch.arange(padded) < length).expand(ROWS, -1)[:, None, None]
    keys, values = (F.pad(tensor, (0, 0, 0, padded - length), value=3.0) for tensor in (keys, values))
    alone = attend_rows(query, keys[:, :, :own], values[:, :, :own], mask[..., :own])
    assert torch.equal(attend_rows(query, keys, values, mask), alone)
