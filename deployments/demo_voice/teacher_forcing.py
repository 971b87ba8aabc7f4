"""The talker over whole utterances at once, with known frames: the engine's computation in batched form."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from deployments.talker.model.talker import Talker


class CausalAttention:
    """The `Attend` of padded sequences of equal length. Padding stands behind, so causality hides it."""

    def __init__(self, sequences: int, length: int) -> None:
        self.shape = (sequences, length)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[rows, heads, head_dim], [rows, kv_heads, head_dim] twice -> [rows, heads, head_dim]."""
        query, key, value = (x.view(*self.shape, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return attended.transpose(1, 2).flatten(0, 1)


def input_rows(talker: Talker, text: Tensor, codec: Tensor, frames: Tensor) -> Tensor:
    """[..., hidden] from text ids [...], codec ids [...] and frames [..., groups]; negative ids add nothing."""
    first = torch.where(frames[..., 0] >= 0, frames[..., 0], codec)
    rows: Tensor = talker.text_projection(talker.model.text_embedding(text))
    rows = rows + _embed(talker.model.codec_embedding, first)
    for group, table in enumerate(talker.code_predictor.embeddings, start=1):
        rows = rows + _embed(table, frames[..., group])
    return rows


def _embed(table: nn.Module, ids: Tensor) -> Tensor:
    return table(ids.clamp(min=0)) * (ids >= 0)[..., None]  # type: ignore[no-any-return]


def talker_hidden(talker: Talker, rows: Tensor) -> Tensor:
    """Input rows [sequences, length, hidden] -> hidden states [sequences * length, hidden]."""
    sequences, length = rows.shape[:2]
    positions = torch.arange(length, device=rows.device).repeat(sequences)
    return talker(rows.flatten(0, 1), positions, CausalAttention(sequences, length))  # type: ignore[no-any-return]


def predictor_logits(talker: Talker, hidden: Tensor, frames: Tensor) -> Tensor:
    """Logits [n, groups - 1, code_vocab] of codebooks 1 and up, each given those before it.

    `hidden` [n, talker hidden] is what predicted codebook 0 of `frames` [n, groups].
    """
    predictor = talker.code_predictor
    count, groups = frames.shape
    tables = [talker.model.codec_embedding, *predictor.embeddings][: groups - 1]
    rows = torch.stack([hidden, *(table(frames[:, group]) for group, table in enumerate(tables))], dim=1)
    positions = torch.arange(groups, device=frames.device).repeat(count)
    narrow = predictor.small_to_mtp_projection(rows.flatten(0, 1))
    states = predictor.model(narrow, predictor.rotary(positions), CausalAttention(count, groups))
    heads = torch.stack([head.weight for head in predictor.lm_head])  # type: ignore[misc]
    return torch.einsum("ngd,gvd->ngv", states.view(count, groups, -1)[:, 1:], heads)
