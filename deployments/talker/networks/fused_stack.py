"""Decoder stack for decoding steps: one new position per row, with five kernels per layer."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from deployments.talker.kernels.frame_attention import attend_frame, attend_frame_start
from deployments.talker.kernels.matmul import Activations, Product, like_rows, matmul, measure_squares, normalise
from deployments.talker.kernels.paged_attention import PagedBackend
from deployments.talker.kernels.qkv import HeadNorms, Heads
from deployments.talker.kernels.readings import AlignmentReader
from deployments.talker.model.layers import DecoderLayer, DecoderStack
from deployments.talker.model.model_config import TransformerConfig
from deployments.talker.state.batch_state import Context
from deployments.talker.state.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """A layer's matrices in the layout that the kernels expect."""

    qkv: Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden], input norm folded in
    out: Tensor  # [hidden, heads * head_dim]
    gate_up: Tensor  # [2 * intermediate, hidden], post-attention norm folded in
    down: Tensor  # [hidden, intermediate]
    norms: HeadNorms


@dataclass(frozen=True, slots=True)
class PackedStack:
    """Weights of a `DecoderStack` in the layout that the kernels expect. The kernels only read them."""

    config: TransformerConfig
    heads: Heads
    norm: Tensor  # [hidden], weight of the final norm
    layers: list[PackedLayer]

    @classmethod
    def pack_in_place(cls, stack: DecoderStack, config: TransformerConfig, *, positions: int) -> "PackedStack":
        """Fold the norms of `stack` into its matrices. `positions` is one more than the largest position used.

        `stack` still computes the same function. Its layers share the packed matrices, which are stored only once, and
        its folded norms are set to ones.
        """
        norm = stack.norm.weight.detach()
        cos, sin = rotations(config, positions, norm.device)
        layers = []
        for layer in stack.layers:
            assert isinstance(layer, DecoderLayer)
            layers.append(_pack(layer, cos, sin, config))
            # The packed matrices do not fit the freed ones well, and a small GPU has no room for the gaps.
            torch.cuda.empty_cache()
        return cls(config, Heads(config.num_heads, config.num_kv_heads, config.head_dim), norm, layers)


class FrameCache:
    """Keys and values for a frame's positions, [layers, rows, kv_heads, positions, head_dim]."""

    def __init__(self, config: TransformerConfig, *, num_rows: int, positions: int, like: Tensor) -> None:
        shape = (config.num_layers, num_rows, config.num_kv_heads, triton.next_power_of_2(positions), config.head_dim)
        self.keys = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.values = torch.zeros_like(self.keys)


class FusedStack:
    """Fused equivalent of a `DecoderStack` for one position per row. Not reentrant, because it owns its activations.

    If `pdl` is set, the order of launches matters. Each kernel may read early what kernels before its predecessor wrote
    (gpu/launch.py). If a kernel is moved, added or removed, another kernel may read data before it is written.
    test_launch_order.py detects such errors.
    """

    def __init__(self, weights: PackedStack, *, max_rows: int, pdl: bool = True) -> None:
        """Allocate activations. Concurrent stacks may share `weights`."""
        self.config, self.heads, self.layers, self.norm = weights.config, weights.heads, weights.layers, weights.norm
        self.pdl = pdl
        config, like = self.config, self.norm
        width = config.num_heads * config.head_dim
        self._qkv = like_rows(max_rows, width + 2 * config.num_kv_heads * config.head_dim, like)
        self._attended = torch.empty((max_rows, width), dtype=like.dtype, device=like.device)
        self._residual = like_rows(max_rows, config.hidden_size, like)
        self._inner = like_rows(max_rows, config.intermediate_size, like)
        self._input = like_rows(max_rows, config.hidden_size, like)
        self._out = torch.empty_like(self._residual.values)

    def talker_step(self, inputs: Tensor, context: Context, cache: KVCache, attend: PagedBackend,
                    reader: AlignmentReader | None = None) -> Tensor:  # fmt: skip
        """Run one position of each row over its paged context: [rows, hidden] -> [rows, hidden] after the final norm.

        `reader` reads the attention of its layer. The result is valid until the next call.
        """
        x = self.measured(inputs)
        for number, layer in enumerate(self.layers):
            qkv = self._project(layer, x)
            attended = attend(qkv.values, layer.norms, (cache.keys[number], cache.values[number]), context)
            if reader is not None and reader.layer == number:
                reader.read(qkv.values, layer.norms, cache.keys[number], context)
            x = self._finish_layer(layer, x, attended)
        out = self._out[: len(x.values)]
        normalise(x, self.norm, out, self.config.rms_norm_eps, pdl=self.pdl)
        return out

    def frame_start(self, x: Activations, cache: FrameCache) -> Activations:
        """Run positions 0 (first half of the rows of `x`) and 1 (second half) in one pass, without the final norm."""
        num_rows = len(x.values)
        for number, layer in enumerate(self.layers):
            qkv = self._project(layer, x)
            attended = self._attended[:num_rows]
            caches = cache.keys[number, : num_rows // 2], cache.values[number, : num_rows // 2]
            attend_frame_start(qkv.values, layer.norms, self.heads, caches, attended, pdl=self.pdl)
            x = self._finish_layer(layer, x, attended)
        return x

    def codebook_step(self, x: Activations, position: int, cache: FrameCache) -> Activations:
        """Run one position of a frame, without the final norm, which can be folded into the next product."""
        num_rows = len(x.values)
        for number, layer in enumerate(self.layers):
            qkv = self._project(layer, x)
            attended = self._attended[:num_rows]
            caches = cache.keys[number, :num_rows], cache.values[number, :num_rows]
            attend_frame(qkv.values, layer.norms, self.heads, caches, position, attended, pdl=self.pdl)
            x = self._finish_layer(layer, x, attended)
        return x

    def measured(self, values: Tensor) -> Activations:
        """Return activations for values [rows, hidden] from outside this stack, with the sums of their squares."""
        x = Activations(values, self._input.squares, 1)
        measure_squares(x)  # a plain launch, because the preceding kernel is not known
        return x

    def input_rows(self, num_rows: int) -> Activations:
        """Return the buffer for the stack's next input."""
        return self._first_rows(self._input, num_rows)

    def _project(self, layer: PackedLayer, x: Activations) -> Activations:
        qkv = self._first_rows(self._qkv, len(x.values))
        matmul(x, layer.qkv, qkv, Product(eps=self.config.rms_norm_eps, pdl=self.pdl))
        return qkv

    def _finish_layer(self, layer: PackedLayer, x: Activations, attended: Tensor) -> Activations:
        """Run the output projection and the MLP. Adds both to the residual stream, which the next layer normalizes."""
        num_rows = len(x.values)
        residual, inner = self._first_rows(self._residual, num_rows), self._first_rows(self._inner, num_rows)
        matmul(attended, layer.out, residual, Product(pdl=self.pdl), residual=x.values, leave_squares=True)
        matmul(residual, layer.gate_up, inner, Product(eps=self.config.rms_norm_eps, gated=True, pdl=self.pdl))
        matmul(inner, layer.down, residual, Product(pdl=self.pdl), residual=residual.values, leave_squares=True)
        return residual

    @staticmethod
    def _first_rows(x: Activations, num_rows: int) -> Activations:
        """Return the first rows, which share the squares of `x` but have their own `parts`, set by the next product."""
        return Activations(x.values[:num_rows], x.squares, x.parts)


def rotations(config: TransformerConfig, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [positions, head_dim / 2] float32."""
    exponents = torch.arange(0, config.head_dim, 2, device=device).double() / config.head_dim
    angles = torch.arange(positions, device=device).double()[:, None] / (config.rope_theta**exponents)[None]
    return angles.cos().float(), angles.sin().float()


def fold_norm(weight: Tensor, norm: Tensor) -> Tensor:
    """Return the matrix [n, k] whose product with a row equals the product of `weight` with row * `norm` [k]."""
    return (weight.float() * norm.float()).to(weight.dtype)


@torch.no_grad()
def _pack(layer: DecoderLayer, cos: Tensor, sin: Tensor, config: TransformerConfig) -> PackedLayer:
    """Pack a layer's weights. `layer` then reads the packed weights."""
    attention, mlp = layer.self_attn, layer.mlp
    qkv = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
    gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
    norms = HeadNorms(attention.q_norm.weight.detach(), attention.k_norm.weight.detach(), cos, sin, config.rms_norm_eps)
    packed = PackedLayer(
        qkv=fold_norm(qkv, layer.input_layernorm.weight),
        out=attention.o_proj.weight.clone(),  # where it was, it would keep the segment of freed matrices allocated
        gate_up=fold_norm(gate_up, layer.post_attention_layernorm.weight),
        down=mlp.down_proj.weight.detach(),
        norms=norms,
    )
    _share(layer, packed)
    return packed


def _share(layer: DecoderLayer, packed: PackedLayer) -> None:
    """Make the PyTorch layer, which runs later passes of long prompts, read the packed matrices."""
    attention, mlp = layer.self_attn, layer.mlp
    sizes = [len(linear.weight) for linear in (attention.q_proj, attention.k_proj, attention.v_proj)]
    shared = [*packed.qkv.split_with_sizes(sizes), packed.out, *packed.gate_up.chunk(2)]
    linears = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj, mlp.gate_proj, mlp.up_proj)
    for linear, weight in zip(linears, shared, strict=True):
        linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    for norm in (layer.input_layernorm, layer.post_attention_layernorm):
        norm.weight = torch.nn.Parameter(torch.ones_like(norm.weight), requires_grad=False)  # folded in
