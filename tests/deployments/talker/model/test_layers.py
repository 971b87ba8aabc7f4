import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from deployments.talker.model.layers import attend_rows
from deployments.talker.model.talker import FrameAttention

ROWS, HEADS, KV_HEADS, HEAD_DIM = 3, 4, 2, 16


def random_inputs(length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    query = torch.randn(ROWS, HEADS, HEAD_DIM, generator=generator)
    keys, values = (torch.randn(ROWS, KV_HEADS, length, HEAD_DIM, generator=generator) for _ in range(2))
    return query, keys, values


def test_it_is_grouped_query_attention() -> None:
    query, keys, values = random_inputs(20)
    mask = (torch.arange(20) < torch.tensor([[20], [1], [7]]))[:, None, None]
    expected = F.scaled_dot_product_attention(query[:, :, None], keys, values, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(attend_rows(query, keys, values, mask), expected[:, :, 0])
    unmasked = F.scaled_dot_product_attention(query[:, :, None], keys, values, enable_gqa=True)
    torch.testing.assert_close(attend_rows(query, keys, values, None), unmasked[:, :, 0])


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


def test_a_frame_attends_to_its_positions_so_far() -> None:
    attention = FrameAttention((2, ROWS, KV_HEADS, 5, HEAD_DIM), like=torch.zeros(1))
    _, keys, values = random_inputs(5)
    for step in range(5):
        query, attention.step = random_inputs(step)[0], step
        for layer in range(2):
            made = attention(layer, query, (1 + layer) * keys[:, :, step], values[:, :, step])
            past = slice(None, step + 1)
            expected = attend_rows(query, (1 + layer) * keys[:, :, past], values[:, :, past], None)
            torch.testing.assert_close(made, expected)
