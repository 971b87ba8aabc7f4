"""The decoder's weights in the form that serving multiplies with: rows of channels, one product for each layer.

Time runs along rows ([B, time, channels]), so that a convolution is a matrix product whose inner dimension is (tap,
channel), and a transposed convolution one whose outputs are (sample of the step, channel). Everything that is constant
is folded in: norm weights, layer scales and codebook projections, and half of every snake: with h = amplitude / 2,

    x + amplitude * sin(f x)^2  =  h + [x - h cos(2 f x)]

so the next layer takes the bracket and has h in its bias. What a stream heard before it began, zero, is then -h.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from deployments.codec.config import DecoderConfig
from deployments.codec.layers import CausalConv1d, CausalConvTranspose1d, ConvNeXtBlock, ResidualUnit, Snake
from deployments.codec.transformer import TransformerLayer

if TYPE_CHECKING:
    from deployments.codec.decoder import DecoderNetwork

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Wave:
    """The part of a snake that is left: x - half * cos(double * x), per channel."""

    double: Tensor  # [channels], twice the frequency
    half: Tensor  # [channels], half the amplitude


@dataclass(frozen=True, slots=True)
class Conv:
    """A causal convolution of rows; `upsampling` output rows for each input row, from this row and those before it."""

    weight: Tensor  # [taps, in, upsampling * out]
    bias: Tensor  # [upsampling * out]
    dilation: int
    upsampling: int
    silence: Tensor  # [in]: an input row before the stream began

    @property
    def context(self) -> int:
        """Input rows that the first output row needs from before."""
        return (self.weight.shape[0] - 1) * self.dilation


@dataclass(frozen=True, slots=True)
class Linear:
    """Rows times weight plus bias."""

    weight: Tensor  # [in, out]
    bias: Tensor | None  # [out]


@dataclass(frozen=True, slots=True)
class Layer:
    """A transformer layer: norms are root mean square only, their weights and the layer scales are folded in."""

    qkv: Linear
    output: Linear
    gate: Linear
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class ConvNeXt:
    """Depthwise convolution, normalisation to mean 0 and deviation 1, then a perceptron that is added to the input."""

    taps: Tensor  # [taps, channels]
    bias: Tensor  # [channels]
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Unit:
    """A residual unit: x + pointwise(wave(dilated(wave(x))))."""

    first: Wave
    dilated: Conv
    second: Wave
    pointwise: Conv


@dataclass(frozen=True, slots=True)
class Block:
    """Wave, upsampling and residual units."""

    wave: Wave
    upsample: Conv
    units: tuple[Unit, ...]


@dataclass(frozen=True, slots=True)
class FoldedDecoder:
    """All of it, in the order of computation."""

    config: DecoderConfig
    tables: Tensor  # [num_quantizers * codebook_size, codebook_dim]
    offsets: Tensor  # [num_quantizers] int64
    pre_conv: Conv
    input_proj: Linear
    layers: tuple[Layer, ...]
    output_proj: Linear  # behind a norm
    stages: tuple[tuple[Conv, ConvNeXt], ...]
    first_conv: Conv
    blocks: tuple[Block, ...]
    last_wave: Wave
    last_conv: Conv


@torch.no_grad()
def fold(network: "DecoderNetwork") -> FoldedDecoder:
    """Fold a loaded and prepared network, in float64; the result is float32 on the network's device."""
    config = network.config
    transformer = network.pre_transformer
    folded = FoldedDecoder(
        config=config,
        tables=network.quantizer.tables,
        offsets=network.quantizer.offsets,
        pre_conv=_conv(network.pre_conv),
        input_proj=_linear(transformer.input_proj),
        layers=tuple(_layer(layer) for layer in transformer.layers),
        output_proj=_linear(transformer.output_proj, inner=transformer.norm.weight),
        stages=tuple((_transposed(up), _convnext(block)) for up, block in map(_children, network.upsample)),
        first_conv=_conv(network.decoder[0]),
        blocks=tuple(_block(*_children(layer.block)) for layer in network.decoder[1:-2]),
        last_wave=_wave(network.decoder[-2]),
        last_conv=_conv(network.decoder[-1], behind=network.decoder[-2]),
    )
    return map_tensors(folded, lambda tensor: tensor.float().contiguous() if tensor.is_floating_point() else tensor)


def map_tensors(value: T, change: Callable[[Tensor], Tensor]) -> T:
    """A copy of a nest of the dataclasses above with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)  # type: ignore[return-value]
    if isinstance(value, tuple):
        return tuple(map_tensors(item, change) for item in value)  # type: ignore[return-value]
    if is_dataclass(value) and not isinstance(value, DecoderConfig):
        changed = {field.name: map_tensors(getattr(value, field.name), change) for field in fields(value)}
        return replace(value, **changed)  # type: ignore[type-var]
    return value


def _wave(snake: Snake | nn.Module) -> Wave:
    assert isinstance(snake, Snake)
    double = 2 * snake.alpha.double().exp()
    half = 0.5 / (snake.beta.double().exp() + 1e-9)
    return Wave(double, half)


def _conv(layer: CausalConv1d | nn.Module, *, behind: Snake | nn.Module | None = None) -> Conv:
    assert isinstance(layer, CausalConv1d)
    assert layer.conv.bias is not None
    weight = layer.conv.weight.double().permute(2, 1, 0)  # [taps, in, out]
    return _shifted(weight, layer.conv.bias.double(), layer.conv.dilation[0], upsampling=1, behind=behind)


def _transposed(layer: CausalConvTranspose1d | nn.Module, *, behind: Snake | nn.Module | None = None) -> Conv:
    """Sample s of step t is made of x[t] through kernel s and of x[t - 1] through kernel s + stride."""
    assert isinstance(layer, CausalConvTranspose1d)
    assert layer.conv.bias is not None
    weight, stride = layer.conv.weight.double(), layer.stride  # [in, out, kernel]
    taps = weight.view(*weight.shape[:2], -1, stride).permute(2, 0, 3, 1).flatten(2).flip(0)  # [taps, in, stride * out]
    bias = layer.conv.bias.double().repeat(stride)
    return _shifted(taps, bias, 1, upsampling=stride, behind=behind)


def _shifted(weight: Tensor, bias: Tensor, dilation: int, *, upsampling: int, behind: Snake | nn.Module | None) -> Conv:
    half = weight.new_zeros(weight.shape[1]) if behind is None else _wave(behind).half
    return Conv(weight, bias + (half @ weight).sum(0), dilation, upsampling, silence=-half)


def _linear(layer: nn.Linear, *, inner: Tensor | None = None, outer: Tensor | None = None) -> Linear:
    """`inner` scales the inputs, `outer` the outputs."""
    weight = layer.weight.double().T
    bias = None if layer.bias is None else layer.bias.double()
    if inner is not None:
        weight = inner.double()[:, None] * weight
    if outer is not None:
        weight, bias = weight * outer.double(), None if bias is None else bias * outer.double()
    return Linear(weight, bias)


def _layer(layer: TransformerLayer | nn.Module) -> Layer:
    assert isinstance(layer, TransformerLayer)
    attention, norm = layer.self_attn, layer.input_layernorm.weight
    parts = [_linear(projection, inner=norm) for projection in (attention.q_proj, attention.k_proj, attention.v_proj)]
    biases = [part.bias for part in parts if part.bias is not None]
    qkv = Linear(torch.cat([part.weight for part in parts], dim=1), torch.cat(biases) if biases else None)
    norm = layer.post_attention_layernorm.weight
    return Layer(
        qkv=qkv,
        output=_linear(attention.o_proj, outer=layer.self_attn_layer_scale.scale),
        gate=_linear(layer.mlp.gate_proj, inner=norm),
        up=_linear(layer.mlp.up_proj, inner=norm),
        down=_linear(layer.mlp.down_proj, outer=layer.mlp_layer_scale.scale),
    )


def _convnext(block: ConvNeXtBlock | nn.Module) -> ConvNeXt:
    assert isinstance(block, ConvNeXtBlock)
    conv = block.dwconv.conv
    assert conv.bias is not None
    weight, shift = block.pwconv1.weight.double(), block.norm.bias.double()
    up = _linear(block.pwconv1, inner=block.norm.weight)
    assert up.bias is not None
    up = Linear(up.weight, up.bias + weight @ shift)
    return ConvNeXt(conv.weight.double()[:, 0].T, conv.bias.double(), up, _linear(block.pwconv2, outer=block.gamma))


def _block(snake: nn.Module, upsample: nn.Module, *units: nn.Module) -> Block:
    return Block(_wave(snake), _transposed(upsample, behind=snake), tuple(_unit(unit) for unit in units))


def _children(stage: object) -> list[nn.Module]:
    assert isinstance(stage, nn.ModuleList)
    return list(stage)


def _unit(unit: ResidualUnit | nn.Module) -> Unit:
    assert isinstance(unit, ResidualUnit)
    return Unit(
        _wave(unit.act1),
        _conv(unit.conv1, behind=unit.act1),
        _wave(unit.act2),
        _conv(unit.conv2, behind=unit.act2),
    )
