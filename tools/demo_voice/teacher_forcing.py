"""The talker on complete utterances with known frames: a batched form of the engine's computation."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from deployments.talker.model.talker import Talker

_GUIDE_TOKENS, _GUIDE_SHARE = 2.0, 0.04  # how far off a head may read: in tokens, and as a share of the text


@dataclass(frozen=True, slots=True)
class Places:
    """Position in the text that each row should read."""

    first: Tensor  # [sequences]: position of the first text token
    count: Tensor  # [sequences]: number of text tokens; 0 if the text does not precede the frames
    share: Tensor  # [sequences, length]: share of the tokens already read
    spoken: Tensor  # [sequences, length]: whether the row predicts speech


class Guide:
    """Guides one attention head along the text during training, at about the pace of speech.

    If the prompt contains all text, nothing else shows which word is next, and learning this takes longer than
    memorizing the speech. (Tachibana et al. 2017, https://arxiv.org/abs/1710.08969)
    """

    LAYER, HEAD = 2, 0

    def __init__(self, places: Places) -> None:
        self.places = places
        self.loss = places.share.new_zeros(())

    def observe(self, layer: int, query: Tensor, key: Tensor) -> None:
        """Store the head's loss: [sequences, heads, length, head_dim], [sequences, kv_heads, length, head_dim]."""
        if layer != self.LAYER:
            return
        query, key = query[:, self.HEAD], key[:, self.HEAD * key.shape[1] // query.shape[1]]
        with torch.autocast(query.device.type, enabled=False):
            scores = query.float() @ key.float().mT * query.shape[-1] ** -0.5
            future = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu(1)
            attended = scores.masked_fill(future, -torch.inf).softmax(-1)
            costs = -(attended * self._wanted(scores.shape[1])).sum(-1).add(1e-6).log()
            guided = self.places.spoken & (self.places.count > 0)[:, None]
            self.loss = torch.where(guided, costs, 0.0).sum() / guided.sum().clamp(min=1)

    def _wanted(self, length: int) -> Tensor:
        """Return [sequences, length, length]: 1 at the expected position, less on both sides, 0 outside the text."""
        places = self.places
        token = (torch.arange(length, device=places.first.device) - places.first[:, None])[:, None]
        count = places.count[:, None, None]
        width = _GUIDE_TOKENS + _GUIDE_SHARE * count
        wanted = torch.exp(-0.5 * ((token - places.share[..., None] * count) / width).square())
        return wanted * ((token >= 0) & (token <= count))


class CausalAttention:
    """`Attend` for sequences padded to equal length. Padding is at the end, so the causal mask hides it."""

    def __init__(self, sequences: int, length: int, guide: Guide | None = None) -> None:
        self.shape, self.guide = (sequences, length), guide

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[rows, heads, head_dim], [rows, kv_heads, head_dim] twice -> [rows, heads, head_dim]."""
        query, key, value = (x.view(*self.shape, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
        if self.guide is not None:
            self.guide.observe(layer, query, key)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return attended.transpose(1, 2).flatten(0, 1)


def input_rows(talker: Talker, text: Tensor, codec: Tensor, frames: Tensor) -> Tensor:
    """Return [..., hidden] for text ids [...], codec ids [...] and frames [..., groups]; negative ids add zero."""
    first = torch.where(frames[..., 0] >= 0, frames[..., 0], codec)
    rows: Tensor = talker.text_projection(talker.model.text_embedding(text))
    rows = rows + _embed(talker.model.codec_embedding, first)
    for group, table in enumerate(talker.code_predictor.embeddings, start=1):
        rows = rows + _embed(table, frames[..., group])
    return rows


def _embed(table: nn.Module, ids: Tensor) -> Tensor:
    return table(ids.clamp(min=0)) * (ids >= 0)[..., None]  # type: ignore[no-any-return]


def talker_hidden(talker: Talker, rows: Tensor, guide: Guide | None = None) -> Tensor:
    """Input rows [sequences, length, hidden] -> hidden states [sequences * length, hidden]."""
    sequences, length = rows.shape[:2]
    positions = torch.arange(length, device=rows.device).repeat(sequences)
    return talker(rows.flatten(0, 1), positions, CausalAttention(sequences, length, guide))  # type: ignore[no-any-return]


def predictor_logits(talker: Talker, hidden: Tensor, frames: Tensor) -> Tensor:
    """Return logits [n, groups - 1, code_vocab] of codebooks 1 and up, each given the previous codebooks.

    `hidden` [n, talker hidden] are the states that predicted codebook 0 of `frames` [n, groups].
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
