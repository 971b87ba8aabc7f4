"""The codec in training: the service's own decoder after codebooks for sounds and codebooks for the rest.

The first codebooks hold the teacher's phonemes, one for each part of a frame. Their entries are trained by gradients.
The rest of the sound goes through residual codebooks, trained by moving averages as in the official training. The
encoder selects residual codes from a spectrogram. It encodes this corpus and is not part of the checkpoint, which
has built-in voices and does not clone.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from deployments.codec.backends.torch_backend import TorchBackend
from deployments.codec.codec_config import SpeechTokenizerConfig
from deployments.codec.decoder import CodecDecoder
from deployments.codec.encoder import EncoderNetwork, LayerScale
from deployments.codec.fold import fold
from talkray_tools.unfolded_codec import AveragedCodebook, ConvNeXtBlock, DecoderNetwork
from tools.demo_voice.shape import NUM_PHONES, PHONES_PER_FRAME
from tools.demo_voice.spectral import LogMel

_DECAY = 0.99
_KMEANS_STEPS = 12
_RESIDUAL_SCALE = 0.1  # initial scale of the branches of transformer and ConvNeXt blocks
_PHONE_SCALE = 0.5  # initial scale of the codebook entries for sounds
_ENCODER_WIDTH = 384


@dataclass(frozen=True, slots=True)
class Reconstruction:
    """Results of a forward pass that a training step needs."""

    audio: Tensor  # [B, samples], unbounded
    commitment: Tensor  # mean squared distance to the entries, summed over codebooks


class CodebookTrainer:
    """Moves the entries of one codebook towards the vectors that selected them."""

    def __init__(self, codebook: AveragedCodebook) -> None:
        self.codebook = codebook

    def nearest(self, x: Tensor) -> Tensor:
        """Return the index [N] of the entry nearest to each row of x [N, channels]."""
        table = self.codebook.table()
        return (table.square().sum(-1) - 2 * x @ table.T).argmin(dim=-1)

    def initialise(self, x: Tensor) -> None:
        """Initialize the entries by k-means over x [N, channels]."""
        size = len(self.codebook.cluster_usage)
        self._set(torch.ones_like(self.codebook.cluster_usage), _rows(x, size))
        for _ in range(_KMEANS_STEPS):
            counts, sums = self._statistics(x, self.nearest(x))
            empty = (counts == 0)[:, None]
            means = torch.where(empty, _rows(x, size), sums / counts.clamp(min=1)[:, None])
            self._set(counts.clamp(min=1) / len(x) * size, means)

    def update(self, x: Tensor, indices: Tensor, *, dead: Tensor) -> None:
        """Update the moving averages. Entries used less than `dead` [] times the mean are reset to rows of x."""
        counts, sums = self._statistics(x, indices)
        usage = self.codebook.cluster_usage.mul_(_DECAY).add_(counts, alpha=1 - _DECAY)
        self.codebook.embedding_sum.mul_(_DECAY).add_(sums, alpha=1 - _DECAY)
        mean = len(x) / len(usage)
        unused = usage < dead * mean
        table = torch.where(unused[:, None], _rows(x, len(usage)), self.codebook.table())
        self._set(torch.where(unused, mean, usage), table)

    def perplexity(self) -> float:
        """Return the effective number of entries in use: the exponential of the entropy."""
        share = self.codebook.cluster_usage / self.codebook.cluster_usage.sum()
        return float(torch.exp(-(share * (share + 1e-10).log()).sum()))

    def _statistics(self, x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        counts = torch.zeros_like(self.codebook.cluster_usage)
        counts.index_add_(0, indices, torch.ones_like(indices, dtype=counts.dtype))
        sums = torch.zeros_like(self.codebook.embedding_sum).index_add_(0, indices, x)
        return counts, sums

    def _set(self, usage: Tensor, table: Tensor) -> None:
        self.codebook.cluster_usage.copy_(usage)
        self.codebook.embedding_sum.copy_(table * usage[:, None])


def _rows(x: Tensor, count: int) -> Tensor:
    return x[torch.randint(len(x), (count,), device=x.device)]


class MelEncoder(nn.Module):
    """Converts samples to one vector per frame, from a log-mel spectrogram with a little context on both sides."""

    def __init__(self, config: SpeechTokenizerConfig, channels: int) -> None:
        super().__init__()
        width = _ENCODER_WIDTH
        assert config.frame_samples == 8 * LogMel.STEP, "three halvings make a frame"
        self.mel = LogMel(config.sample_rate)
        self.layers = nn.Sequential(
            nn.Conv1d(LogMel.BANDS, width, 5, padding=2),
            nn.GELU(),
            *(layer for _ in range(3) for layer in (nn.Conv1d(width, width, 4, stride=2, padding=1), nn.GELU())),
            nn.Conv1d(width, width, 3, padding=1),
            nn.GELU(),
            nn.Conv1d(width, channels, 1),
        )

    def forward(self, audio: Tensor) -> Tensor:
        """[B, samples] of whole frames -> [B, frames, channels]."""
        out: Tensor = self.layers(self.mel(audio))
        return out.transpose(1, 2)


class CodecModel(nn.Module):
    """Encoder, codebooks and decoder in training."""

    def __init__(self, config: SpeechTokenizerConfig) -> None:
        super().__init__()
        self.config = config
        self.decoder = DecoderNetwork(config.decoder)
        self.encoder = MelEncoder(config, config.decoder.codebook_dim // 2)
        quantizer = self.decoder.quantizer
        codebooks = [module for module in quantizer.modules() if isinstance(module, AveragedCodebook)]
        self.sounds, rest = codebooks[:PHONES_PER_FRAME], codebooks[PHONES_PER_FRAME:]
        self.stages = [CodebookTrainer(codebook.requires_grad_(requires_grad=False)) for codebook in rest]
        with torch.no_grad():
            for codebook in self.sounds:
                codebook.cluster_usage.requires_grad = False
                nn.init.normal_(codebook.embedding_sum[:NUM_PHONES], std=_PHONE_SCALE)
            for module in self.decoder.modules():
                if isinstance(module, LayerScale):
                    module.scale.fill_(_RESIDUAL_SCALE)
                if isinstance(module, ConvNeXtBlock):
                    module.gamma.fill_(_RESIDUAL_SCALE)

    def forward(self, audio: Tensor, phones: Tensor, *, dead: Tensor | None) -> Reconstruction:
        """Process windows [B, samples] of whole frames with sounds [B, frames, parts], each as a separate stream.

        Updates the residual codebooks, and resets entries used less than `dead` [] times the mean. Without `dead`, the
        codes do not change, because neither the codebooks nor the encoder are updated.
        """
        with torch.set_grad_enabled(dead is not None):
            x = self.encoder(audio)
        flat = x.flatten(0, 1)
        residual, commitment = flat.detach(), flat.new_zeros(())
        quantized = torch.zeros_like(residual)
        for stage in self.stages:
            with torch.no_grad():
                indices = stage.nearest(residual)
                values = stage.codebook.table()[indices]
                if dead is not None:
                    stage.update(residual, indices, dead=dead)
            commitment = commitment + (flat - quantized - values).square().mean()
            residual = residual - values
            quantized = quantized + values
        passed = flat + (quantized - flat).detach()
        out = self.decoder.synthesize(self._latents(passed.view_as(x), phones))
        return Reconstruction(out, commitment)

    def _latents(self, rest: Tensor, phones: Tensor) -> Tensor:
        """Return the sum after the projections, as the served quantizer computes it from codes."""
        first, *others = (F.embedding(phones[..., part], book.embedding_sum) for part, book in enumerate(self.sounds))
        quantizer = self.decoder.quantizer
        rest = torch.stack(others).sum(0) + rest
        both = [
            projection.output_proj(x.transpose(1, 2))
            for projection, x in ((quantizer.rvq_first, first), (quantizer.rvq_rest, rest))
        ]
        latents: Tensor = both[0] + both[1]
        return latents.transpose(1, 2)

    @torch.no_grad()
    def codes(self, audio: Tensor, phones: Tensor) -> Tensor:
        """Return the frames [B, frames, groups] for samples [B, samples] and sounds [B, frames, parts]."""
        x = self.encoder(audio)
        residual = x.flatten(0, 1)
        codes = []
        for stage in self.stages:
            codes.append(stage.nearest(residual))
            residual = residual - stage.codebook.table()[codes[-1]]
        return torch.cat((phones, torch.stack(codes, dim=-1).view(*x.shape[:2], -1)), dim=-1)

    @torch.no_grad()
    def initialise(self, audio: Tensor) -> None:
        """Initialize the residual codebooks from windows [B, samples], after scaling to deviation 1."""
        x = torch.cat([self.encoder(part) for part in torch.split(audio, 32)]).flatten(0, 1)
        last = self.encoder.layers[-1]
        assert isinstance(last, nn.Conv1d)
        for parameter in last.parameters():
            parameter.div_(x.std())
        residual = x / x.std()
        for stage in self.stages:
            stage.initialise(residual)
            residual = residual - stage.codebook.table()[stage.nearest(residual)]

    def perplexities(self) -> list[float]:
        return [stage.perplexity() for stage in self.stages]


def official_tensors(model: CodecModel) -> dict[str, Tensor]:
    """Return all tensors of the speech tokenizer by official name, in float32 on the CPU.

    The input projections (used only in the official training) and the encoder (used only by cloning checkpoints) are
    zero.
    """
    decoder = model.decoder.state_dict()
    for name in decoder:
        if name.startswith("quantizer.") and name.endswith("input_proj.weight"):
            decoder[name] = torch.zeros_like(decoder[name])
    encoder = {
        name: torch.zeros_like(tensor) for name, tensor in EncoderNetwork(model.config.encoder).state_dict().items()
    }
    return {
        f"{prefix}.{name}": tensor.detach().float().cpu().contiguous()
        for prefix, tensors in (("decoder", decoder), ("encoder", encoder))
        for name, tensor in tensors.items()
    }


def load_trained(run: Path, config: SpeechTokenizerConfig, *, device: torch.device | str) -> CodecModel:
    """Load the model with the trained weights from RUN/codec."""
    model = CodecModel(config)
    model.load_state_dict(torch.load(run / "codec" / "weights.pt", map_location="cpu", weights_only=True)["model"])
    return model.to(device)


def served(model: CodecModel, device: torch.device | str) -> CodecDecoder:
    """Return the service's decoder with a copy of the model's weights."""
    tensors = official_tensors(model).items()
    decoder = {name.removeprefix("decoder."): tensor.to(device) for name, tensor in tensors if name[0] == "d"}
    return CodecDecoder(TorchBackend(fold(decoder, model.config.decoder)))
