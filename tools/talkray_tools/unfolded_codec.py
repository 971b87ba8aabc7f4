"""The codec decoder as stored in checkpoints: unfolded, in float32, for complete utterances.

It is the reference for the serving decoder, and the network that trains the embedded voice. `largest_activation` runs
each code of each codebook through the decoder.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from deployments.codec.backends.triton_slots import every_code
from deployments.codec.codec_config import CONTEXT, RESIDUAL_DILATIONS, DecoderConfig, SpeechTokenizerConfig
from deployments.codec.encoder import LayerScale
from deployments.codec.rotary import rotary_tables, rotate
from deployments.talker.model.layers import GatedMLP
from deployments.weights.checkpoint import load_strict, without_values

_MIN_USAGE = 1e-5  # keeps entries that were unused in training finite
_KERNEL_SIZE = CONTEXT + 1
_EXPANSION = 4
_BATCH = 4  # concurrent streams, limited to bound memory


class AveragedCodebook(nn.Module):
    """Codebook entries: exponential moving averages from training, stored as sums and counts."""

    def __init__(self, size: int, channels: int) -> None:
        super().__init__()
        self.cluster_usage = nn.Parameter(torch.ones(size))
        self.embedding_sum = nn.Parameter(torch.zeros(size, channels))

    def table(self) -> Tensor:
        """Return the entries, [size, channels]."""
        return self.embedding_sum / self.cluster_usage.clamp(min=_MIN_USAGE)[:, None]


class CodebookGroup(nn.Module):
    """Group of codebooks between an input and an output projection. The input projection is used only in training."""

    def __init__(self, config: DecoderConfig, num_quantizers: int) -> None:
        super().__init__()
        inner = config.codebook_dim // 2
        self.input_proj = nn.Conv1d(config.codebook_dim, inner, 1, bias=False)
        self.output_proj = nn.Conv1d(inner, config.codebook_dim, 1, bias=False)
        self.codebooks = [AveragedCodebook(config.codebook_size, inner) for _ in range(num_quantizers)]
        self.vq = nn.Module()  # matches the names in the checkpoint
        self.vq.layers = nn.ModuleList(nn.ModuleDict({"_codebook": each}) for each in self.codebooks)

    def tables(self) -> list[Tensor]:
        """Return the entries of each codebook after the output projection, [codebook_size, codebook_dim]."""
        projection = self.output_proj.weight[:, :, 0].T
        return [codebook.table() @ projection for codebook in self.codebooks]


class CodebookGroups(nn.Module):
    """Semantic and acoustic codebooks. The projection is linear, so entries are projected before they are summed."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.codebook_size = config.codebook_size
        self.rvq_first = CodebookGroup(config, config.num_semantic_quantizers)
        self.rvq_rest = CodebookGroup(config, config.num_quantizers - config.num_semantic_quantizers)

    def forward(self, codes: Tensor) -> Tensor:
        """Return the sum of the entries, [B, frames, codebook_dim], for codes [B, frames, num_quantizers] in range."""
        tables = [*self.rvq_first.tables(), *self.rvq_rest.tables()]
        offsets = torch.arange(len(tables), device=codes.device) * self.codebook_size
        return F.embedding(codes + offsets, torch.cat(tables)).sum(dim=2)


class WindowedAttention(nn.Module):
    """Causal self-attention over a window: each frame and the `window - 1` frames before it."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.head_dim = size
        self.grouped = heads != kv_heads
        self.q_proj = nn.Linear(config.hidden_size, heads * size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads * size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads * size, bias=config.attention_bias)
        self.o_proj = nn.Linear(heads * size, config.hidden_size, bias=config.attention_bias)

    def forward(self, x: Tensor, *, mask: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """[B, T, hidden] -> [B, T, hidden]."""
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, rotary), rotate(k, rotary)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=self.grouped)
        out: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return out


class WindowedLayer(nn.Module):
    """Transformer layer: attention and MLP, each preceded by a norm and followed by a per-channel scale."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = WindowedAttention(config)
        self.self_attn_layer_scale = LayerScale(config.hidden_size)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        self.mlp_layer_scale = LayerScale(config.hidden_size)

    def forward(self, x: Tensor, *, mask: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """[B, T, hidden] -> [B, T, hidden]."""
        y = self.self_attn(self.input_layernorm(x), mask=mask, rotary=rotary)
        x = x + self.self_attn_layer_scale(y)
        out: Tensor = x + self.mlp_layer_scale(self.mlp(self.post_attention_layernorm(x)))
        return out


class WindowedTransformer(nn.Module):
    """Transformer layers between an input and an output projection."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.input_proj = nn.Linear(config.latent_dim, config.hidden_size)
        self.layers = nn.ModuleList(WindowedLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.output_proj = nn.Linear(config.hidden_size, config.latent_dim)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, latent] -> [B, T, latent]."""
        x = self.input_proj(x)
        positions = torch.arange(x.shape[1], device=x.device)[None]
        back = positions.T - positions  # distance from a query back to a key
        mask = (back >= 0) & (back < self.config.sliding_window)
        rotary = rotary_tables(positions, head_dim=self.config.head_dim, theta=self.config.rope_theta, dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, mask=mask, rotary=rotary)
        out: Tensor = self.output_proj(self.norm(x))
        return out


class CausalConv1d(nn.Module):
    """Stride-1 convolution over [B, channels, time], left-padded with silence."""

    def __init__(
        self, in_channels: int, out_channels: int, *, kernel_size: int, dilation: int = 1, groups: int = 1
    ) -> None:
        super().__init__()
        self.conv = nn.Conv1d(in_channels, out_channels, kernel_size, dilation=dilation, groups=groups)
        self.context = (kernel_size - 1) * dilation

    def forward(self, x: Tensor) -> Tensor:
        """[B, in, time] -> [B, out, time]."""
        out: Tensor = self.conv(F.pad(x, (self.context, 0)))
        return out


class CausalConvTranspose1d(nn.Module):
    """Upsampling convolution whose kernel spans one or two strides.

    Each input step produces `stride` samples. A longer kernel also adds to the `stride` samples of the next step.
    """

    def __init__(self, in_channels: int, out_channels: int, *, kernel_size: int, stride: int) -> None:
        super().__init__()
        assert kernel_size in (stride, 2 * stride), (kernel_size, stride)
        self.conv = nn.ConvTranspose1d(in_channels, out_channels, kernel_size, stride=stride)
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """[B, in, time] -> [B, out, stride * time]."""
        weight, bias = self.conv.weight, self.conv.bias
        assert bias is not None
        # One matrix product is many times faster on a CPU than torch's transposed convolution of a few steps.
        product = x.transpose(1, 2) @ weight.flatten(1)  # [B, time, out * kernel]
        y = product.view(*product.shape[:2], *weight.shape[1:]).transpose(1, 2)  # [B, out, time, kernel]
        if y.shape[3] > self.stride:
            y = y[..., : self.stride] + F.pad(y[:, :, :-1, self.stride :], (0, 0, 1, 0))
        return (y + bias[:, None, None]).flatten(2)


class UnfoldedSnake(nn.Module):
    """x + sin(x * exp(alpha))^2 / exp(beta)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(channels))
        self.beta = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """[B, channels, time] -> [B, channels, time]."""
        squared_sine = (x * self.alpha.exp()[:, None]).sin().square()
        return torch.addcmul(x, squared_sine, 1.0 / (self.beta.exp()[:, None] + 1e-9))


class ConvNeXtBlock(nn.Module):
    """Depthwise causal convolution and a two-layer MLP over channels, added to the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.dwconv = CausalConv1d(channels, channels, kernel_size=_KERNEL_SIZE, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.pwconv1 = nn.Linear(channels, _EXPANSION * channels)
        self.pwconv2 = nn.Linear(_EXPANSION * channels, channels)
        self.gamma = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """[B, channels, time] -> [B, channels, time]."""
        y = self.norm(self.dwconv(x).transpose(1, 2))
        y = self.gamma * self.pwconv2(F.gelu(self.pwconv1(y)))
        out: Tensor = x + y.transpose(1, 2)
        return out


class ResidualUnit(nn.Module):
    """Dilated convolution and pointwise convolution, each after a snake activation, added to the input."""

    def __init__(self, channels: int, *, dilation: int) -> None:
        super().__init__()
        self.act1 = UnfoldedSnake(channels)
        self.conv1 = CausalConv1d(channels, channels, kernel_size=_KERNEL_SIZE, dilation=dilation)
        self.act2 = UnfoldedSnake(channels)
        self.conv2 = CausalConv1d(channels, channels, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, channels, time] -> [B, channels, time]."""
        y = self.conv1(self.act1(x))
        out: Tensor = x + self.conv2(self.act2(y))
        return out


class UpsamplingBlock(nn.Module):
    """Snake activation, upsampling by `stride`, and three residual units."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            UnfoldedSnake(in_channels),
            CausalConvTranspose1d(in_channels, out_channels, kernel_size=2 * stride, stride=stride),
            *(ResidualUnit(out_channels, dilation=dilation) for dilation in RESIDUAL_DILATIONS),
        )

    def forward(self, x: Tensor) -> Tensor:
        """[B, in, time] -> [B, out, stride * time]."""
        out: Tensor = self.block(x)
        return out


class DecoderNetwork(nn.Module):
    """Decoder network whose layer names match the checkpoint's, minus the "decoder." prefix."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.quantizer = CodebookGroups(config)
        self.pre_conv = CausalConv1d(config.codebook_dim, config.latent_dim, kernel_size=3)
        self.pre_transformer = WindowedTransformer(config)
        self.upsample = nn.ModuleList(_upsampling_stage(config, ratio) for ratio in config.upsampling_ratios)
        self.decoder = nn.Sequential(*_waveform_stages(config))

    @classmethod
    def load(cls, directory: Path, *, device: torch.device | str = "cpu") -> Self:
        """Load the network from `directory`, the checkpoint's `speech_tokenizer` folder. Raises CheckpointError."""
        config = SpeechTokenizerConfig.load(directory)
        with without_values():
            network = cls(config.decoder)
        load_strict(network, directory, prefix="decoder.", dtype=torch.float32, device=device)
        return network

    def forward(self, codes: Tensor) -> Tensor:
        """Return samples [B, frames * frame_samples] in [-1, 1] for codes [B, frames, num_quantizers] int64.

        TF32 is disabled, because it would reduce the SNR of convolutions to 34 dB on stressed weights.
        """
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            return self.synthesize(self.quantizer(codes)).clamp(-1, 1)

    def synthesize(self, x: Tensor) -> Tensor:
        """Return unbounded samples [B, frames * frame_samples] for quantized latents [B, frames, codebook_dim]."""
        x = self.pre_conv(x.transpose(1, 2))
        x = self.pre_transformer(x.transpose(1, 2)).transpose(1, 2)
        for stage in self.upsample:
            x = stage(x)
        waveform: Tensor = self.decoder(x)
        return waveform.squeeze(1)


def _upsampling_stage(config: DecoderConfig, ratio: int) -> nn.Sequential:
    channels = config.latent_dim
    return nn.Sequential(
        CausalConvTranspose1d(channels, channels, kernel_size=ratio, stride=ratio), ConvNeXtBlock(channels)
    )


def _waveform_stages(config: DecoderConfig) -> list[nn.Module]:
    stages: list[nn.Module] = [CausalConv1d(config.latent_dim, config.decoder_dim, kernel_size=7)]
    channels = config.decoder_dim
    for stride in config.upsample_rates:
        stages.append(UpsamplingBlock(channels, channels // 2, stride=stride))
        channels //= 2
    return [*stages, UnfoldedSnake(channels), CausalConv1d(channels, 1, kernel_size=7)]


@dataclass(frozen=True, slots=True)
class Largest:
    """Largest input or output value of a layer."""

    value: float
    layer: str

    def __str__(self) -> str:
        if not isfinite(self.value):
            return f"{self.layer} yields NaN or infinity in float32: the weights are damaged"
        return f"the largest activation is {self.value:.4g}, at {self.layer} (limit of float16: 65,504)"


@torch.inference_mode()
def largest_activation(network: DecoderNetwork, progress: Callable[[int, int], None]) -> Largest:
    """Find the largest value over every code of every codebook. `progress` gets the finished and total counts."""
    codes, largest = every_code(network.config), Largest(0.0, "none")
    device = next(network.parameters()).device
    with _observed(network) as found:
        for start in range(0, len(codes), _BATCH):
            network(codes[start : start + _BATCH].to(device))
            progress(min(start + _BATCH, len(codes)), len(codes))
    for layer, value in found.items():
        if not value <= largest.value:  # also true for NaN
            largest = Largest(value if isfinite(value) else inf, layer)
        if not isfinite(largest.value):
            break
    return largest


@contextmanager
def _observed(network: nn.Module) -> Iterator[dict[str, float]]:
    """Within this context, record each layer's largest input or output value, by name; NaN if there is one."""
    found: dict[str, float] = {}

    def watch(name: str) -> Callable[..., None]:
        def note(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            numbers = [tensor for tensor in (*inputs, output) if tensor.is_floating_point()]
            most = torch.stack([torch.linalg.vector_norm(tensor, inf) for tensor in numbers]).max()
            found[name] = max(float(most), found.get(name, 0.0), key=lambda value: (value != value, value))

        return note

    layers = ((name, module) for name, module in network.named_modules() if not list(module.children()))
    handles = [module.register_forward_hook(watch(name)) for name, module in layers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
