"""Codec encoder (Mimi): converts a recording to the codes that in-context voice cloning passes to the talker."""

from collections import OrderedDict
from math import ceil
from pathlib import Path
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor, nn

from deployments.codec.codec_config import EncoderConfig, SpeechTokenizerConfig
from deployments.codec.rotary import rotary_tables, rotate
from deployments.protocol import Codes
from deployments.weights.checkpoint import load_strict, without_values

_MIN_USAGE = 1e-5


class LayerScale(nn.Module):
    """Learned scale factor per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """[..., channels] -> [..., channels]."""
        return self.scale * x


class StridedConv1d(nn.Module):
    """Causal convolution of a recording whose length is a multiple of the stride."""

    def __init__(
        self,
        channels: tuple[int, int],
        kernel_size: int,
        *,
        stride: int = 1,
        dilation: int = 1,
        bias: bool = True,
        padding: str = "constant",
    ) -> None:
        super().__init__()
        self.conv = nn.Conv1d(*channels, kernel_size, stride=stride, dilation=dilation, bias=bias)
        self.stride = stride
        self.left = (kernel_size - 1) * dilation + 1 - stride
        self.padding = padding

    def forward(self, x: Tensor) -> Tensor:
        """[B, in, time] -> [B, out, time / stride]."""
        out: Tensor = self.conv(F.pad(x, (self.left, 0), mode=self.padding))
        return out


class ResidualBlock(nn.Module):
    """Dilated and pointwise convolution with a bottleneck, added to the input."""

    def __init__(self, config: EncoderConfig, channels: int, *, dilation: int) -> None:
        super().__init__()
        inner = channels // config.compress
        self.block = nn.Sequential(
            nn.ELU(),
            StridedConv1d((channels, inner), config.residual_kernel_size, dilation=dilation),
            nn.ELU(),
            StridedConv1d((inner, channels), 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """[B, channels, time] -> [B, channels, time]."""
        out: Tensor = x + self.block(x)
        return out


def convolutional_encoder(config: EncoderConfig) -> nn.Sequential:
    """Return residual blocks and strided convolutions: [B, audio_channels, samples] -> [B, hidden, steps]."""
    channels = config.num_filters
    layers: list[nn.Module] = [StridedConv1d((config.audio_channels, channels), config.kernel_size)]
    for ratio in reversed(config.upsampling_ratios):  # the names follow the decoder's order
        layers += [
            ResidualBlock(config, channels, dilation=config.dilation_growth_rate**depth)
            for depth in range(config.num_residual_layers)
        ]
        layers += [nn.ELU(), StridedConv1d((channels, 2 * channels), 2 * ratio, stride=ratio)]
        channels *= 2
    layers += [nn.ELU(), StridedConv1d((channels, config.hidden_size), config.last_kernel_size)]
    return nn.Sequential(OrderedDict(layers=nn.Sequential(*layers)))


class EncoderAttention(nn.Module):
    """Causal attention to all past steps, as in the official package without flash-attn. flash-attn adds a window."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        inner = config.num_attention_heads * config.head_dim
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """[B, T, hidden] -> [B, T, hidden]."""
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(rotate(q, rotary), rotate(k, rotary), v, is_causal=True)
        out: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return out


class TransformerLayer(nn.Module):
    """Attention and MLP, each preceded by a norm, scaled per channel and added to the input."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn = EncoderAttention(config)
        self.self_attn_layer_scale = LayerScale(config.hidden_size)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        fc1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        fc2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.mlp = nn.Sequential(OrderedDict(fc1=fc1, gelu=nn.GELU(), fc2=fc2))
        self.mlp_layer_scale = LayerScale(config.hidden_size)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """[B, T, hidden] -> [B, T, hidden]."""
        x = x + self.self_attn_layer_scale(self.self_attn(self.input_layernorm(x), rotary))
        out: Tensor = x + self.mlp_layer_scale(self.mlp(self.post_attention_layernorm(x)))
        return out


class Codebook(nn.Module):
    """Codebook whose entries are exponential moving averages from training."""

    cluster_usage: Tensor  # [size]
    embed_sum: Tensor  # [size, channels]

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.register_buffer("initialized", torch.ones(1))  # training flag, kept to make written checkpoints complete
        self.register_buffer("cluster_usage", torch.ones(config.codebook_size))
        self.register_buffer("embed_sum", torch.zeros(config.codebook_size, config.codebook_dim))

    @property
    def entries(self) -> Tensor:
        """Codebook entries [size, channels]."""
        return self.embed_sum / self.cluster_usage.clamp(min=_MIN_USAGE)[:, None]

    def nearest(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return index [T] and value [T, channels] of the entry nearest to each row of x [T, channels]."""
        table = self.entries
        indices = torch.cdist(x[None], table[None])[0].argmin(dim=-1)
        return indices, table[indices]


class ResidualVectorQuantizer(nn.Module):
    """Codebooks that each quantize the previous ones' residual. The output projection is used only in training."""

    def __init__(self, config: EncoderConfig, num_quantizers: int) -> None:
        super().__init__()
        inner = config.vector_quantization_hidden_dimension
        self.projected = inner != config.hidden_size
        if self.projected:
            self.input_proj = nn.Conv1d(config.hidden_size, inner, 1, bias=False)
            self.output_proj = nn.Conv1d(inner, config.hidden_size, 1, bias=False)
        self.layers = nn.ModuleList(nn.ModuleDict({"codebook": Codebook(config)}) for _ in range(num_quantizers))

    def encode(self, x: Tensor, num_quantizers: int) -> list[Tensor]:
        """Return the codes [T] of the first `num_quantizers` codebooks for x [1, hidden_size, T]."""
        residual = (self.input_proj(x) if self.projected else x)[0].T
        codes = []
        for layer in list(self.layers)[:num_quantizers]:
            codebook = layer.get_submodule("codebook")
            assert isinstance(codebook, Codebook)
            indices, values = codebook.nearest(residual)
            residual = residual - values
            codes.append(indices)
        return codes


class SplitQuantizer(nn.Module):
    """Semantic and acoustic codebooks. The checkpoint has more acoustic codebooks than the talker uses."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.num_semantic = config.num_semantic_quantizers
        self.semantic_residual_vector_quantizer = ResidualVectorQuantizer(config, self.num_semantic)
        self.acoustic_residual_vector_quantizer = ResidualVectorQuantizer(
            config, config.num_quantizers - self.num_semantic
        )

    def encode(self, x: Tensor, num_quantizers: int) -> Tensor:
        """Return the codes [T, num_quantizers] for x [1, hidden_size, T]."""
        semantic = self.semantic_residual_vector_quantizer.encode(x, self.num_semantic)
        acoustic = self.acoustic_residual_vector_quantizer.encode(x, num_quantizers - self.num_semantic)
        return torch.stack([*semantic, *acoustic], dim=1)


class EncoderNetwork(nn.Module):
    """Encoder layers whose names match the checkpoint's, minus the "encoder." prefix."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config, stride = config, config.downsample_stride
        self.encoder = convolutional_encoder(config)
        layers = nn.ModuleList(TransformerLayer(config) for _ in range(config.num_hidden_layers))
        self.encoder_transformer = nn.ModuleDict({"layers": layers})  # without a final norm
        self.downsample = StridedConv1d(
            (config.hidden_size, config.hidden_size), 2 * stride, stride=stride, bias=False, padding="replicate"
        )
        self.quantizer = SplitQuantizer(config)

    def forward(self, audio: Tensor, num_samples: Tensor, num_quantizers: int) -> Tensor:
        """Return the codes [samples / frame_samples, num_quantizers] of the complete frames of `audio` [samples].

        The recording has `num_samples` (int64 scalar) samples, followed by zeros. Codes after its frames are invalid.
        Every layer is padded as it would be without the extra zeros, so a captured graph can encode any length.
        """
        config, x, length = self.config, audio[None, None], num_samples
        for layer in self.encoder.get_submodule("layers").children():
            if isinstance(layer, StridedConv1d) and layer.stride > 1:
                x = torch.where(torch.arange(x.shape[2], device=x.device) < length, x, 0)
                length = (length + layer.stride - 1) // layer.stride
            x = layer(x)
        x = x.transpose(1, 2)
        steps = torch.arange(x.shape[1], device=x.device)
        rotary = rotary_tables(steps[None], head_dim=config.head_dim, theta=config.rope_theta, dtype=x.dtype)
        for layer in self.encoder_transformer["layers"].children():
            x = layer(x, rotary)
        repeated = x.transpose(1, 2).index_select(2, torch.minimum(steps, length - 1))
        return self.quantizer.encode(self.downsample(repeated), num_quantizers)


class CodecEncoder:
    """Loaded encoder in float32, because selecting the nearest codebook entry is sensitive to rounding."""

    def __init__(self, network: EncoderNetwork, *, num_quantizers: int, frame_samples: int) -> None:
        self.network = network.requires_grad_(requires_grad=False).eval()
        self.num_quantizers = num_quantizers
        self.frame_samples = frame_samples

    @classmethod
    def load(cls, directory: Path, *, device: torch.device | str = "cpu") -> Self:
        """Load `directory`, the checkpoint's `speech_tokenizer` folder. Raises CheckpointError."""
        config = SpeechTokenizerConfig.load(directory)
        with without_values():
            network = EncoderNetwork(config.encoder)
        load_strict(
            network,
            directory,
            prefix="encoder.",
            dtype=torch.float32,
            device=device,
            ignore=("*.codebook.initialized",),
        )
        return cls(
            network, num_quantizers=config.encoder_valid_num_quantizers, frame_samples=config.encoder.frame_samples
        )

    @torch.inference_mode()
    def encode(self, audio: NDArray[np.float32]) -> Codes:
        """Return codes [ceil(samples / frame_samples), num_code_groups] for a mono recording at the model's rate."""
        assert audio.ndim == 1, audio.shape
        samples = torch.zeros(ceil(len(audio) / self.frame_samples) * self.frame_samples)
        samples[: len(audio)] = torch.from_numpy(np.ascontiguousarray(audio, dtype=np.float32))
        samples = samples.to(self.network.downsample.conv.weight.device)
        return self.codes(samples, torch.tensor(len(audio), device=samples.device)).cpu().numpy()

    @torch.inference_mode()
    def codes(self, audio: Tensor, num_samples: Tensor) -> Tensor:
        """Return the int16 codes of `EncoderNetwork.forward`, without waiting for the device."""
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            codes: Tensor = self.network(audio, num_samples, self.num_quantizers)
        return codes.to(torch.int16)
