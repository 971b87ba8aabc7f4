"""Conversion of the decoder's weights to the format used for serving: rows of channels, one product per layer.

Time runs along rows ([B, time, channels]). A convolution is then a matrix product with inner dimension (tap, channel),
and a transposed convolution is a product with outputs (sample of the step, channel). Norm weights, layer scales and
codebook projections are constant and are folded into the weights. Snakes are not folded. The constant in

    x + amplitude * sin(f x)^2  =  amplitude / 2 + [x - amplitude / 2 * cos(2 f x)]

could be folded into the next bias. However, a few channels of each trained decoder have a large amplitude. The bracket
then adds a small x to a large value, and x is lost when the sum is rounded to 16 bits.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from deployments.codec.codec_config import (
    CONTEXT,
    PRE_CONV_TAPS,
    RESIDUAL_DILATIONS,
    DecoderConfig,
    SpeechTokenizerConfig,
)
from deployments.weights.checkpoint import read_strict

_MIN_USAGE = 1e-5  # avoids division by zero for codebook entries never used in training
_EXPANSION = 4  # ratio of inner width to outer width of a ConvNeXt block's MLP

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Snake:
    """x + amplitude * sin(frequency * x)^2, per channel. If `frequency` is None, x is already scaled by it."""

    amplitude: Tensor  # [channels]
    frequency: Tensor | None  # [channels]


@dataclass(frozen=True, slots=True, eq=False)
class Conv:
    """Causal convolution over rows. Each input row, with the rows before it, yields `upsampling` output rows."""

    weight: Tensor  # [taps, in, upsampling * out]
    bias: Tensor  # [upsampling * out]
    dilation: int
    upsampling: int

    @property
    def channels(self) -> int:
        return self.weight.shape[1]

    @property
    def context(self) -> int:
        """Number of input rows before the first one that the first output row depends on."""
        return (self.weight.shape[0] - 1) * self.dilation


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """Product of rows with `weight`, plus `bias`."""

    weight: Tensor  # [in, out]
    bias: Tensor | None  # [out]


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """Transformer layer. Its norms only divide by the root mean square; norm weights and layer scales are folded in."""

    qkv: Linear
    output: Linear
    gate: Linear
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True, eq=False)
class ConvNeXt:
    """Depthwise convolution, normalization to mean 0 and deviation 1, then an MLP that is added to the input."""

    taps: Tensor  # [taps, channels]
    bias: Tensor  # [channels]
    up: Linear
    down: Linear

    @property
    def channels(self) -> int:
        return self.taps.shape[1]

    @property
    def context(self) -> int:
        return len(self.taps) - 1


@dataclass(frozen=True, slots=True)
class Unit:
    """Residual unit: x + pointwise(second(dilated(first(x))))."""

    first: Snake
    dilated: Conv
    second: Snake
    pointwise: Conv


@dataclass(frozen=True, slots=True)
class Block:
    """Residual units, a snake, and the convolution that leads to the next block, or to samples in the last block.

    Blocks begin with their units, so the first block has none. This order puts the layers with large weights first.
    """

    units: tuple[Unit, ...]
    snake: Snake
    conv: Conv

    @property
    def entry(self) -> Snake:
        """The first snake applied to the block's input."""
        return self.units[0].first if self.units else self.snake


@dataclass(frozen=True, slots=True)
class FoldedWeights:
    """All decoder layers, in order of computation."""

    config: DecoderConfig
    tables: Tensor  # [num_quantizers * codebook_size, codebook_dim]
    offsets: Tensor  # [num_quantizers] int64
    pre_conv: Conv
    input_proj: Linear
    layers: tuple[Layer, ...]
    output_proj: Linear  # its input is normalized
    stages: tuple[tuple[Conv, ConvNeXt], ...]
    first_conv: Conv
    blocks: tuple[Block, ...]

    @staticmethod
    def load(directory: Path, *, device: torch.device | str = "cpu") -> "FoldedWeights":
        """Load `directory`, the checkpoint's `speech_tokenizer` folder. Raises CheckpointError."""
        config = SpeechTokenizerConfig.load(directory).decoder
        return fold(read_strict(directory, tensor_shapes(config), prefix="decoder.", device=device), config)

    @property
    def remembering(self) -> Iterator[Conv | ConvNeXt]:
        """Layers that need input rows from previous calls."""
        yield self.pre_conv
        for upsample, convnext in self.stages:
            yield from (upsample, convnext) if upsample.context else (convnext,)
        yield self.first_conv
        for block in self.blocks:
            yield from (unit.dilated for unit in block.units)
            yield block.conv

    def rows_needed(self) -> dict[Conv, int]:
        """Return how many input rows of each convolution affect the last sample or any later sample.

        Includes the upsampling convolutions of stages and blocks, and the first convolution.
        """
        rows, needed = 1, dict[Conv, int]()
        for block in reversed(self.blocks):
            rows = -(-rows // block.conv.upsampling) + block.conv.context
            needed[block.conv] = rows = rows + sum(unit.dilated.context for unit in block.units)
        needed[self.first_conv] = rows = rows + self.first_conv.context
        for upsample, convnext in reversed(self.stages):
            needed[upsample] = rows = -(-(rows + convnext.context) // upsample.upsampling) + upsample.context
        return needed


@torch.no_grad()
def fold(tensors: Mapping[str, Tensor], config: DecoderConfig) -> FoldedWeights:
    """Fold a checkpoint's tensors, named without "decoder.", in float64. Returns float32 tensors on their device."""
    weights = _Weights(tensors)
    transformer = weights.at("pre_transformer")
    tables = _tables(weights.at("quantizer"), config)
    stages = [weights.at(f"upsample.{number}") for number in range(len(config.upsampling_ratios))]
    folded = FoldedWeights(
        config=config,
        tables=tables,
        offsets=torch.arange(config.num_quantizers, device=tables.device) * config.codebook_size,
        pre_conv=_conv(weights.at("pre_conv.conv")),
        input_proj=_linear(transformer.at("input_proj")),
        layers=tuple(_layer(transformer.at(f"layers.{number}")) for number in range(config.num_hidden_layers)),
        output_proj=_linear(transformer.at("output_proj"), inner=transformer["norm.weight"]),
        stages=tuple(
            (_transposed(stage.at("0.conv"), ratio), _convnext(stage.at("1")))
            for stage, ratio in zip(stages, config.upsampling_ratios, strict=True)
        ),
        first_conv=_conv(weights.at("decoder.0.conv")),
        blocks=tuple(_blocks(weights.at("decoder"), config.upsample_rates)),
    )
    return map_tensors(folded, lambda tensor: tensor.float().contiguous() if tensor.is_floating_point() else tensor)


def tensor_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors that `fold` requires."""
    dim, latent, hidden, inner = config.codebook_dim, config.latent_dim, config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {}

    def vectors(size: int, *names: str) -> None:
        shapes.update(dict.fromkeys(names, (size,)))

    def product(name: str, *shape: int, bias: int = 0) -> None:
        shapes[f"{name}.weight"] = shape
        if bias:
            vectors(bias, f"{name}.bias")

    for group, count in _groups(config):
        product(f"quantizer.{group}.input_proj", dim // 2, dim, 1)  # used only in training
        product(f"quantizer.{group}.output_proj", dim, dim // 2, 1)
        for codebook in (f"quantizer.{group}.vq.layers.{number}._codebook" for number in range(count)):
            vectors(config.codebook_size, f"{codebook}.cluster_usage")
            shapes[f"{codebook}.embedding_sum"] = config.codebook_size, dim // 2
    product("pre_conv.conv", latent, dim, PRE_CONV_TAPS, bias=latent)
    product("pre_transformer.input_proj", hidden, latent, bias=hidden)
    for layer in (f"pre_transformer.layers.{number}" for number in range(config.num_hidden_layers)):
        for name, outs in (("q", heads), ("k", kv_heads), ("v", kv_heads), ("o", hidden)):
            ins = heads if name == "o" else hidden
            product(f"{layer}.self_attn.{name}_proj", outs, ins, bias=outs if config.attention_bias else 0)
        for name, outs, ins in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            product(f"{layer}.mlp.{name}_proj", outs, ins)
        vectors(hidden, f"{layer}.input_layernorm.weight", f"{layer}.post_attention_layernorm.weight")
        vectors(hidden, f"{layer}.self_attn_layer_scale.scale", f"{layer}.mlp_layer_scale.scale")
    vectors(hidden, "pre_transformer.norm.weight")
    product("pre_transformer.output_proj", latent, hidden, bias=latent)
    for number, ratio in enumerate(config.upsampling_ratios):
        product(f"upsample.{number}.0.conv", latent, latent, ratio, bias=latent)
        block = f"upsample.{number}.1"
        product(f"{block}.dwconv.conv", latent, 1, CONTEXT + 1, bias=latent)
        vectors(latent, f"{block}.norm.weight", f"{block}.norm.bias", f"{block}.gamma")
        product(f"{block}.pwconv1", _EXPANSION * latent, latent, bias=_EXPANSION * latent)
        product(f"{block}.pwconv2", latent, _EXPANSION * latent, bias=latent)
    channels = config.decoder_dim
    product("decoder.0.conv", channels, latent, CONTEXT + 1, bias=channels)
    for number, stride in enumerate(config.upsample_rates, start=1):
        block, before, channels = f"decoder.{number}.block", channels, channels // 2
        vectors(before, f"{block}.0.alpha", f"{block}.0.beta")
        product(f"{block}.1.conv", before, channels, 2 * stride, bias=channels)
        for unit in (f"{block}.{at}" for at, _ in enumerate(RESIDUAL_DILATIONS, start=2)):
            vectors(channels, *(f"{unit}.{act}.{name}" for act in ("act1", "act2") for name in ("alpha", "beta")))
            product(f"{unit}.conv1.conv", channels, channels, CONTEXT + 1, bias=channels)
            product(f"{unit}.conv2.conv", channels, channels, 1, bias=channels)
    last = len(config.upsample_rates) + 1
    vectors(channels, f"decoder.{last}.alpha", f"decoder.{last}.beta")
    product(f"decoder.{last + 1}.conv", 1, channels, CONTEXT + 1, bias=1)
    return shapes


def map_tensors(value: T, change: Callable[[Tensor], Tensor]) -> T:
    """Copy a structure of the dataclasses above, applying `change` to each tensor."""
    if isinstance(value, Tensor):
        return change(value)  # type: ignore[return-value]
    if isinstance(value, tuple):
        return tuple(map_tensors(item, change) for item in value)  # type: ignore[return-value]
    if is_dataclass(value) and not isinstance(value, DecoderConfig):
        changed = {field.name: map_tensors(getattr(value, field.name), change) for field in fields(value)}
        return replace(value, **changed)  # type: ignore[type-var]
    return value


def with_frequency(unit: Unit) -> Unit:
    """Return the unit with the frequency of its second snake folded into its dilated convolution."""
    amplitude, frequency = unit.second.amplitude, unit.second.frequency
    assert frequency is not None
    dilated, pointwise = unit.dilated, unit.pointwise
    return Unit(
        unit.first,
        replace(dilated, weight=dilated.weight * frequency, bias=dilated.bias * frequency),
        Snake(amplitude * frequency, None),
        replace(pointwise, weight=pointwise.weight / frequency[:, None]),
    )


class _Weights:
    """View of the tensors whose names begin with a prefix."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
        self._tensors, self._prefix = tensors, prefix

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._prefix + name].double()

    def at(self, name: str) -> "_Weights":
        return _Weights(self._tensors, f"{self._prefix}{name}.")

    @property
    def bias(self) -> Tensor | None:
        return self["bias"] if self._prefix + "bias" in self._tensors else None


def _tables(quantizer: _Weights, config: DecoderConfig) -> Tensor:
    groups = ((quantizer.at(name), number) for name, count in _groups(config) for number in range(count))
    return torch.cat([_entries(group, number) for group, number in groups])


def _groups(config: DecoderConfig) -> tuple[tuple[str, int], ...]:
    """Return the name of each group of codebooks, and the number of codebooks in the group."""
    semantic = config.num_semantic_quantizers
    return ("rvq_first", semantic), ("rvq_rest", config.num_quantizers - semantic)


def _entries(group: _Weights, number: int) -> Tensor:
    """Return a codebook's entries after its group's projection, [codebook_size, codebook_dim], computed in float32."""
    codebook = group.at(f"vq.layers.{number}._codebook")
    entries = codebook["embedding_sum"].float() / codebook["cluster_usage"].float().clamp(min=_MIN_USAGE)[:, None]
    return entries @ group["output_proj.weight"].float()[:, :, 0].T


def _snake(weights: _Weights) -> Snake:
    return Snake(amplitude=1 / (weights["beta"].exp() + 1e-9), frequency=weights["alpha"].exp())


def _conv(weights: _Weights, dilation: int = 1) -> Conv:
    return Conv(weights["weight"].permute(2, 1, 0), weights["bias"], dilation, upsampling=1)


def _transposed(weights: _Weights, stride: int) -> Conv:
    """Convert a transposed convolution. Sample s of step t uses kernel s on x[t] and kernel s + stride on x[t - 1]."""
    weight = weights["weight"]  # [in, out, kernel]
    taps = weight.view(*weight.shape[:2], -1, stride).permute(2, 0, 3, 1).flatten(2).flip(0)  # [taps, in, stride * out]
    return Conv(taps, weights["bias"].repeat(stride), dilation=1, upsampling=stride)


def _linear(weights: _Weights, *, inner: Tensor | None = None, outer: Tensor | None = None) -> Linear:
    """Convert a linear layer, with its inputs scaled by `inner` and its outputs scaled by `outer`."""
    weight, bias = weights["weight"].T, weights.bias
    if inner is not None:
        weight = inner[:, None] * weight
    if outer is not None:
        weight, bias = weight * outer, None if bias is None else bias * outer
    return Linear(weight, bias)


def _layer(weights: _Weights) -> Layer:
    attention, mlp, norm = weights.at("self_attn"), weights.at("mlp"), weights["input_layernorm.weight"]
    parts = [_linear(attention.at(name), inner=norm) for name in ("q_proj", "k_proj", "v_proj")]
    biases = [part.bias for part in parts if part.bias is not None]
    qkv = Linear(torch.cat([part.weight for part in parts], dim=1), torch.cat(biases) if biases else None)
    norm = weights["post_attention_layernorm.weight"]
    return Layer(
        qkv=qkv,
        output=_linear(attention.at("o_proj"), outer=weights["self_attn_layer_scale.scale"]),
        gate=_linear(mlp.at("gate_proj"), inner=norm),
        up=_linear(mlp.at("up_proj"), inner=norm),
        down=_linear(mlp.at("down_proj"), outer=weights["mlp_layer_scale.scale"]),
    )


def _convnext(weights: _Weights) -> ConvNeXt:
    up = _linear(weights.at("pwconv1"), inner=weights["norm.weight"])
    assert up.bias is not None
    up = Linear(up.weight, up.bias + weights["pwconv1.weight"] @ weights["norm.bias"])
    taps, bias = weights["dwconv.conv.weight"][:, 0].T, weights["dwconv.conv.bias"]
    return ConvNeXt(taps, bias, up, _linear(weights.at("pwconv2"), outer=weights["gamma"]))


def _blocks(weights: _Weights, strides: tuple[int, ...]) -> Iterator[Block]:
    units: tuple[Unit, ...] = ()
    for number, stride in enumerate(strides, start=1):
        block = weights.at(f"{number}.block")
        yield Block(units, _snake(block.at("0")), _transposed(block.at("1.conv"), stride))
        units = tuple(_unit(block.at(str(at)), dilation) for at, dilation in enumerate(RESIDUAL_DILATIONS, start=2))
    last = len(strides) + 1
    yield Block(units, _snake(weights.at(str(last))), _conv(weights.at(f"{last + 1}.conv")))


def _unit(weights: _Weights, dilation: int) -> Unit:
    return Unit(
        _snake(weights.at("act1")),
        _conv(weights.at("conv1.conv"), dilation),
        _snake(weights.at("act2")),
        _conv(weights.at("conv2.conv")),
    )
