"""Transformer of the codec decoder. The last keys and values of its sliding window are part of a stream's state."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from deployments.codec.config import DecoderConfig
from deployments.codec.state import BatchState, StateLayout


class LayerScale(nn.Module):
    """A factor per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """[..., channels] -> [..., channels]."""
        return self.scale * x


class RMSNorm(nn.Module):
    """Root mean square normalisation, computed in float32."""

    def __init__(self, channels: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., channels] -> [..., channels]."""
        exact = x.float()
        exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * exact.to(x.dtype)


def rotary_tables(positions: Tensor, *, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each [B, 1, T, head_dim], of absolute positions [B, T]."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[:, None, :, None].float() / theta**exponents
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding of [B, heads, T, head_dim], the two halves of a head paired."""
    cos, sin = tables
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Attention to this call's frames and to the `window - 1` frames before them."""

    def __init__(self, layout: StateLayout, config: DecoderConfig) -> None:
        super().__init__()
        heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.head_dim = size
        self.history = config.sliding_window - 1
        self.grouped = heads != kv_heads
        self.q_proj = nn.Linear(config.hidden_size, heads * size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads * size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads * size, bias=config.attention_bias)
        self.o_proj = nn.Linear(heads * size, config.hidden_size, bias=config.attention_bias)
        self.slot = layout.reserve(2, kv_heads, self.history, size)

    def forward(self, x: Tensor, state: BatchState, *, mask: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """[B, T, hidden] -> [B, T, hidden]."""
        q = rotate(self._heads(self.q_proj(x)), rotary)
        k = rotate(self._heads(self.k_proj(x)), rotary)
        v = self._heads(self.v_proj(x))
        k, v = torch.cat((state.tensors[self.slot], torch.stack((k, v), dim=1)), dim=3).unbind(1)
        state.tensors[self.slot] = torch.stack((k[:, :, -self.history :], v[:, :, -self.history :]), dim=1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=self.grouped)
        out: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:  # [B, T, heads * head_dim] -> [B, heads, T, head_dim]
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)


class FeedForward(nn.Module):
    """Gated SiLU perceptron."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, hidden] -> [B, T, hidden]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class TransformerLayer(nn.Module):
    """Attention and perceptron, each behind a norm and scaled per channel before it is added."""

    def __init__(self, layout: StateLayout, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(layout, config)
        self.self_attn_layer_scale = LayerScale(config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = FeedForward(config)
        self.mlp_layer_scale = LayerScale(config.hidden_size)

    def forward(self, x: Tensor, state: BatchState, *, mask: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """[B, T, hidden] -> [B, T, hidden]."""
        y = self.self_attn(self.input_layernorm(x), state, mask=mask, rotary=rotary)
        x = x + self.self_attn_layer_scale(y)
        out: Tensor = x + self.mlp_layer_scale(self.mlp(self.post_attention_layernorm(x)))
        return out


class Transformer(nn.Module):
    """Layers between projections, at the streams' absolute positions."""

    def __init__(self, layout: StateLayout, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.input_proj = nn.Linear(config.latent_dim, config.hidden_size)
        self.layers = nn.ModuleList(TransformerLayer(layout, config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.output_proj = nn.Linear(config.hidden_size, config.latent_dim)

    def forward(self, x: Tensor, state: BatchState) -> Tensor:
        """[B, T, latent] -> [B, T, latent]."""
        num_frames = x.shape[1]
        x = self.input_proj(x)
        mask = window_mask(state.positions, num_frames, window=self.config.sliding_window)
        positions = state.positions[:, None] + torch.arange(num_frames, device=x.device)
        rotary = rotary_tables(positions, head_dim=self.config.head_dim, theta=self.config.rope_theta, dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, state, mask=mask, rotary=rotary)
        out: Tensor = self.output_proj(self.norm(x))
        return out


def window_mask(positions: Tensor, num_frames: int, *, window: int) -> Tensor:
    """Which keys each new frame sees, [B, 1, num_frames, window - 1 + num_frames] bool.

    Key j is the frame at position - (window - 1) + j: the history is right-aligned, and empty before a stream began.
    """
    query = torch.arange(num_frames, device=positions.device)[:, None]
    key = torch.arange(window - 1 + num_frames, device=positions.device)
    in_window = (key >= query) & (key < query + window)
    exists = key >= window - 1 - positions[:, None]
    return (in_window & exists[:, None, :])[:, None]
