"""The codec as it is trained: the service's own networks around codebooks that learn by moving averages.

The trained tensors are the served ones. What training adds is a forward over whole windows that gradients pass: the
encoder's latents, the nearest entries with a straight-through estimator, the decoder from the zero state.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from deployments.codec.config import SpeechTokenizerConfig
from deployments.codec.decoder import CodecDecoder, DecoderNetwork
from deployments.codec.encoder import CodecEncoder, EncoderNetwork, PaddedConv1d
from deployments.codec.encoder import ResidualVectorQuantizer as EncoderQuantizer
from deployments.codec.layers import ConvNeXtBlock, Snake
from deployments.codec.quantizer import Codebook, ResidualVectorQuantizer
from deployments.codec.state import BatchState
from deployments.codec.transformer import LayerScale
from deployments.demo_voice.shape import NUM_PHONES, PHONES_PER_FRAME

_DECAY = 0.99
_DEAD = 0.05  # of the mean usage
_KMEANS_STEPS = 12
_RESIDUAL_SCALE = 0.1  # of the branches of transformer and ConvNeXt blocks before training


@dataclass(frozen=True, slots=True)
class Reconstruction:
    """What a training step needs of a forward."""

    audio: Tensor  # [B, samples], unbounded
    commitment: Tensor  # mean squared distance to the entries, summed over codebooks
    phones: Tensor  # [2, B, frames, phones of a frame, phone numbers]: logits from codebook 0 alone, and from all


class CodebookTrainer:
    """Moves the entries of one codebook towards the vectors that chose them."""

    def __init__(self, codebook: Codebook) -> None:
        self.codebook = codebook

    def nearest(self, x: Tensor) -> Tensor:
        """Index [N] of the entry nearest to each row of x [N, channels]."""
        table = self.codebook.table()
        return (table.square().sum(-1) - 2 * x @ table.T).argmin(dim=-1)

    def initialise(self, x: Tensor) -> None:
        """Start from k-means over x [N, channels]."""
        size = len(self.codebook.cluster_usage)
        self._set(torch.ones_like(self.codebook.cluster_usage), _rows(x, size))
        for _ in range(_KMEANS_STEPS):
            counts, sums = self._statistics(x, self.nearest(x))
            empty = (counts == 0)[:, None]
            means = torch.where(empty, _rows(x, size), sums / counts.clamp(min=1)[:, None])
            self._set(counts.clamp(min=1) / len(x) * size, means)

    def update(self, x: Tensor, indices: Tensor, *, revive: bool) -> None:
        """One step of the moving averages; with `revive`, entries that nobody chooses start anew among x."""
        counts, sums = self._statistics(x, indices)
        usage = self.codebook.cluster_usage.mul_(_DECAY).add_(counts, alpha=1 - _DECAY)
        self.codebook.embedding_sum.mul_(_DECAY).add_(sums, alpha=1 - _DECAY)
        if revive:
            mean = len(x) / len(usage)
            dead = usage < _DEAD * mean
            table = torch.where(dead[:, None], _rows(x, len(usage)), self.codebook.table())
            self._set(torch.where(dead, mean, usage), table)

    def perplexity(self) -> float:
        """How many entries are in use, as the exponential of the entropy."""
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


class QuantizerTrainer:
    """Residual codebooks behind the encoder's input projection and before the decoder's output projection."""

    def __init__(self, source: EncoderQuantizer, target: ResidualVectorQuantizer) -> None:
        self.source, self.target = source, target
        codebooks = [module for module in target.modules() if isinstance(module, Codebook)]
        self.stages = [CodebookTrainer(codebook.requires_grad_(requires_grad=False)) for codebook in codebooks]

    def __call__(self, x: Tensor, *, learn: bool, revive: bool) -> tuple[Tensor, Tensor]:
        """Latents [B, hidden, frames] -> quantized [B, codebook_dim, frames] and the commitment."""
        projected: Tensor = self.source.input_proj(x)
        flat = projected.transpose(1, 2).flatten(0, 1)
        residual = flat.detach()
        commitment = flat.new_zeros(())
        quantized = torch.zeros_like(residual)
        for stage in self.stages:
            with torch.no_grad():
                indices = stage.nearest(residual)
                values = stage.codebook.table()[indices]
                if learn:
                    stage.update(residual, indices, revive=revive)
            commitment = commitment + (flat - quantized - values).square().mean()
            residual = residual - values
            quantized = quantized + values
        passed = flat + (quantized - flat).detach()
        out: Tensor = self.target.output_proj(passed.view(*projected.transpose(1, 2).shape).transpose(1, 2))
        return out, commitment

    @torch.no_grad()
    def initialise(self, x: Tensor) -> None:
        """Start each codebook from what the ones before leave of latents x [B, hidden, frames].

        The latents are scaled to deviation 1 first.
        """
        self.source.input_proj.weight.div_(self.source.input_proj(x).std())
        residual = self.source.input_proj(x).transpose(1, 2).flatten(0, 1)
        for stage in self.stages:
            stage.initialise(residual)
            residual = residual - stage.codebook.table()[stage.nearest(residual)]


class CodecModel(nn.Module):
    """Encoder, codebooks and decoder in training."""

    def __init__(self, config: SpeechTokenizerConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = EncoderNetwork(config.encoder)
        self.decoder = DecoderNetwork(config.decoder)
        source, target = self.encoder.quantizer, self.decoder.quantizer
        self.quantizers = [
            QuantizerTrainer(source.semantic_residual_vector_quantizer, target.rvq_first),
            QuantizerTrainer(source.acoustic_residual_vector_quantizer, target.rvq_rest),
        ]
        # Told from the codes while training, and by codebook 0 alone: codes that keep which sound it is can be
        # understood, and can be predicted from text.
        width, logits = config.decoder.codebook_dim, PHONES_PER_FRAME * NUM_PHONES
        self.phones = nn.ModuleList(nn.Linear(width, logits) for _ in range(2))
        with torch.no_grad():
            for module in self.encoder.modules():
                if isinstance(module, PaddedConv1d):  # signals keep their scale, and biases do not outweigh them
                    nn.init.kaiming_normal_(module.conv.weight, nonlinearity="linear")
                    if module.conv.bias is not None:
                        module.conv.bias.zero_()
            for module in self.decoder.modules():
                if isinstance(module, LayerScale):
                    module.scale.fill_(_RESIDUAL_SCALE)
                if isinstance(module, ConvNeXtBlock):
                    module.gamma.fill_(_RESIDUAL_SCALE)

    def forward(self, audio: Tensor, *, learn: bool = True, revive: bool = True) -> Reconstruction:
        """Windows [B, samples] of whole frames, each as a stream of its own. `learn` moves the codebooks."""
        x = self.latents(audio)
        quantized = [quantizer(x, learn=learn, revive=revive) for quantizer in self.quantizers]
        latents = sum((latent for latent, _ in quantized), start=torch.zeros((), device=x.device))
        commitment = sum((loss for _, loss in quantized), start=torch.zeros((), device=x.device))
        self._prepare_snakes()
        out = self.decoder.synthesize(latents.transpose(1, 2), self._zero_state(len(audio)))
        return Reconstruction(out, commitment, self._phones(quantized[0][0], latents))

    def _phones(self, first: Tensor, all_codes: Tensor) -> Tensor:
        both = [head(x.transpose(1, 2)) for head, x in zip(self.phones, (first, all_codes), strict=True)]
        logits = torch.stack(both)
        return logits.view(*logits.shape[:-1], PHONES_PER_FRAME, NUM_PHONES)

    def latents(self, audio: Tensor) -> Tensor:
        """[B, samples] -> [B, hidden, frames] float32; on a GPU the convolutions run in bfloat16."""
        with torch.autocast(audio.device.type, torch.bfloat16, enabled=audio.is_cuda):
            x = self.encoder.encoder(audio[:, None])
        x = self.encoder.encoder_transformer(x.float().transpose(1, 2)).transpose(1, 2)
        out: Tensor = self.encoder.downsample(x)
        return out

    @torch.no_grad()
    def initialise(self, audio: Tensor) -> None:
        """Start the codebooks from windows [B, samples]."""
        x = torch.cat([self.latents(part) for part in torch.split(audio, 32)])
        for quantizer in self.quantizers:
            quantizer.initialise(x)

    def perplexities(self) -> list[float]:
        """Of each codebook, in the order of the codes."""
        return [stage.perplexity() for quantizer in self.quantizers for stage in quantizer.stages]

    def _prepare_snakes(self) -> None:
        for module in self.decoder.modules():
            if isinstance(module, Snake):  # as Snake.prepare does, with gradients
                module.frequency = module.alpha.exp()[:, None]
                module.amplitude = 1.0 / (module.beta.exp()[:, None] + 1e-9)

    def _zero_state(self, batch: int) -> BatchState:
        device = self.decoder.pre_conv.conv.weight.device
        shapes = self.decoder.layout.shapes
        tensors = [torch.zeros(batch, *shape, device=device) for shape in shapes]
        return BatchState(torch.zeros(batch, dtype=torch.int64, device=device), tensors)


def official_tensors(model: CodecModel) -> dict[str, Tensor]:
    """Every tensor of the speech tokenizer under its official name, float32 on the CPU.

    The encoder's codebooks are copies of the decoder's, which are the ones that were trained. Projections that only the
    official training uses are zero.
    """
    _copy_codebooks(model)
    return {
        f"{prefix}.{name}": tensor.detach().float().cpu().contiguous()
        for prefix, network in (("decoder", model.decoder), ("encoder", model.encoder))
        for name, tensor in network.state_dict().items()
    }


@torch.no_grad()
def _copy_codebooks(model: CodecModel) -> None:
    for quantizer in model.quantizers:
        quantizer.target.input_proj.weight.zero_()
        quantizer.source.output_proj.weight.zero_()
        for stage, layer in zip(quantizer.stages, quantizer.source.layers, strict=True):
            copy = layer.get_submodule("codebook")
            copy.get_buffer("cluster_usage").copy_(stage.codebook.cluster_usage)
            copy.get_buffer("embed_sum").copy_(stage.codebook.embedding_sum)


def load_trained(run: Path, config: SpeechTokenizerConfig, *, device: torch.device | str) -> CodecModel:
    """The latest checkpoint of RUN/codec, or the bare weights that are left of one."""
    model = CodecModel(config)
    files = (run / "codec" / "latest.pt", run / "codec" / "weights.pt")
    checkpoint = torch.load(next(file for file in files if file.exists()), map_location="cpu", weights_only=True)
    load_weights(model, checkpoint["model"])
    return model.to(device)


def load_weights(model: CodecModel, weights: dict[str, Tensor]) -> None:
    """Put weights in. They may be older than the heads that tell phones, which only training uses."""
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected, f"weights of another shape: {unexpected}"
    assert all(name.startswith("phones.") for name in missing), f"weights are missing: {missing}"


def served(model: CodecModel, device: torch.device | str) -> tuple[CodecEncoder, CodecDecoder]:
    """The service's encoder and decoder with the model's weights, independent of it."""
    tensors = official_tensors(model)
    config = model.config
    networks = []
    for prefix, network in (("encoder.", EncoderNetwork(config.encoder)), ("decoder.", DecoderNetwork(config.decoder))):
        own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        network.load_state_dict(own)
        networks.append(network.to(device))
    encoder, decoder = networks
    assert isinstance(encoder, EncoderNetwork)
    assert isinstance(decoder, DecoderNetwork)
    return (
        CodecEncoder(
            encoder,
            num_quantizers=config.encoder_valid_num_quantizers,
            frame_samples=config.encode_downsample_rate,
        ),
        CodecDecoder(decoder, device=device, dtype=torch.float32),
    )
