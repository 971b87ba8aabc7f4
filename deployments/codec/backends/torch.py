"""The forward pass in torch, on any device. On a CPU every layer is one convolution, its weights packed once.

In bfloat16 on a CPU that multiplies it, kernels of our own (cpu_kernels.py) make what they fit. Where they make all,
as of the released shape, the calls of a batch are recorded and replayed.

In a lower precision only the products are: what is added up, the snakes, the last convolution and attention stay in
float32. On a CPU, layers of many channels are bound by their weights and take all streams together. The others are
bound by what flows through them and take one stream and a short piece of time through all remaining layers, so that it
stays in the cache.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from itertools import chain
from math import inf, prod

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from deployments.codec.backends import cpu
from deployments.codec.backends.cpu import (
    Convolution,
    ExactConvolution,
    New,
    Recording,
    add,
    convolve_to_one,
    fits,
    gather,
    normed,
)
from deployments.codec.fold import Block, Conv, ConvNeXt, FoldedDecoder, Layer, Linear, Snake, with_frequency
from deployments.codec.forward import Signal, last_samples, latents, waveform
from deployments.codec.layers import rotary_tables, rotate
from deployments.codec.state import DecoderState

_LAYER_NORM_EPS = 1e-6
_TYPICAL_ROWS = 128
_MANY_CHANNELS = 512
# From here on a convolution of many channels beats a matrix product. oneDNN takes a path that is hundreds of times
# slower for some lengths: with torch 2.11 for 768 channels and 96 to 112 rows, with 2.13 for 100.
_ENOUGH_ROWS = 128
_POSITIONS = 2048  # frames whose angles are known before there are more
_RECORDED_FRAMES = 64  # of all streams: calls of more are rare, and Python's part of them is small
_PIECE = 250_000  # values that a block makes at once: some buffers of as many fit a second-level cache of 2 MB
_ROWS_OF_A_PIECE = 16  # pieces are multiples of it: with torch 2.11 others, such as 520 or 587 rows, may take that path


class _Product:
    """A convolution [B, context + time, in] -> [B, time, out] with its weight in the order of those who read it.

    Few rows are multiplied as a matrix, after they were copied tap by tap. Many are a convolution, which needs no
    copies, but takes milliseconds for a handful of rows, however few the channels are.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, dilation: int, dtype: torch.dtype, *, may_be_long: bool = False
    ) -> None:
        """`weight` is [taps, in, out]. A layer of many channels has few rows, unless it `may_be_long`."""
        self._taps, channels, _ = weight.shape
        self._dilation, self._context, self.dtype = dilation, (self._taps - 1) * dilation, dtype
        self._bias = None if bias is None else bias.to(dtype)
        self._packs = weight.is_cpu and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        weight, has_few_rows = weight.to(dtype), channels >= _MANY_CHANNELS and not may_be_long
        self._matrix = self._packed_matrix(weight)
        self._enough = inf if has_few_rows else _ENOUGH_ROWS  # rows of results for a convolution
        if not has_few_rows:
            self._kernel = self._packed_kernel(weight)

    def __call__(self, rows: Tensor) -> Tensor:
        """`rows` must be contiguous."""
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
        """What each output row is a product of, [B, time, taps * in]."""
        batch, length, channels = rows.shape
        shape = (batch, length - self._context, self._taps, channels)
        strides = (length * channels, channels, self._dilation * channels, 1)
        return rows.as_strided(shape, strides).flatten(2)


class _ProductToOneChannel:
    """A convolution [B, context + time, in] -> [B, time, 1]: every row times all taps, then sums along diagonals."""

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
    """Memory that a thread uses again and again: new memory costs a page fault for every 4 KB. Not on a GPU, where
    torch keeps what was freed, and gives it to others.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        self._taken: list[Tensor] | None = None

    def take(self, name: str, shape: Sequence[int], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        """The buffer of that name, whose former content is lost."""
        if device.type != "cpu":
            return torch.empty(tuple(shape), dtype=dtype, device=device)
        size, key = prod(shape), (name, dtype)
        buffer = self._buffers.get(key)
        if buffer is None or len(buffer) < size:
            self._buffers[key] = buffer = torch.empty(size, dtype=dtype)
        if self._taken is not None:
            self._taken.append(buffer)
        return buffer[:size].view(shape)

    @contextmanager
    def kept(self) -> Iterator[list[Tensor]]:
        """What is taken meanwhile; it stays where it is while that is held, also when larger buffers are needed."""
        taken: list[Tensor] = []
        self._taken = taken
        try:
            yield taken
        finally:
            self._taken = None


_scratch = _Scratch()


def _gather(
    x: Tensor, out: Tensor, snake: Snake | None = None, pasts: Sequence[Tensor] = (), nexts: Sequence[Tensor] = ()
) -> None:
    """Fill `out` [B, context + time, channels] with the streams' pasts, and x behind the snake, and then `nexts`."""
    if gather(x, out, snake, pasts, nexts):
        return
    time = x.shape[1]
    context = out.shape[1] - time
    _apply(snake, x, out[:, context:])
    for own, past, following in zip(out, pasts, nexts, strict=False):
        own[:context] = past
        following.copy_(own[time:])


def _apply(snake: Snake | None, x: Tensor, out: Tensor) -> None:
    """Fill `out` [B, time, channels] with x behind the snake."""
    if snake is None:
        out.copy_(x)
        return
    wave = _scratch.take("wave", x.shape, x.device)
    exact = x if x.dtype == torch.float32 else _scratch.take("exact", x.shape, x.device).copy_(x)
    torch.sin(exact if snake.frequency is None else torch.mul(exact, snake.frequency, out=wave), out=wave)
    out.copy_(torch.addcmul(exact, wave.square_(), snake.amplitude, out=wave))


class TorchBackend:
    """Folded weights, packed. Threads share it: a call changes nothing but the states that it returns."""

    def __init__(self, folded: FoldedDecoder, *, dtype: torch.dtype) -> None:
        """`dtype` is that of the products. Float32 is not cut off to TF32 by cuDNN, from here on in this process: on
        stressed weights it would be no better than 34 dB, and other types are judged by it, and streams repaired in it.
        """
        torch.backends.cudnn.allow_tf32 = False
        self.config, self.device = folded.config, folded.tables.device
        blocks = (replace(block, units=tuple(map(with_frequency, block.units))) for block in folded.blocks)
        self.folded = folded = replace(folded, blocks=tuple(blocks))
        self.products = dict(_packed(folded, dtype))
        self.memories: dict[Conv | ConvNeXt | Layer, int] = {}  # index of a layer's tensor in a stream's state
        self.initial_state = DecoderState(0, tuple(self._silence()))
        self.attends = self._is_own(*(layer.output for layer in folded.layers)) and cpu.attends(
            self.config.head_dim, self.config.sliding_window
        )
        self.eps, self.layer_norm_eps = (
            torch.tensor(eps, device=self.device) for eps in (self.config.rms_norm_eps, _LAYER_NORM_EPS)
        )
        *others, _ = self.products
        self._is_own_throughout = (
            self.attends and self._is_own(*others) and folded.blocks[-1].conv.channels % _ROWS_OF_A_PIECE == 0
        )
        self._rotary, self._recorded = self._rotary_tables(_POSITIONS), _Recorded()

    def decode(self, codes: Tensor, states: Sequence[DecoderState]) -> tuple[Tensor, list[DecoderState]]:
        """Unbounded samples [B, frames * frame_samples], and the next states of the streams."""
        if not self._is_own_throughout or codes[:, :, 0].numel() > _RECORDED_FRAMES:
            call = _TorchCall(self, codes, states)
            return self.decoded(call).clone(), call.states()
        recorded = self._recorded.calls.get(codes.shape[:2])
        if recorded is not None:
            return recorded(codes, states)
        call = _TorchCall(self, codes.clone(), list(map(_copied, states)))
        self._recorded.calls[codes.shape[:2]] = _RecordedCall(self, call)
        return call.audio.view(len(states), -1).clone(), call.states()

    def decoded(self, call: "_TorchCall") -> Tensor:
        """Unbounded samples [B, frames * frame_samples], perhaps in memory that the thread's next call takes."""
        return waveform(call, self.folded, latents(call, self.folded)).view(call.streams, -1)

    def advance(
        self, codes: Tensor, states: Sequence[DecoderState], *, followed_by: int
    ) -> tuple[Tensor, list[DecoderState]]:
        """The states that `decode` would return, or what counts of them before another `followed_by` frames.

        And what was made last on the way, [B, ...]: it is finite where the states are.
        """
        call = _TorchCall(self, codes, states)
        x = latents(call, self.folded)
        if followed_by >= self.config.convolved_frames:
            return x.rows, call.states()
        return last_samples(call, self.folded, x).view(len(states), -1), call.states()

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [..., head_dim] of positions [...]."""
        last = int(positions.max())
        cosines, sines = self._rotary
        if last >= len(cosines):
            cosines, sines = self._rotary = self._rotary_tables(2 * last)
        return cosines[positions], sines[positions]

    def _rotary_tables(self, count: int) -> tuple[Tensor, Tensor]:
        numbers = torch.arange(count, device=self.device)[None]
        config = self.config
        tables = rotary_tables(numbers, head_dim=config.head_dim, theta=config.rope_theta, dtype=torch.float32)
        return tables[0][0, 0], tables[1][0, 0]

    def _is_own(self, *layers: Conv | Linear) -> bool:
        """Whether these products are those of our kernels."""
        return all(isinstance(self.products[layer], Convolution | ExactConvolution) for layer in layers)

    def _silence(self) -> Iterator[Tensor]:
        """What a stream remembers before its first frame."""
        config = self.config
        for layer in self.folded.remembering:
            self.memories[layer] = len(self.memories)
            dtype = self.products[layer].dtype if isinstance(layer, Conv) else torch.float32
            yield torch.zeros(layer.context, layer.channels, dtype=dtype, device=self.device)
        for attention in self.folded.layers:
            self.memories[attention] = len(self.memories)
            yield torch.zeros(
                2, config.num_key_value_heads, config.sliding_window - 1, config.head_dim, device=self.device
            )


_AnyProduct = Convolution | ExactConvolution | _Product | _ProductToOneChannel


def _packed(folded: FoldedDecoder, dtype: torch.dtype) -> Iterator[tuple[Conv | Linear, _AnyProduct]]:
    is_own = dtype == torch.bfloat16

    def exact(weight: Tensor, bias: Tensor | None, dilation: int = 1) -> _AnyProduct:
        # The whole signal goes through these: rounding is heard most there, and exactness costs least.
        if is_own and fits(weight):
            return ExactConvolution(weight, bias, dilation)
        return _Product(weight, bias, dilation, torch.float32)

    def product(
        weight: Tensor, bias: Tensor | None, dilation: int = 1, *, gated: bool = False, may_be_long: bool = False
    ) -> _AnyProduct:
        if is_own and fits(weight):
            return Convolution(weight, bias, dilation, gated=gated)
        return _Product(weight, bias, dilation, dtype, may_be_long=may_be_long)

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
    yield last.conv, _ProductToOneChannel(last.conv)


class _TorchCall:
    """One pass. Every layer reads its tensor of each stream and puts the one for the next call there."""

    def __init__(self, backend: TorchBackend, codes: Tensor, states: Sequence[DecoderState]) -> None:
        self._backend, self.codes, self.streams = backend, codes, len(states)
        self._positions = [state.position for state in states]
        self.memories = [list(state.tensors) for state in states]  # of each stream, of each layer
        self.nexts = [_like(state) for state in states]
        frames, device = codes.shape[1], backend.device
        self.known = torch.tensor(self._positions, device=device)
        self.rotary = backend.rotary(self.known[:, None] + torch.arange(frames, device=device))
        self._mask = None
        if not backend.attends:
            self._mask = _window_mask(self.known, frames, window=backend.config.sliding_window)
        self.audio = _scratch.take("audio", (len(states) * frames * backend.config.frame_samples,), device)
        self._samples = [self.audio]  # where the next ones go

    def states(self) -> list[DecoderState]:
        """Of the streams behind this call."""
        frames = self.codes.shape[1]
        return [
            DecoderState(position + frames, tuple(memory))
            for position, memory in zip(self._positions, self.memories, strict=True)
        ]

    def embed(self) -> Signal:
        folded = self._backend.folded
        if self._backend.attends:
            new = self._new("embedded")
            return Signal(cpu.embed(self.codes, folded.offsets, folded.tables, new=new))
        return Signal(F.embedding(self.codes + folded.offsets, folded.tables).sum(dim=2))

    def _new(self, name: str) -> New:
        """Memory for what a kernel makes, until one of the same name makes something."""
        device = self._backend.device
        return lambda part, shape, dtype: _scratch.take(f"{name} {part}", shape, device, dtype)

    def linear(
        self,
        x: Signal,
        linear: Linear,
        *,
        norm: bool = False,
        gate: Linear | None = None,
        gelu: bool = False,
        residual: Signal | None = None,
    ) -> Signal:
        """As in Call. A gate is packed together with its product."""
        product = self._backend.products[linear]
        if isinstance(product, Convolution | ExactConvolution):
            new = self._new(str(id(linear)))
            rows = normed(x.rows, self._backend.eps, product.dtype, new=self._new("normed")) if norm else x.rows
            if isinstance(product, ExactConvolution):
                return Signal(product(rows, new=new))
            total, wide = None if residual is None else residual.rows, gate is None and not gelu
            return Signal(product(rows.to(product.dtype), total=total, gelu=gelu, wide=wide, new=new))
        assert not isinstance(product, _ProductToOneChannel)
        y = product(_normed(x.rows, self._backend.config.rms_norm_eps) if norm else x.rows)
        if residual is not None:
            return Signal(residual.rows + y)
        y = y.float()
        if gate is not None:
            gates, ups = y.chunk(2, dim=2)
            y = F.silu(gates) * ups
        return Signal(F.gelu(y) if gelu else y)

    def attend(self, qkv: Signal, layer: Layer) -> Signal:
        backend, index = self._backend, self._backend.memories[layer]
        heads, kv_heads = backend.config.num_attention_heads, backend.config.num_key_value_heads
        if self._mask is None:
            shape = (*qkv.rows.shape[:2], heads * backend.config.head_dim)
            y = _scratch.take("attended", shape, backend.device, torch.bfloat16)
            for stream, histories in enumerate(self._turned(index)):
                rotary = [table[stream] for table in self.rotary]
                cpu.attend(qkv.rows[stream], rotary, histories, self.known[stream], y[stream])
            return Signal(y)
        rows = qkv.rows.view(*qkv.rows.shape[:2], -1, backend.config.head_dim).transpose(1, 2)
        q, k, v = torch.split(rows, [heads, kv_heads, kv_heads], dim=1)
        cosines, sines = (table[:, None] for table in self.rotary)
        q, new = rotate(q, (cosines, sines)), torch.stack((rotate(k, (cosines, sines)), v), dim=1)
        streams = zip(torch.split(q, 1), new, torch.split(self._mask, 1), self._turned(index), strict=True)
        y = torch.cat([_attend(*stream) for stream in streams])
        return Signal(y.transpose(1, 2).flatten(2))

    def _turned(self, index: int) -> list[tuple[Tensor, Tensor]]:
        """What each stream remembers in a layer, and what is to be filled with what it will. Pieces may have both."""
        pairs = [(memory[index], following[index]) for memory, following in zip(self.memories, self.nexts, strict=True)]
        for memory, (_, following) in zip(self.memories, pairs, strict=True):
            memory[index] = following
        return pairs

    def depthwise_norm(self, x: Signal, block: ConvNeXt) -> Signal:
        new, memories = x.rows.float(), self._turned(self._backend.memories[block])
        if isinstance(self._backend.products[block.up], Convolution):
            y = _scratch.take("depthwise", new.shape, new.device, torch.bfloat16)
            for own, pair, out in zip(new, memories, y, strict=True):
                cpu.depthwise_norm(own, pair, block, self._backend.layer_norm_eps, out)
            return Signal(y)
        rows = torch.cat((torch.stack([past for past, _ in memories]), new), dim=1)
        time = new.shape[1]
        for own, (_, following) in zip(rows, memories, strict=True):
            following.copy_(own[time:])
        y = block.bias + sum(rows[:, tap : tap + time] * weight for tap, weight in enumerate(block.taps))
        return Signal(F.layer_norm(y, y.shape[2:], eps=_LAYER_NORM_EPS))

    def conv(
        self, x: Signal, conv: Conv, *, snake: Snake | None = None, residual: Signal | None = None, keep: bool = True
    ) -> Signal:
        """As in Call. A snake is done with the product, or left to the layer behind, which copies its rows anyway."""
        batch, time, _ = x.rows.shape
        product, rows = self._backend.products[conv], self._rows(x, conv)
        if isinstance(product, Convolution):
            is_between = snake is not None and snake.frequency is None and not keep
            new = self._new("unit" if is_between else str(id(conv)))
            if residual is not None:
                return Signal(product(rows, total=residual.rows, new=new), snake)
            if is_between:
                return Signal(product(rows, snake=snake, new=new))
            y = product(rows, new=new)
        elif isinstance(product, ExactConvolution):
            y = product(rows, new=self._new(str(id(conv))))
        else:
            assert not isinstance(product, _ProductToOneChannel)
            y = product(rows)
        y = y.reshape(batch, time * conv.upsampling, -1)
        return Signal(y if residual is None else add(residual.rows, y), snake)

    def _rows(self, x: Signal, conv: Conv) -> Tensor:
        """Those that a convolution reads, its context first."""
        (batch, time, channels), dtype = x.rows.shape, self._backend.products[conv].dtype
        if not conv.context and x.snake is None and x.rows.dtype == dtype:
            return x.rows
        rows = _scratch.take("rows", (batch, conv.context + time, channels), self._backend.device, dtype)
        memories = self._turned(self._backend.memories[conv]) if conv.context else []
        _gather(x.rows, rows, x.snake, [past for past, _ in memories], [following for _, following in memories])
        return rows

    def samples(self, x: Signal, conv: Conv) -> Tensor:
        product, rows = self._backend.products[conv], self._rows(x, conv)
        assert isinstance(product, _ProductToOneChannel)

        def new(_: str, shape: Sequence[int], __: torch.dtype) -> Tensor:
            count = prod(shape)
            taken, self._samples[0] = self._samples[0][:count], self._samples[0][count:]
            return taken.view(shape)

        return product(rows, new=new).flatten()

    def pieces(self, x: Signal, block: Block) -> Iterator[tuple["_TorchCall", Signal]]:
        """As in Call. Units add to a copy: new memory for each of their sums would leave the cache."""
        for call, rows in self._cut(x.rows):
            if block.units:
                signal = _scratch.take("signal", rows.shape, rows.device)
                _gather(rows, signal)
                yield call, Signal(signal, x.snake)
            else:
                yield call, Signal(rows, x.snake)

    def _cut(self, x: Tensor) -> Iterator[tuple["_TorchCall", Tensor]]:
        _, time, channels = x.shape
        if self._backend.device.type != "cpu" or channels >= _MANY_CHANNELS:
            yield self, x
            return
        for call, row in zip(self._alone(), torch.split(x, 1), strict=True):
            yield from ((call, piece) for piece in torch.split(row, piece_rows(time, channels), dim=1))

    def _alone(self) -> "Iterator[_TorchCall]":
        """A call for each stream, which leaves its memories here."""
        if len(self.memories) == 1:
            yield self
            return
        for memory, following in zip(self.memories, self.nexts, strict=True):
            call = copy(self)
            call.memories, call.nexts = [memory], [following]
            yield call


class _RecordedCall:
    """The calls of kernels that a batch of one shape takes, made again for others; of one thread."""

    def __init__(self, backend: TorchBackend, call: "_TorchCall") -> None:
        """Make them for this call, whose streams share no state."""
        tensors = [*_tensors(call.memories), *_tensors(call.nexts)]
        self._backend, self._inputs, self._audio = backend, (call.codes, call.known, *call.rotary), call.audio
        with _scratch.kept() as self._buffers:
            self._recording = Recording(lambda: backend.decoded(call), tensors)

    def __call__(self, codes: Tensor, states: Sequence[DecoderState]) -> tuple[Tensor, list[DecoderState]]:
        call = _TorchCall(self._backend, codes, states)
        for own, new in zip(self._inputs, (codes, call.known, *call.rotary), strict=True):
            own.copy_(new)
        self._recording.replay([*_tensors(call.memories), *_tensors(call.nexts)])
        call.memories = call.nexts
        return self._audio.view(len(states), -1).clone(), call.states()


class _Recorded(threading.local):
    """Calls of a thread, by streams and frames."""

    def __init__(self) -> None:
        self.calls: dict[tuple[int, ...], _RecordedCall] = {}


def _copied(state: DecoderState) -> DecoderState:
    return replace(state, tensors=tuple(map(torch.clone, state.tensors)))


def _like(state: DecoderState) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in state.tensors]


def _tensors(states: Iterable[Iterable[Tensor]]) -> Iterator[Tensor]:
    for tensor in chain.from_iterable(states):
        assert tensor.is_contiguous(), tensor.stride()
        yield tensor


def _attend(q: Tensor, new: Tensor, mask: Tensor, histories: tuple[Tensor, Tensor]) -> Tensor:
    """Of one stream, [1, heads, frames, size], with new keys and values [2, heads, frames, size]."""
    past, following = histories
    known = torch.cat((past, new), dim=2)
    following.copy_(known[:, :, -past.shape[2] :])
    grouped = q.shape[1] != known.shape[1]
    return F.scaled_dot_product_attention(q, known[:1], known[1:], attn_mask=mask, enable_gqa=grouped)


def _window_mask(positions: Tensor, num_frames: int, *, window: int) -> Tensor:
    """Which keys each new frame sees, [B, 1, num_frames, window - 1 + num_frames] bool.

    Key j is the frame at position - (window - 1) + j: the history is right-aligned, and empty before a stream began.
    """
    query = torch.arange(num_frames, device=positions.device)[:, None]
    key = torch.arange(window - 1 + num_frames, device=positions.device)
    in_window = (key >= query) & (key < query + window)
    exists = key >= window - 1 - positions[:, None]
    return (in_window & exists[:, None, :])[:, None]


def _normed(x: Tensor, eps: float) -> Tensor:
    """x over its root mean square; the norm's weight is folded away."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def piece_rows(time: int, channels: int) -> int:
    """Rows of the pieces in which `time` rows pass a block."""
    count = -(-time * channels // _PIECE)
    rows = -(-time // count)
    return -(-rows // _ROWS_OF_A_PIECE) * _ROWS_OF_A_PIECE
