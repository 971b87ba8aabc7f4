"""The code predictor: from the talker's hidden state and codebook 0 to the other codebooks, one after the other."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from deployments.talker.model.layers import DecoderStack, RotaryTable, attend_rows
from deployments.talker.model.model_config import ModelConfig

SampleCode = Callable[[Tensor, int], Tensor]  # (logits [rows, vocab] float32, codebook) -> codes [rows] int64


class FrameAttention:
    """Causal attention over one frame's few positions."""

    def __init__(self, shape: tuple[int, int, int, int, int], *, like: Tensor) -> None:
        """`shape`: layers, rows, kv_heads, positions, head_dim."""
        self.keys = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.values = torch.zeros_like(self.keys)
        self.step = 0

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One new position for each row."""
        self.keys[layer, :, :, self.step] = key
        self.values[layer, :, :, self.step] = value
        past = slice(None, self.step + 1)
        return attend_rows(query, self.keys[layer, :, :, past], self.values[layer, :, :, past], None)


class PredictorStack(DecoderStack):
    """The decoder stack and the embeddings of codebooks 1 and up, as the official checkpoint nests them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.predictor)
        tables = (
            nn.Embedding(config.code_vocab_size, config.talker.hidden_size) for _ in range(1, config.num_code_groups)
        )
        self.codec_embedding = nn.ModuleList(tables)


class CodePredictor(nn.Module):
    """Depth transformer over the codebooks of one frame. Its embeddings have the talker's width."""

    rotary: RotaryTable
    small_to_mtp_projection: nn.Module

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = PredictorStack(config)
        width = config.predictor.hidden_size
        self.lm_head = nn.ModuleList(
            nn.Linear(width, config.code_vocab_size, bias=False) for _ in range(1, config.num_code_groups)
        )
        same = width == config.talker.hidden_size
        self.small_to_mtp_projection = nn.Identity() if same else nn.Linear(config.talker.hidden_size, width)

    @property
    def embeddings(self) -> nn.ModuleList:
        """One table [code_vocab, talker hidden] for each codebook from 1 on."""
        return self.model.codec_embedding

    def prepare(self, *, like: Tensor) -> None:
        """Compute the rotations, of the type and on the device of `like`."""
        positions = self.config.num_code_groups + 1
        self.rotary = RotaryTable(self.config.predictor, positions=positions, like=like)

    def forward(self, hidden: Tensor, code0: Tensor, embed0: Tensor, *, sample: SampleCode) -> tuple[Tensor, Tensor]:
        """Fill the frames of a batch.

        `hidden` [rows, talker hidden] follows the final norm; `embed0` [rows, talker hidden] embeds `code0` [rows].
        Returns codes [rows, groups] and the sum of the codebooks' embeddings [rows, talker hidden].
        """
        stack = self.config.predictor
        shape = (stack.num_layers, hidden.shape[0], stack.num_kv_heads, self.config.num_code_groups, stack.head_dim)
        attention = FrameAttention(shape, like=hidden)
        self._next_position(hidden, attention)
        codes, embeds = [code0], [embed0]
        for group, (head, table) in enumerate(zip(self.lm_head, self.embeddings, strict=True), start=1):
            logits = head(self._next_position(embeds[-1], attention)).float()
            codes.append(sample(logits, group))
            embeds.append(table(codes[-1]))
        return torch.stack(codes, dim=1), sum(embeds[1:], start=embeds[0])

    def _next_position(self, row: Tensor, attention: FrameAttention) -> Tensor:
        position = torch.full((row.shape[0],), attention.step, device=row.device)
        hidden: Tensor = self.model(self.small_to_mtp_projection(row), self.rotary(position), attention)
        attention.step += 1
        return hidden
