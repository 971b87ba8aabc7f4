"""Matrix products and convolutions of the decoder's layers in torch, with weights packed once.

On a CPU with bfloat16 units or with AVX2 only, c_kernels.py computes the products instead. This module also holds the
scratch memory for calls, which each thread reuses on a CPU.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from math import inf, prod

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from deployments.codec.backends import c_kernels
from deployments.codec.backends.c_kernels import (
    Convolution,
    ExactConvolution,
    FilteredConvolution,
    New,
    convolve_to_one,
    fits,
)
from deployments.codec.fold import Conv, FoldedWeights, Linear, Snake

_TYPICAL_ROWS = 128
MANY_CHANNELS = 512
# Above this number of rows, a convolution with many channels is faster than a product. At some lengths oneDNN is
# hundreds of times slower: with torch 2.11 at 768 channels and 96 to 112 rows, with torch 2.13 at 100 rows.
_ENOUGH_ROWS = 128


@cache
def onednn_packs(dtype: torch.dtype) -> bool:
    """Return whether oneDNN can pack weights of this type and multiply with them on this CPU."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    matrix = torch.zeros(16, 16, dtype=dtype)
    try:  # the required instructions depend on the oneDNN version, ONEDNN_MAX_CPU_ISA and the architecture
        packed = torch.ops.mkldnn._reorder_linear_weight(matrix, len(matrix))
        torch.ops.mkldnn._linear_pointwise(matrix, packed, None, "none", [], "")
    except RuntimeError:
        return False
    return True


class TorchProduct:
    """Convolution [B, context + time, in] -> [B, time, out], with the weight stored in the order in which it is read.

    A few rows are copied tap by tap and multiplied as a matrix. Many rows run as a convolution, which needs no copies
    but takes milliseconds even for a few rows with few channels.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, dilation: int, dtype: torch.dtype, *, may_be_long: bool = False
    ) -> None:
        """Pack `weight` [taps, in, out]. Many channels imply few rows, unless `may_be_long` is set."""
        self._taps, channels, _ = weight.shape
        self._dilation = dilation
        self._context = (self._taps - 1) * dilation
        self.dtype = dtype
        self._bias = None if bias is None else bias.to(dtype)
        self._packs = weight.is_cpu and onednn_packs(dtype)
        weight = weight.to(dtype)
        has_few_rows = channels >= MANY_CHANNELS and not may_be_long
        self._matrix = self._packed_matrix(weight)
        self._enough = inf if has_few_rows else _ENOUGH_ROWS  # minimum number of output rows for using a convolution
        if not has_few_rows:
            self._kernel = self._packed_kernel(weight)

    def __call__(self, rows: Tensor) -> Tensor:
        """Convolve `rows`, which must be contiguous."""
        rows = rows.to(self.dtype)
        return self._multiply(rows) if rows.shape[1] - self._context < self._enough else self._convolve(rows)

    def _packed_matrix(self, weight: Tensor) -> Tensor:
        matrix = weight.permute(2, 0, 1).flatten(1).contiguous()
        return torch.ops.mkldnn._reorder_linear_weight(matrix, _TYPICAL_ROWS) if self._packs else matrix

    def _packed_kernel(self, weight: Tensor) -> Tensor:
        kernel = weight.permute(2, 1, 0).unsqueeze(2).contiguous()
        if not self._packs:
            return kernel
        size = [1, kernel.shape[1], 1, _TYPICAL_ROWS + self._context]
        stride, padding = [1, 1], [0, 0]
        packed: Tensor = torch._C._nn.mkldnn_reorder_conv2d_weight(  # type: ignore[call-arg]
            kernel.to_mkldnn(), padding, stride, [1, self._dilation], 1, size
        )
        return packed

    def _multiply(self, rows: Tensor) -> Tensor:
        rows = self._unfolded(rows) if self._taps > 1 else rows
        if not self._packs:
            return F.linear(rows, self._matrix, self._bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._matrix, self._bias, "none", [], "")
        return out

    def _convolve(self, rows: Tensor) -> Tensor:
        image = rows.transpose(1, 2).unsqueeze(2)
        if not self._packs:
            out = F.conv2d(image, self._kernel, self._bias, dilation=(1, self._dilation))
        else:
            out = torch.ops.mkldnn._convolution_pointwise(
                image, self._kernel, self._bias, [0, 0], [1, 1], [1, self._dilation], 1, "none", [], ""
            )
        return out.squeeze(2).transpose(1, 2)

    def _unfolded(self, rows: Tensor) -> Tensor:
        """Return the rows [B, time, taps * in] whose products are the output rows."""
        batch, length, channels = rows.shape
        shape = (batch, length - self._context, self._taps, channels)
        strides = (length * channels, channels, self._dilation * channels, 1)
        return rows.as_strided(shape, strides).flatten(2)


class ProductToOneChannel:
    """Convolution [B, context + time, in] -> [B, time, 1] by multiplying rows with all taps and summing diagonals."""

    dtype = torch.float32

    def __init__(self, conv: Conv) -> None:
        assert conv.dilation == conv.weight.shape[2] == 1, conv.weight.shape
        self._rows = conv.weight[:, :, 0].contiguous()
        self._taps = self._rows.T.contiguous()
        self._bias = conv.bias

    def __call__(self, rows: Tensor, *, new: New) -> Tensor:
        samples = convolve_to_one(rows, self._rows, self._bias, new=new)
        if samples is not None:
            return samples
        products = rows @ self._taps  # [B, context + time, taps]
        batch, length, taps = products.shape
        diagonals = products.as_strided((batch, length - taps + 1, taps), (length * taps, taps, taps + 1))
        return diagonals.sum(dim=2, keepdim=True) + self._bias


class _Scratch(threading.local):
    """Scratch memory that a thread reuses, because newly allocated memory costs a page fault for every 4 KB.

    Not used on a GPU, where torch itself caches freed memory.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        self._used: list[Tensor] | None = None

    def buffer(
        self, name: str, shape: Sequence[int], device: torch.device, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return the buffer `name` with the given shape. Overwrites earlier contents of the buffer."""
        if device.type != "cpu":
            return torch.empty(tuple(shape), dtype=dtype, device=device)
        size, key = prod(shape), (name, dtype)
        buffer = self._buffers.get(key)
        if buffer is None or len(buffer) < size:
            self._buffers[key] = buffer = torch.empty(size, dtype=dtype)
        if self._used is not None:
            self._used.append(buffer)
        return buffer[:size].view(shape)

    @contextmanager
    def kept(self) -> Iterator[list[Tensor]]:
        """Yield the list of buffers used inside the block. The buffers stay alive while the caller holds the list."""
        used: list[Tensor] = []
        self._used = used
        try:
            yield used
        finally:
            self._used = None


scratch = _Scratch()


def gather(
    x: Tensor, out: Tensor, snake: Snake | None = None, pasts: Sequence[Tensor] = (), nexts: Sequence[Tensor] = ()
) -> None:
    """Fill `out` [B, context + time, channels] with each stream's past and x after the snake, and then fill `nexts`."""
    if c_kernels.gather(x, out, snake, pasts, nexts):
        return
    time = x.shape[1]
    context = out.shape[1] - time
    _apply(snake, x, out[:, context:])
    for own, past, following in zip(out, pasts, nexts, strict=False):
        own[:context] = past
        following.copy_(own[time:])


def _apply(snake: Snake | None, x: Tensor, out: Tensor) -> None:
    """Fill `out` [B, time, channels] with x after the snake."""
    if snake is None:
        out.copy_(x)
        return
    wave = scratch.buffer("wave", x.shape, x.device)
    exact = x if x.dtype == torch.float32 else scratch.buffer("exact", x.shape, x.device).copy_(x)
    torch.sin(exact if snake.frequency is None else torch.mul(exact, snake.frequency, out=wave), out=wave)
    out.copy_(torch.addcmul(exact, wave.square_(), snake.amplitude, out=wave))


AnyProduct = Convolution | TorchProduct | ProductToOneChannel


def packed(folded: FoldedWeights, dtype: torch.dtype) -> Iterator[tuple[Conv | Linear, AnyProduct]]:
    def exact(weight: Tensor, bias: Tensor | None, dilation: int = 1) -> AnyProduct:
        # These products carry the entire signal, so rounding is most audible here, and float32 costs least here.
        if fits(weight, dtype):
            return ExactConvolution(weight, bias, dilation)
        return TorchProduct(weight, bias, dilation, torch.float32)

    def product(
        weight: Tensor, bias: Tensor | None, dilation: int = 1, *, gated: bool = False, may_be_long: bool = False
    ) -> AnyProduct:
        if not fits(weight, dtype):
            return TorchProduct(weight, bias, dilation, dtype, may_be_long=may_be_long)
        if dtype == torch.bfloat16:
            return Convolution(weight, bias, dilation, gated=gated)
        if may_be_long:
            return FilteredConvolution(weight, bias, dilation)
        return ExactConvolution(weight, bias, dilation, gated=gated)

    for conv in (folded.pre_conv, *(upsample for upsample, _ in folded.stages)):
        yield conv, exact(conv.weight, conv.bias, conv.dilation)
    for linear in (folded.input_proj, folded.output_proj):
        yield linear, exact(linear.weight[None], linear.bias)
    for layer in folded.layers:
        for linear in (layer.qkv, layer.output, layer.down):
            yield linear, product(linear.weight[None], linear.bias)
        gate_up = torch.cat((layer.gate.weight, layer.up.weight), dim=1)
        yield layer.up, product(gate_up[None], None, gated=True)
    for _, block in folded.stages:
        for linear in (block.up, block.down):
            yield linear, product(linear.weight[None], linear.bias)
    *blocks, last = folded.blocks
    for conv in (folded.first_conv, *(block.conv for block in blocks)):
        yield conv, product(conv.weight, conv.bias, conv.dilation)
    for unit in (unit for block in folded.blocks for unit in block.units):
        dilated, pointwise = unit.dilated, unit.pointwise
        yield dilated, product(dilated.weight, dilated.bias, dilated.dilation, may_be_long=True)
        yield pointwise, product(pointwise.weight, pointwise.bias)
    yield last.conv, ProductToOneChannel(last.conv)
