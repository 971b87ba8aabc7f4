"""Qwen3 decoder stack over rows.

A *row* is one position of one sequence. Rows of many sequences, from prompts and from decoding, run through the stack
together. The `Attend` callback stores keys and values and selects the rows to which a row attends. Source: the official
`modeling_qwen3_tts.py`. Its interleaved multi-axis RoPE has three equal positions, so it is plain rotate-half RoPE.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from deployments.talker.model.model_config import TransformerConfig

# Called with a layer's number, and its queries [rows, heads, head_dim], keys and values [rows, kv_heads, head_dim].
# Stores keys and values, and returns the attention output, shaped like the queries.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class RMSNorm(nn.Module):
    """RMSNorm in float32, cast back before multiplying by the weight, as in the official code."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return self.weight * F.rms_norm(x.float(), self.weight.shape, eps=self.eps).to(x.dtype)


class RotaryTable(nn.Module):
    """Cosines and sines of all positions, computed once at load, with the dtype and device of `like`."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: TransformerConfig, *, positions: int, like: Tensor) -> None:
        super().__init__()
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
        angles = torch.arange(positions).float()[:, None] / (config.rope_theta**exponents)[None]
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos().to(like), persistent=False)
        self.register_buffer("sin", angles.sin().to(like), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[rows] -> cosines and sines [rows, 1, head_dim]."""
        return self.cos[positions][:, None], self.sin[positions][:, None]


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Apply a rotary embedding to x [rows, heads, head_dim]."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def attend_rows(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Compute attention of queries [rows, heads, head_dim] over keys and values [rows, kv_heads, length, head_dim].

    `mask` [rows, 1, 1, length] is True where a row may attend; None allows all. On a CPU this uses plain matrix
    products, because the fused kernel rounds a row differently depending on the other rows.
    """
    if query.device.type != "cpu":
        return F.scaled_dot_product_attention(query[:, :, None], keys, values, attn_mask=mask, enable_gqa=True)[:, :, 0]
    num_rows, heads, head_dim = query.shape
    grouped = query.view(num_rows, keys.shape[1], heads // keys.shape[1], head_dim)
    scores = torch.matmul(grouped, keys.transpose(2, 3)) * head_dim**-0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.matmul(scores.softmax(-1), values).view(num_rows, heads, head_dim)


class Attention(nn.Module):
    """Grouped-query attention with per-head RMSNorm of queries and keys."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        hidden, head_dim = config.hidden_size, config.head_dim
        self.head_dim = head_dim
        self.q_proj = nn.Linear(hidden, config.num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * head_dim, hidden, bias=False)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend, *, layer: int) -> Tensor:
        """[rows, hidden] -> [rows, hidden]."""
        heads = (x.shape[0], -1, self.head_dim)
        query = rotate(self.q_norm(self.q_proj(x).view(heads)), rotation)
        key = rotate(self.k_norm(self.k_proj(x).view(heads)), rotation)
        attended = attend(layer, query, key, self.v_proj(x).view(heads))
        out: Tensor = self.o_proj(attended.reshape(x.shape[0], -1))
        return out


class GatedMLP(nn.Module):
    """Gated MLP with SiLU (SwiGLU)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    """Transformer layer with pre-norm attention and MLP, each with a residual connection."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend, *, layer: int) -> Tensor:
        """[rows, hidden] -> [rows, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), rotation, attend, layer=layer)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DecoderStack(nn.Module):
    """All of a decoder's layers, and the final norm."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """[rows, hidden] -> [rows, hidden] after the final norm."""
        for number, layer in enumerate(self.layers):
            x = layer(x, rotation, attend, layer=number)
        out: Tensor = self.norm(x)
        return out
