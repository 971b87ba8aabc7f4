"""The decoder's forward pass: the order of its layers, defined once for all devices.

Backends compute the layers. `torch_backend.py` uses torch on any device, and `triton_decoder.py` uses a few large
kernels on a GPU.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deployments.codec.fold import Block, Conv, ConvNeXt, FoldedWeights, Layer, Linear, Snake


@dataclass(frozen=True, slots=True)
class Signal:
    """Activations between two layers: rows of channels."""

    values: Tensor
    snake: Snake | None = None  # activation to be applied to the rows by the next convolution
    snaked: Tensor | None = None  # the rows after the snake, if a backend computes both at once


Cut = Callable[[Signal, Conv], Signal]  # returns the rows that this convolution still needs


class ForwardPass(ABC):
    """One forward pass of a backend over a batch of streams."""

    @abstractmethod
    def embed(self) -> Signal:
        """Return the sums of the codes' codebook entries."""

    @abstractmethod
    def linear(self, x: Signal, linear: Linear, *, norm: bool = False, gate: Linear | None = None, gelu: bool = False,
               residual: Signal | None = None) -> Signal:  # fmt: skip
        """Compute gelu(norm(x) @ linear) * silu(norm(x) @ gate) + residual. Each part is optional.

        The backend may overwrite `residual`.
        """

    @abstractmethod
    def attend(self, qkv: Signal, layer: Layer) -> Signal:
        """Compute a layer's attention within its sliding window."""

    @abstractmethod
    def depthwise_norm(self, x: Signal, block: ConvNeXt) -> Signal:
        """Compute the depthwise convolution of a block, and normalize the result."""

    @abstractmethod
    def conv(
        self, x: Signal, conv: Conv, *, snake: Snake | None = None, residual: Signal | None = None, plain: bool = True
    ) -> Signal:
        """Convolve x after applying its snake.

        `snake` belongs to the next layer. If `plain` is False, only the rows after `snake` are needed. The backend may
        overwrite `residual`.
        """

    @abstractmethod
    def samples(self, x: Signal, conv: Conv) -> Tensor:
        """Convolve to one channel. Returns samples [B * time]."""

    @abstractmethod
    def pieces(self, x: Signal, block: Block) -> "Iterable[tuple[ForwardPass, Signal]]":
        """Split x for a block and all later layers. Each part comes with the forward pass of its streams."""


def latents(run: ForwardPass, folded: FoldedWeights) -> Signal:
    """Compute the input of the convolutions that produce samples."""
    x = run.linear(run.conv(run.embed(), folded.pre_conv), folded.input_proj)
    for layer in folded.layers:
        y = run.attend(run.linear(x, layer.qkv, norm=True), layer)
        x = run.linear(y, layer.output, residual=x)
        y = run.linear(x, layer.up, norm=True, gate=layer.gate)
        x = run.linear(y, layer.down, residual=x)
    return run.linear(x, folded.output_proj, norm=True)


def waveform(run: ForwardPass, folded: FoldedWeights, x: Signal) -> Tensor:
    """Convert latents to samples [B * time], stream after stream."""
    return _convolved(run, folded, x, lambda x, _: x)


def last_samples(run: ForwardPass, folded: FoldedWeights, x: Signal) -> Tensor:
    """Convert latents to their last samples, and store all rows that the convolutions will need later.

    Each layer first drops the rows that affect neither. The remaining rows are too few for blocks to be split.
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
