"""The talker: codebook 0 of each frame, and the sum of embeddings that is its next input."""

from collections import OrderedDict

import torch
from torch import Tensor, nn

from deployments.talker.model.layers import Attend, DecoderStack, RotaryTable
from deployments.talker.model.model_config import ModelConfig
from deployments.talker.model.predictor import CodePredictor

_NUM_SUPPRESSED = 1024  # ids at the end of the vocabulary that are never sampled, end of speech apart


class TalkerStack(DecoderStack):
    """The decoder stack together with both embedding tables, as the official checkpoint nests them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.talker)
        self.text_embedding = nn.Embedding(config.text_vocab_size, config.text_hidden_size)
        self.codec_embedding = nn.Embedding(config.vocab_size, config.talker.hidden_size)


class Talker(nn.Module):
    """Text and codes in, hidden states and logits of codebook 0 out. Holds the code predictor, as checkpoints do."""

    suppressed: Tensor
    rotary: RotaryTable

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = TalkerStack(config)
        fc1 = nn.Linear(config.text_hidden_size, config.text_hidden_size)
        fc2 = nn.Linear(config.text_hidden_size, config.talker.hidden_size)
        # [tokens, text_hidden] -> [tokens, hidden]
        self.text_projection = nn.Sequential(OrderedDict(linear_fc1=fc1, silu=nn.SiLU(), linear_fc2=fc2))
        self.codec_head = nn.Linear(config.talker.hidden_size, config.vocab_size, bias=False)
        self.code_predictor = CodePredictor(config)

    def prepare(self, *, max_positions: int) -> None:
        """Compute constants after the weights are in place: rotations and the mask of ids never sampled."""
        weight = self.codec_head.weight
        self.rotary = RotaryTable(self.config.talker, positions=max_positions, like=weight)
        self.code_predictor.prepare(like=weight)
        suppressed = torch.zeros(self.config.vocab_size, dtype=torch.bool, device=weight.device)
        suppressed[self.config.vocab_size - _NUM_SUPPRESSED :] = True
        suppressed[self.config.codes.eos] = False
        self.register_buffer("suppressed", suppressed, persistent=False)

    def embed_text(self, tokens: list[int]) -> Tensor:
        """Token ids -> projected rows [tokens, hidden]."""
        ids = torch.tensor(tokens, dtype=torch.long, device=self.codec_head.weight.device)
        out: Tensor = self.text_projection(self.model.text_embedding(ids))
        return out

    def embed_frames(self, frames: Tensor) -> Tensor:
        """Frames [n, groups] -> rows [n, hidden]: the sum over the codebooks' embeddings, in their order."""
        first = self.model.codec_embedding(frames[:, 0])
        rest = (table(frames[:, group + 1]) for group, table in enumerate(self.code_predictor.embeddings))
        out: Tensor = sum(rest, start=first)
        return out

    def forward(self, rows: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Input rows [rows, hidden] at positions [rows] -> hidden states [rows, hidden]."""
        out: Tensor = self.model(rows, self.rotary(positions), attend)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [rows, hidden] -> float32 logits of codebook 0 [rows, vocab], suppressed ids not yet masked."""
        out: Tensor = self.codec_head(hidden).float()
        return out
