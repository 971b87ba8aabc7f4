"""Residual codebooks of the codec decoder, folded into one table so that a frame costs one gather and one sum."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from deployments.codec.config import DecoderConfig

_MIN_USAGE = 1e-5  # keeps a codebook entry that training never used finite


class Codebook(nn.Module):
    """Entries as the exponential moving averages of training left them: a sum and a count."""

    def __init__(self, size: int, channels: int) -> None:
        super().__init__()
        self.cluster_usage = nn.Parameter(torch.ones(size))
        self.embedding_sum = nn.Parameter(torch.zeros(size, channels))

    def table(self) -> Tensor:
        """Entries, [size, channels]."""
        return self.embedding_sum / self.cluster_usage.clamp(min=_MIN_USAGE)[:, None]


class VectorQuantization(nn.Module):
    """One codebook under its checkpoint name."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self._codebook = Codebook(config.codebook_size, config.codebook_dim // 2)

    def table(self) -> Tensor:
        """Entries, [codebook_size, codebook_dim // 2]."""
        return self._codebook.table()


class ResidualVectorQuantization(nn.Module):
    """Codebooks whose entries add up."""

    def __init__(self, config: DecoderConfig, num_quantizers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(VectorQuantization(config) for _ in range(num_quantizers))


class ResidualVectorQuantizer(nn.Module):
    """A group of codebooks between projections. The input projection serves training only."""

    def __init__(self, config: DecoderConfig, num_quantizers: int) -> None:
        super().__init__()
        inner = config.codebook_dim // 2
        self.input_proj = nn.Conv1d(config.codebook_dim, inner, 1, bias=False)
        self.output_proj = nn.Conv1d(inner, config.codebook_dim, 1, bias=False)
        self.vq = ResidualVectorQuantization(config, num_quantizers)

    def tables(self) -> list[Tensor]:
        """Entries of each codebook behind the output projection, [codebook_size, codebook_dim]."""
        projection = self.output_proj.weight[:, :, 0].T
        return [layer.table() @ projection for layer in self.vq.layers]  # type: ignore[operator]


class SplitQuantizer(nn.Module):
    """Semantic and acoustic codebooks. `prepare` folds them; projecting is linear, so the sums stay the same."""

    tables: Tensor  # [num_quantizers * codebook_size, codebook_dim]
    offsets: Tensor  # [num_quantizers] int64, first row of each codebook

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.codebook_size = config.codebook_size
        self.rvq_first = ResidualVectorQuantizer(config, config.num_semantic_quantizers)
        self.rvq_rest = ResidualVectorQuantizer(config, config.num_quantizers - config.num_semantic_quantizers)
        self.register_buffer("tables", None, persistent=False)
        self.register_buffer("offsets", None, persistent=False)

    @torch.no_grad()
    def prepare(self) -> None:
        """Fold the loaded codebooks."""
        tables = [*self.rvq_first.tables(), *self.rvq_rest.tables()]
        self.tables = torch.cat(tables)
        self.offsets = torch.arange(len(tables), device=self.tables.device) * self.codebook_size

    def forward(self, codes: Tensor) -> Tensor:
        """Sum of the entries, [B, frames, codebook_dim], of codes [B, frames, num_quantizers] in range."""
        return F.embedding(codes + self.offsets, self.tables).sum(dim=2)
