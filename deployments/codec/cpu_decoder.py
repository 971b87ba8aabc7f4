"""The decoder's arithmetic on a CPU: every layer is one oneDNN convolution over rows of channels, weights packed once.

In bfloat16 only the products are: what is added up, the snakes, the last convolution and attention stay in float32.
Layers of many channels are bound by their weights and take all streams together. The others are bound by what flows
through them and take one stream and a short piece of time through all remaining layers, so that it stays in the cache.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from deployments.codec.folding import Conv, ConvNeXt, FoldedDecoder, Layer, Linear, Unit, Wave
from deployments.codec.state import DecoderState
from deployments.codec.transformer import rotary_tables, rotate, window_mask

_LAYER_NORM_EPS = 1e-6
_TYPICAL_ROWS = 128
_MANY_CHANNELS = 512
# From here on a convolution of many channels beats a matrix product. oneDNN takes a path that is hundreds of times
# slower for some lengths: with torch 2.11 for 768 channels and 96 to 112 rows, with 2.13 for 100.
_ENOUGH_ROWS = 128
_PIECE = 250_000  # values that a block makes at once: some buffers of as many fit a second-level cache of 2 MB
_ROWS_OF_A_PIECE = 16  # pieces are multiples of it: with torch 2.11 others, such as 520 or 587 rows, may take that path


class Product:
    """A convolution [B, context + time, in] -> [B, time, out] with its weight in oneDNN's own order.

    Layers of many channels have few rows: they are multiplied as matrices, over rows that were copied tap by tap. The
    others are convolutions to oneDNN, which needs no copies but is hundreds of times slower for few rows.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, dilation: int, dtype: torch.dtype, *, may_be_long: bool = False
    ) -> None:
        """`weight` is [taps, in, out]. `may_be_long` keeps it in both orders, so that calls of many rows are faster."""
        self._taps, channels, _ = weight.shape
        self._dilation, self._context, self._dtype = dilation, (self._taps - 1) * dilation, dtype
        self._bias = None if bias is None else bias.to(dtype)
        self._packs = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        weight, is_wide = weight.to(dtype), channels >= _MANY_CHANNELS
        self._matrix = self._packed_matrix(weight) if is_wide else None
        self._kernel = self._packed_kernel(weight) if may_be_long or not is_wide else None

    def __call__(self, rows: Tensor) -> Tensor:
        """`rows` must be contiguous."""
        rows = rows.to(self._dtype)
        if self._matrix is None or (self._kernel is not None and rows.shape[1] - self._context >= _ENOUGH_ROWS):
            return self._convolve(rows)
        return self._multiply(rows)

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
        assert self._matrix is not None
        rows = self._unfolded(rows) if self._taps > 1 else rows
        if not self._packs:
            return F.linear(rows, self._matrix, self._bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._matrix, self._bias, "none", [], "")
        return out

    def _convolve(self, rows: Tensor) -> Tensor:
        assert self._kernel is not None
        image = rows.transpose(1, 2).unsqueeze(2)
        if not self._packs:
            out = F.conv2d(image, self._kernel, self._bias, dilation=(1, self._dilation))
        else:
            out = torch.ops.mkldnn._convolution_pointwise(
                image, self._kernel, self._bias, [0, 0], [1, 1], [1, self._dilation], 1, "none", [], ""
            )
        return out.squeeze(2).transpose(1, 2)

    def _unfolded(self, rows: Tensor) -> Tensor:
        """What each output row is a product of, [B, time, taps * in]."""
        batch, length, channels = rows.shape
        shape = (batch, length - self._context, self._taps, channels)
        strides = (length * channels, channels, self._dilation * channels, 1)
        return rows.as_strided(shape, strides).flatten(2)


class _ToOneChannel:
    """A convolution [B, context + time, in] -> [B, time, 1]: every row times all taps, then sums along diagonals."""

    def __init__(self, conv: Conv) -> None:
        assert conv.dilation == conv.weight.shape[2] == 1, conv.weight.shape
        self._taps = conv.weight[:, :, 0].T.contiguous()
        self._bias = conv.bias

    def __call__(self, rows: Tensor) -> Tensor:
        products = rows @ self._taps  # [B, context + time, taps]
        batch, length, taps = products.shape
        diagonals = products.as_strided((batch, length - taps + 1, taps), (length * taps, taps, taps + 1))
        return diagonals.sum(dim=2, keepdim=True) + self._bias


@dataclass(slots=True)
class _Streams:
    """The streams of a call. Every layer reads its tensor of each stream and puts the one for the next call there."""

    positions: Tensor  # [B] int64, frames decoded before this call
    memories: list[list[Tensor]]  # of each stream, of each layer

    @classmethod
    def resume(cls, states: Sequence[DecoderState]) -> "_Streams":
        return cls(torch.tensor([state.position for state in states]), [list(state.tensors) for state in states])

    def alone(self) -> Iterator["_Streams"]:
        """Each stream by itself; it leaves its memories here."""
        return (_Streams(self.positions[row : row + 1], [memory]) for row, memory in enumerate(self.memories))

    def behind(self, frames: int) -> list[DecoderState]:
        """The streams' states after a call of so many frames."""
        positions = (self.positions + frames).tolist()
        return [
            DecoderState(position, tuple(memory)) for position, memory in zip(positions, self.memories, strict=True)
        ]


class _Scratch(threading.local):
    """Memory that a thread uses again and again: new memory costs a page fault for every 4 KB."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """The buffer of that name, whose former content is lost."""
        size = prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or len(buffer) < size:
            self._buffers[name, dtype] = buffer = torch.empty(size, dtype=dtype)
        return buffer[:size].view(shape)


_scratch = _Scratch()


@dataclass(frozen=True, slots=True)
class _Snake:
    """What is left of a snake, x - half * cos(double * x) per channel. Without `double` x has that factor already."""

    half: Tensor
    double: Tensor | None = None


class _Convolution:
    """A product behind remembered rows, which are tensor `index` of a stream's state."""

    def __init__(self, conv: Conv, product: Callable[[Tensor], Tensor], index: int, dtype: torch.dtype) -> None:
        """`product` takes rows in `dtype`."""
        self.product = product
        self.context, self.upsampling, self.index, self.dtype = conv.context, conv.upsampling, index, dtype

    def __call__(self, x: Tensor, streams: _Streams, snake: _Snake | None = None) -> Tensor:
        """[B, time, in] -> [B, time * upsampling, out], of x behind `snake`."""
        batch, time, channels = x.shape
        rows = _scratch.take("rows", (batch, self.context + time, channels), self.dtype)
        _apply(snake, x, rows[:, self.context :])
        if self.context:
            for own, memory in zip(rows, streams.memories, strict=True):
                own[: self.context] = memory[self.index]
                memory[self.index] = own[time:].clone()
        y = self.product(rows)
        return y.reshape(batch, time * self.upsampling, -1)


def _apply(snake: _Snake | None, x: Tensor, out: Tensor) -> None:
    """Fill `out` [B, time, channels] with x behind the snake."""
    if snake is None:
        out.copy_(x)
        return
    cosine = _scratch.take("cosine", x.shape)
    exact = x if x.dtype == torch.float32 else _scratch.take("exact", x.shape).copy_(x)
    torch.cos(exact if snake.double is None else torch.mul(exact, snake.double, out=cosine), out=cosine)
    out.copy_(torch.addcmul(exact, cosine, snake.half, value=-1, out=cosine))


class CpuNetwork:
    """Folded weights, packed."""

    def __init__(self, folded: FoldedDecoder, *, dtype: torch.dtype) -> None:
        """`dtype` is that of the products: float32 or bfloat16."""
        self.config, self.dtype = folded.config, dtype
        self._folded = folded
        self._initial: list[Tensor] = []
        # The whole signal goes through these projections: rounding is heard most there, and exactness costs least.
        self._pre_conv = self.convolution(folded.pre_conv, torch.float32)
        self._input_proj = self.linear(folded.input_proj, torch.float32)
        self._layers = [_TransformerLayer(self, layer) for layer in folded.layers]
        self._output_proj = self.linear(folded.output_proj, torch.float32)
        self._stages = [
            (self.convolution(up, torch.float32), _ConvNeXtLayer(self, block)) for up, block in folded.stages
        ]
        self._first = self.convolution(folded.first_conv)
        blocks = [_Block(self, units, wave, conv) for units, wave, conv in _regrouped(folded)]
        self._wide = [block for block in blocks if block.is_wide]
        self._narrow = [block for block in blocks if not block.is_wide]

    def initial_state(self) -> DecoderState:
        """State of a stream before its first frame."""
        return DecoderState(0, tuple(self._initial))

    def decode(self, codes: Tensor, states: Sequence[DecoderState]) -> tuple[Tensor, list[DecoderState]]:
        """As DecoderNetwork.decode."""
        streams = _Streams.resume(states)
        samples = self._waveform(self._latents(codes, streams), streams).clamp_(-1, 1)
        return samples, streams.behind(codes.shape[1])

    def advance(self, codes: Tensor, states: Sequence[DecoderState], *, followed_by: int = 0) -> list[DecoderState]:
        """As DecoderNetwork.advance."""
        streams, heard = _Streams.resume(states), self.config.convolved_frames
        latents = self._latents(codes, streams)
        if followed_by < heard:
            self._waveform(latents[:, -heard:], streams)
        return streams.behind(codes.shape[1])

    def _latents(self, codes: Tensor, streams: _Streams) -> Tensor:
        """[B, frames, latent_dim]."""
        folded, config = self._folded, self.config
        x = F.embedding(codes + folded.offsets, folded.tables).sum(dim=2)
        x = self._input_proj(self._pre_conv(x, streams)).float()
        positions, frames = streams.positions, codes.shape[1]
        mask = window_mask(positions, frames, window=config.sliding_window)
        numbers = positions[:, None] + torch.arange(frames)
        rotary = rotary_tables(numbers, head_dim=config.head_dim, theta=config.rope_theta, dtype=torch.float32)
        for layer in self._layers:
            x = layer(x, streams, mask=mask, rotary=rotary)
        return self._output_proj(_normed(x, config.rms_norm_eps))

    def _waveform(self, x: Tensor, streams: _Streams) -> Tensor:
        """Samples [B, time]."""
        for upsample, convnext in self._stages:
            x = convnext(upsample(x, streams), streams)
        x = self._first(x, streams)
        for block in self._wide:
            x = block(x, streams)
        pieces = [_by_pieces(*row, self._narrow) for row in zip(torch.split(x, 1), streams.alone(), strict=True)]
        return torch.cat([torch.cat(list(row), dim=1) for row in pieces]).squeeze(2)

    def remember(self, initial: Tensor) -> int:
        """Reserve a tensor of the streams' states; its index."""
        self._initial.append(initial)
        return len(self._initial) - 1

    def convolution(self, conv: Conv, dtype: torch.dtype | None = None, *, may_be_long: bool = False) -> _Convolution:
        """A packed convolution and its place in the states."""
        dtype = dtype or self.dtype
        product = Product(conv.weight, conv.bias, conv.dilation, dtype, may_be_long=may_be_long)
        return self._remembering(conv, product, dtype)

    def waveform(self, conv: Conv) -> _Convolution:
        """A convolution to one channel, in float32."""
        return self._remembering(conv, _ToOneChannel(conv), torch.float32)

    def _remembering(self, conv: Conv, product: Callable[[Tensor], Tensor], dtype: torch.dtype) -> _Convolution:
        silence = conv.silence.to(dtype).repeat(conv.context, 1)
        return _Convolution(conv, product, self.remember(silence) if conv.context else -1, dtype)

    def linear(self, linear: Linear, dtype: torch.dtype | None = None) -> Product:
        """A packed product."""
        return Product(linear.weight[None], linear.bias, 1, dtype or self.dtype)


class _Block:
    """Residual units, then the convolution that leads to the next ones or to samples."""

    def __init__(self, network: CpuNetwork, units: Sequence[Unit], wave: Wave, conv: Conv) -> None:
        self.units = [_Unit(network, unit) for unit in units]
        self.snake = _Snake(wave.half, wave.double)
        self.convolution = network.waveform(conv) if conv.weight.shape[2] == 1 else network.convolution(conv)
        self.channels = len(wave.half)
        self.is_wide = self.channels >= _MANY_CHANNELS

    def __call__(self, x: Tensor, streams: _Streams) -> Tensor:
        """[B, time, channels], which is overwritten, -> [B, time * upsampling, out]."""
        if self.units:
            x = _scratch.take("signal", x.shape).copy_(x)
            for unit in self.units:
                unit(x, streams)
        return self.convolution(x, streams, self.snake)


def _regrouped(folded: FoldedDecoder) -> Iterator[tuple[Sequence[Unit], Wave, Conv]]:
    """Blocks begin with their units, so that those whose weights are large come first."""
    units: Sequence[Unit] = ()
    for block in folded.blocks:
        yield units, block.wave, block.upsample
        units = block.units
    yield units, folded.last_wave, folded.last_conv


def piece_rows(time: int, channels: int) -> int:
    """Rows of the pieces in which `time` rows pass a block."""
    count = -(-time * channels // _PIECE)
    rows = -(-time // count)
    return -(-rows // _ROWS_OF_A_PIECE) * _ROWS_OF_A_PIECE


def _by_pieces(x: Tensor, stream: _Streams, blocks: Sequence[_Block]) -> Iterator[Tensor]:
    """What comes out of all of `blocks` for x [1, time, channels], piece by piece of time."""
    if not blocks:
        yield x
        return
    block = blocks[0]
    for piece in torch.split(x, piece_rows(x.shape[1], block.channels), dim=1):
        yield from _by_pieces(block(piece, stream), stream, blocks[1:])


class _Unit:
    """A residual unit. Its second snake takes what is already multiplied by its frequency."""

    def __init__(self, network: CpuNetwork, unit: Unit) -> None:
        double, dilated, pointwise = unit.second.double, unit.dilated, unit.pointwise
        self.first, self.second = _Snake(unit.first.half, unit.first.double), _Snake(unit.second.half * double)
        dilated = replace(dilated, weight=dilated.weight * double, bias=dilated.bias * double)
        self.dilated = network.convolution(dilated, may_be_long=True)
        self.pointwise = network.convolution(replace(pointwise, weight=pointwise.weight / double[:, None]))

    def __call__(self, x: Tensor, streams: _Streams) -> None:
        """Add to x [B, time, channels]."""
        x += self.pointwise(self.dilated(x, streams, self.first), streams, self.second)


class _TransformerLayer:
    def __init__(self, network: CpuNetwork, layer: Layer) -> None:
        config = network.config
        self.config = config
        self.qkv, self.output, self.down = map(network.linear, (layer.qkv, layer.output, layer.down))
        self.gate_up = Product(torch.cat((layer.gate.weight, layer.up.weight), dim=1)[None], None, 1, network.dtype)
        self.history = config.sliding_window - 1
        heads, size = config.num_key_value_heads, config.head_dim
        self.index = network.remember(torch.zeros(2, heads, self.history, size))

    def __call__(self, x: Tensor, streams: _Streams, *, mask: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        config, eps = self.config, self.config.rms_norm_eps
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        qkv = self.qkv(_normed(x, eps)).float()
        qkv = qkv.view(*qkv.shape[:2], -1, config.head_dim).transpose(1, 2)
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        q, new = rotate(q, rotary), torch.stack((rotate(k, rotary), v), dim=1)
        rows = zip(torch.split(q, 1), new, torch.split(mask, 1), streams.memories, strict=True)
        y = torch.cat([self._attend(*row) for row in rows])
        x = x + self.output(y.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(_normed(x, eps)).float().chunk(2, dim=2)
        return x + self.down(F.silu(gate) * up)

    def _attend(self, q: Tensor, new: Tensor, mask: Tensor, memory: list[Tensor]) -> Tensor:
        """Of one stream, [1, heads, frames, size], with new keys and values [2, heads, frames, size]."""
        known = torch.cat((memory[self.index], new), dim=2)
        last = known[:, :, -self.history :]
        memory[self.index] = last.clone() if 4 * new.shape[2] > self.history else last  # it keeps all of `known` alive
        grouped = q.shape[1] != known.shape[1]
        return F.scaled_dot_product_attention(q, known[:1], known[1:], attn_mask=mask, enable_gqa=grouped)


class _ConvNeXtLayer:
    def __init__(self, network: CpuNetwork, block: ConvNeXt) -> None:
        self.block = block
        self.up, self.down = network.linear(block.up), network.linear(block.down)
        taps, channels = block.taps.shape
        self.index = network.remember(torch.zeros(taps - 1, channels))

    def __call__(self, x: Tensor, streams: _Streams) -> Tensor:
        x = x.float()
        taps = self.block.taps
        rows = torch.cat((torch.stack([memory[self.index] for memory in streams.memories]), x), dim=1)
        time = x.shape[1]
        for own, memory in zip(rows, streams.memories, strict=True):
            memory[self.index] = own[time:].clone()
        y = self.block.bias + sum(rows[:, tap : tap + time] * weight for tap, weight in enumerate(taps))
        y = F.layer_norm(y, y.shape[2:], eps=_LAYER_NORM_EPS)
        out: Tensor = x + self.down(F.gelu(self.up(y).float()))
        return out


def _normed(x: Tensor, eps: float) -> Tensor:
    """x over its root mean square; the norm's weight is folded away."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
