"""The decoder's forward pass: the order of its layers, defined once for all devices.

A backend computes each layer: `torch_backend.py` with torch, on any device, `triton_decoder.py` with few, large kernels
on a GPU.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deployments.codec.fold import Block, Conv, ConvNeXt, FoldedWeights, Layer, Linear, Snake


@dataclass(frozen=True, slots=True)
class Signal:
    """Rows of channels between two layers."""

    values: Tensor
    snake: Snake | None = None  # the next convolution applies it to the rows
    snaked: Tensor | None = None  # the rows after the snake, from a backend that computes both at once


Cut = Callable[[Signal, Conv], Signal]  # the rows that this convolution still needs


class ForwardPass(ABC):
    """One pass over a batch of streams, in a backend."""

    @abstractmethod
    def embed(self) -> Signal:
        """Sums of the codes' codebook entries."""

    @abstractmethod
    def linear(self, x: Signal, linear: Linear, *, norm: bool = False, gate: Linear | None = None, gelu: bool = False,
               residual: Signal | None = None) -> Signal:  # fmt: skip
        """gelu(norm(x) @ linear) * silu(norm(x) @ gate) + residual, each part only if requested.

        `residual` may be overwritten.
        """

    @abstractmethod
    def attend(self, qkv: Signal, layer: Layer) -> Signal:
        """Attention of a layer within its window."""

    @abstractmethod
    def depthwise_norm(self, x: Signal, block: ConvNeXt) -> Signal:
        """The depthwise convolution of a block, normalised."""

    @abstractmethod
    def conv(
        self, x: Signal, conv: Conv, *, snake: Snake | None = None, residual: Signal | None = None, plain: bool = True
    ) -> Signal:
        """A convolution of x after its snake.

        `snake` belongs to the next layer. Without `plain` only the rows after that snake are needed.

        `residual` may be overwritten.
        """

    @abstractmethod
    def samples(self, x: Signal, conv: Conv) -> Tensor:
        """A convolution to one channel: samples [B * time]."""

    @abstractmethod
    def pieces(self, x: Signal, block: Block) -> "Iterable[tuple[ForwardPass, Signal]]":
        """The parts in which x passes a block and all later layers, each with the pass of its streams."""


def latents(run: ForwardPass, folded: FoldedWeights) -> Signal:
    """The input of the convolutions that make samples."""
    x = run.linear(run.conv(run.embed(), folded.pre_conv), folded.input_proj)
    for layer in folded.layers:
        y = run.attend(run.linear(x, layer.qkv, norm=True), layer)
        x = run.linear(y, layer.output, residual=x)
        y = run.linear(x, layer.up, norm=True, gate=layer.gate)
        x = run.linear(y, layer.down, residual=x)
    return run.linear(x, folded.output_proj, norm=True)


def waveform(run: ForwardPass, folded: FoldedWeights, x: Signal) -> Tensor:
    """Samples of latents, [B * time], stream after stream."""
    return _convolved(run, folded, x, lambda x, _: x)


def last_samples(run: ForwardPass, folded: FoldedWeights, x: Signal) -> Tensor:
    """The last samples of latents, and all that the convolutions have to remember of them.

    Each layer drops rows that do not reach as far first. So few are left that no block is split into pieces.
    """
    needed = folded.rows_needed()
    return _convolved(run, folded, x, lambda x, layer: Signal(x.values[:, -needed[layer] :].contiguous(), x.snake))


def _convolved(run: ForwardPass, folded: FoldedWeights, x: Signal, cut: Cut) -> Tensor:
    for upsample, convnext in folded.stages:
        x = run.conv(cut(x, upsample), upsample)
        y = run.linear(run.depthwise_norm(x, convnext), convnext.up, gelu=True)
        x = run.linear(y, convnext.down, residual=x)
    first, *_ = blocks = folded.blocks
    x = run.conv(cut(x, folded.first_conv), folded.first_conv, snake=first.entry, plain=bool(first.units))
    parts = list(_through(blocks, run, x, cut))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _through(blocks: Sequence[Block], run: ForwardPass, x: Signal, cut: Cut) -> Iterator[Tensor]:
    block, *later = blocks
    for part, piece in run.pieces(cut(x, block.conv), block):
        y = _units(part, piece, block)
        if not later:
            yield part.samples(y, block.conv)
        else:
            following = later[0]
            y = part.conv(y, block.conv, snake=following.entry, plain=bool(following.units))
            yield from _through(later, part, y, cut)


def _units(run: ForwardPass, x: Signal, block: Block) -> Signal:
    snakes = [*(unit.first for unit in block.units[1:]), block.snake]
    for unit, snake in zip(block.units, snakes, strict=False):
        y = run.conv(x, unit.dilated, snake=unit.second, plain=False)
        x = run.conv(y, unit.pointwise, snake=snake, residual=x, plain=snake is not block.snake)
    return x
