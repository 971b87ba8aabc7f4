"""The talker network, which samples codebook 0 of each frame, and the code predictor, which samples the others."""

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor, nn

from deployments.talker.model.layers import Attend, DecoderStack, RotaryTable, attend_rows
from deployments.talker.model.model_config import ModelConfig

_NUM_SUPPRESSED = 1024  # ids at the end of the vocabulary that are never sampled, except for the end of speech
SampleCode = Callable[[Tensor, int], Tensor]  # (logits [rows, vocab] float32, codebook) -> codes [rows] int64


class FrameAttention:
    """Causal attention over the positions of one frame."""

    def __init__(self, shape: tuple[int, int, int, int, int], *, like: Tensor) -> None:
        """Allocate keys and values of `shape`: layers, rows, kv_heads, positions, head_dim."""
        self.keys = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.values = torch.zeros_like(self.keys)
        self.step = 0

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Add one position for each row and attend to all positions added."""
        self.keys[layer, :, :, self.step] = key
        self.values[layer, :, :, self.step] = value
        past = slice(None, self.step + 1)
        return attend_rows(query, self.keys[layer, :, :, past], self.values[layer, :, :, past], None)


class PredictorStack(DecoderStack):
    """Decoder stack with the embeddings for codebooks 1 and up, nested as in the official checkpoint."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.predictor)
        tables = (
            nn.Embedding(config.code_vocab_size, config.talker.hidden_size) for _ in range(1, config.num_code_groups)
        )
        self.codec_embedding = nn.ModuleList(tables)


class CodePredictor(nn.Module):
    """Depth transformer over the codebooks of one frame. Its embeddings are as wide as the talker's."""

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
        """One table [code_vocab, talker hidden] for each codebook except 0."""
        return self.model.codec_embedding

    def prepare(self, *, like: Tensor) -> None:
        """Compute the rotary table with the same dtype and device as `like`."""
        positions = self.config.num_code_groups + 1
        self.rotary = RotaryTable(self.config.predictor, positions=positions, like=like)

    def forward(self, hidden: Tensor, code0: Tensor, embed0: Tensor, *, sample: SampleCode) -> tuple[Tensor, Tensor]:
        """Sample codebooks 1 and up for a batch of frames.

        `hidden` [rows, talker hidden] is the output of the final norm. `embed0` [rows, talker hidden] embeds `code0`
        [rows]. Returns codes [rows, groups] and the sums of their embeddings [rows, talker hidden].
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


class TalkerStack(DecoderStack):
    """Decoder stack with both embedding tables, nested as in the official checkpoint."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.talker)
        self.text_embedding = nn.Embedding(config.text_vocab_size, config.text_hidden_size)
        self.codec_embedding = nn.Embedding(config.vocab_size, config.talker.hidden_size)


class Talker(nn.Module):
    """Network from text and codes to hidden states and logits of codebook 0. Contains the code predictor."""

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
        """Compute constants after loading the weights: the rotary tables, and the mask of ids never to be sampled."""
        weight = self.codec_head.weight
        self.rotary = RotaryTable(self.config.talker, positions=max_positions, like=weight)
        self.code_predictor.prepare(like=weight)
        suppressed = torch.zeros(self.config.vocab_size, dtype=torch.bool, device=weight.device)
        suppressed[self.config.vocab_size - _NUM_SUPPRESSED :] = True
        suppressed[self.config.codes.eos] = False
        self.register_buffer("suppressed", suppressed, persistent=False)

    def embed_text(self, tokens: list[int]) -> Tensor:
        """Convert token ids to projected rows [tokens, hidden]."""
        ids = torch.tensor(tokens, dtype=torch.long, device=self.codec_head.weight.device)
        out: Tensor = self.text_projection(self.model.text_embedding(ids))
        return out

    def embed_frames(self, frames: Tensor) -> Tensor:
        """Convert frames [n, groups] to rows [n, hidden], the sums of the codebooks' embeddings in order."""
        first = self.model.codec_embedding(frames[:, 0])
        rest = (table(frames[:, group + 1]) for group, table in enumerate(self.code_predictor.embeddings))
        out: Tensor = sum(rest, start=first)
        return out

    def forward(self, rows: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Convert input rows [rows, hidden] at positions [rows] to hidden states [rows, hidden]."""
        out: Tensor = self.model(rows, self.rotary(positions), attend)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits of codebook 0 [rows, vocab] for hidden states [rows, hidden], without suppression."""
        out: Tensor = self.codec_head(hidden).float()
        return out
