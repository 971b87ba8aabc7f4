"""Attention of one query per row over that row's own keys and values."""

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812


def attend_rows(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """[rows, heads, head_dim] over twice [rows, kv_heads, length, head_dim] -> [rows, heads, head_dim].

    `mask` [rows, 1, 1, length] is True where a row may look, None where it may look everywhere. On CPU these are plain
    matrix products: how the fused kernel splits its work, and so how it rounds, depends on the other rows.
    """
    if query.device.type != "cpu":
        return F.scaled_dot_product_attention(query[:, :, None], keys, values, attn_mask=mask, enable_gqa=True)[:, :, 0]
    rows, heads, head_dim = query.shape
    grouped = query.view(rows, keys.shape[1], heads // keys.shape[1], head_dim)
    scores = torch.matmul(grouped, keys.transpose(2, 3)) * head_dim**-0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.matmul(scores.softmax(-1), values).view(rows, heads, head_dim)
