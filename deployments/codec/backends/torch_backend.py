"""Forward pass of the decoder in torch, on any device. On a CPU each layer is one convolution with packed weights.

C kernels (c_kernels.py) compute the layers that they support: in bfloat16 on a CPU with bfloat16 units, and in float32
on a CPU with AVX2 only. If they support all layers, as with the released checkpoints, the calls for a batch are
captured and replayed.

A lower precision applies only to products. Sums, snakes, the last convolution and attention stay in float32. On a CPU,
layers with many channels are limited by reading weights and process all streams together. The other layers are limited
by reading activations. For those, one stream's short piece of audio passes through all remaining layers at once, which
keeps the piece in the cache.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from itertools import chain
from math import prod
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from deployments.codec.backends import c_kernels
from deployments.codec.backends.c_kernels import CapturedCalls, Convolution, New, normed
from deployments.codec.backends.products import (
    MANY_CHANNELS,
    ProductToOneChannel,
    gather,
    onednn_packs,
    packed,
    scratch,
)
from deployments.codec.decoder import Backend
from deployments.codec.decoder_state import DecoderState
from deployments.codec.fold import Block, Conv, ConvNeXt, FoldedWeights, Layer, Linear, Snake, with_frequency
from deployments.codec.forward import ForwardPass, Signal, last_samples, latents, waveform
from deployments.codec.rotary import rotary_tables, rotate

_LAYER_NORM_EPS = 1e-6
_POSITIONS = 2048  # number of frames for which rotary angles are precomputed
_CAPTURED_FRAMES = 64  # limit across all streams; larger calls are rare, and Python accounts for little of their time
_PIECE = 250_000  # values that a block computes at once; a few buffers of this size fit in a 2 MB second-level cache
_ROWS_OF_A_PIECE = 16  # pieces are multiples of 16, because oneDNN is slow otherwise (520 or 587 with torch 2.11)


class TorchBackend(Backend):
    """Backend that uses folded and packed weights."""

    def __init__(self, folded: FoldedWeights, precision: str = "float32") -> None:
        """Pack the weights. `precision` is the number format of the products.

        Disables TF32 in cuDNN for this process, because TF32 reaches only 34 dB on stressed weights. float32 is the
        reference for other formats, and is used to repair streams.
        """
        torch.backends.cudnn.allow_tf32 = False
        self.config = folded.config
        self.device = folded.tables.device
        self.precision = precision
        self._given = folded
        blocks = (replace(block, units=tuple(map(with_frequency, block.units))) for block in folded.blocks)
        self.folded = folded = replace(folded, blocks=tuple(blocks))
        self.products = dict(packed(folded, getattr(torch, precision)))
        self.memories: dict[Conv | ConvNeXt | Layer, int] = {}  # index of a layer's tensor in a stream's state
        self.initial_state = DecoderState(0, tuple(self._silence()))
        self.attends = self._uses_c_kernels(*(layer.output for layer in folded.layers)) and c_kernels.attends(
            self.config.head_dim, self.config.sliding_window
        )
        self.eps, self.layer_norm_eps = (
            torch.tensor(eps, device=self.device) for eps in (self.config.rms_norm_eps, _LAYER_NORM_EPS)
        )
        *others, _ = self.products
        self._uses_only_c_kernels = (
            self.attends and self._uses_c_kernels(*others) and folded.blocks[-1].conv.channels % _ROWS_OF_A_PIECE == 0
        )
        self._rotary = self._rotary_tables(_POSITIONS)
        self._captured = _Captured()

    @staticmethod
    def precisions(device: torch.device) -> tuple[str, ...]:
        if device.type != "cpu":
            return "float16", "bfloat16"  # bfloat16 does not overflow
        return ("bfloat16",) if _multiplies_bfloat16() else ()

    def at(self, precision: str) -> "TorchBackend":
        return TorchBackend(self._given, precision)

    @property
    def advice(self) -> str:
        if self.device.type != "cpu" or c_kernels.BUILT:
            return ""
        return "torch decodes at half the speed of the C kernels: install a C compiler and reinstall Talkray"

    def decode(self, codes: Tensor, states: Sequence[DecoderState]) -> tuple[Tensor, list[DecoderState]]:
        if not self._uses_only_c_kernels or codes[:, :, 0].numel() > _CAPTURED_FRAMES:
            call = _TorchPass(self, codes, states)
            return self.decoded(call).clone(), call.states()
        captured = self._captured.calls.get(codes.shape[:2])
        if captured is not None:
            return captured(codes, states)
        copied = [replace(state, tensors=tuple(map(torch.clone, state.tensors))) for state in states]
        call = _TorchPass(self, codes.clone(), copied)
        self._captured.calls[codes.shape[:2]] = _CapturedCall(self, call)
        return call.audio.view(len(states), -1).clone(), call.states()

    def decoded(self, call: "_TorchPass") -> Tensor:
        """Return unclipped samples [B, frames * frame_samples], in memory that the thread's next call may reuse."""
        return waveform(call, self.folded, latents(call, self.folded)).view(call.streams, -1)

    def recall(
        self, codes: Tensor, states: Sequence[DecoderState], *, followed_by: int
    ) -> tuple[Tensor, list[DecoderState]]:
        call = _TorchPass(self, codes, states)
        x = latents(call, self.folded)
        if followed_by >= self.config.convolved_frames:
            return x.values, call.states()
        return last_samples(call, self.folded, x).view(len(states), -1), call.states()

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [..., head_dim] of positions [...]."""
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

    def _uses_c_kernels(self, *layers: Conv | Linear) -> bool:
        """Return whether the C kernels compute these products."""
        return all(isinstance(self.products[layer], Convolution) for layer in layers)

    def _silence(self) -> Iterator[Tensor]:
        """Yield the tensors of a stream's state before its first frame."""
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


class _TorchPass(ForwardPass):
    """One forward pass. Each layer reads its own tensor for each stream and replaces it for the next call."""

    def __init__(self, backend: TorchBackend, codes: Tensor, states: Sequence[DecoderState]) -> None:
        self._backend = backend
        self.codes = codes
        self.streams = len(states)
        self._positions = [state.position for state in states]
        self.memories = [list(state.tensors) for state in states]  # by stream, then by layer
        self.nexts = [list(map(torch.empty_like, state.tensors)) for state in states]
        frames, device = codes.shape[1], backend.device
        self.num_past = torch.tensor(self._positions, device=device)
        self.rotary = backend.rotary(self.num_past[:, None] + torch.arange(frames, device=device))
        self._mask = None
        if not backend.attends:
            self._mask = _window_mask(self.num_past, frames, window=backend.config.sliding_window)
        self.audio = scratch.buffer("audio", (len(states) * frames * backend.config.frame_samples,), device)
        self._samples = [self.audio]  # remaining memory for the next samples

    def states(self) -> list[DecoderState]:
        """Return the states of the streams after this call."""
        frames = self.codes.shape[1]
        return [
            DecoderState(position + frames, tuple(memory))
            for position, memory in zip(self._positions, self.memories, strict=True)
        ]

    def embed(self) -> Signal:
        folded = self._backend.folded
        if self._backend.attends:
            new = self._new("embedded")
            return Signal(c_kernels.embed(self.codes, folded.offsets, folded.tables, new=new))
        return Signal(F.embedding(self.codes + folded.offsets, folded.tables).sum(dim=2))

    def _new(self, name: str) -> New:
        """Return a memory allocator for a kernel's result, valid until another kernel uses the same name."""
        device = self._backend.device
        return lambda part, shape, dtype: scratch.buffer(f"{name} {part}", shape, device, dtype)

    def linear(self, x: Signal, linear: Linear, *, norm: bool = False, gate: Linear | None = None, gelu: bool = False,
               residual: Signal | None = None) -> Signal:  # fmt: skip
        """Multiply. The weight of a gate is packed together with the weight of `linear`."""
        product = self._backend.products[linear]
        if isinstance(product, Convolution):
            new = self._new(str(id(linear)))
            rows = normed(x.values, self._backend.eps, product.dtype, new=self._new("normed")) if norm else x.values
            total = None if residual is None else residual.values
            wide = gate is None and not gelu
            return Signal(product(rows.to(product.dtype), total=total, gelu=gelu, wide=wide, new=new))
        assert not isinstance(product, ProductToOneChannel)
        y = product(_normed(x.values, self._backend.config.rms_norm_eps) if norm else x.values)
        if residual is not None:
            return Signal(residual.values + y)
        y = y.float()
        if gate is not None:
            gates, ups = y.chunk(2, dim=2)
            y = F.silu(gates) * ups
        return Signal(F.gelu(y) if gelu else y)

    def attend(self, qkv: Signal, layer: Layer) -> Signal:
        backend, index = self._backend, self._backend.memories[layer]
        heads, kv_heads = backend.config.num_attention_heads, backend.config.num_key_value_heads
        if self._mask is None:
            shape = (*qkv.values.shape[:2], heads * backend.config.head_dim)
            y = scratch.buffer("attended", shape, backend.device, backend.products[layer.output].dtype)
            for stream, histories in enumerate(self._turned(index)):
                rotary = [table[stream] for table in self.rotary]
                c_kernels.attend(qkv.values[stream], rotary, histories, self.num_past[stream], y[stream])
            return Signal(y)
        rows = qkv.values.view(*qkv.values.shape[:2], -1, backend.config.head_dim).transpose(1, 2)
        q, k, v = torch.split(rows, [heads, kv_heads, kv_heads], dim=1)
        cosines, sines = (table[:, None] for table in self.rotary)
        q, new = rotate(q, (cosines, sines)), torch.stack((rotate(k, (cosines, sines)), v), dim=1)
        streams = zip(torch.split(q, 1), new, torch.split(self._mask, 1), self._turned(index), strict=True)
        y = torch.cat([_attend(*stream) for stream in streams])
        return Signal(y.transpose(1, 2).flatten(2))

    def _turned(self, index: int) -> list[tuple[Tensor, Tensor]]:
        """Return a layer's memory for each stream, and the tensor for its next memory.

        Starting with the second piece, both are the same tensor.
        """
        pairs = [(memory[index], following[index]) for memory, following in zip(self.memories, self.nexts, strict=True)]
        for memory, (_, following) in zip(self.memories, pairs, strict=True):
            memory[index] = following
        return pairs

    def depthwise_norm(self, x: Signal, block: ConvNeXt) -> Signal:
        new = x.values.float()
        memories = self._turned(self._backend.memories[block])
        product = self._backend.products[block.up]
        if isinstance(product, Convolution):
            y = scratch.buffer("depthwise", new.shape, new.device, product.dtype)
            for stream, pair, out in zip(new, memories, y, strict=True):
                c_kernels.depthwise_norm(stream, pair, block, self._backend.layer_norm_eps, out)
            return Signal(y)
        rows = torch.cat((torch.stack([past for past, _ in memories]), new), dim=1)
        time = new.shape[1]
        for stream, (_, following) in zip(rows, memories, strict=True):
            following.copy_(stream[time:])
        y = block.bias + sum(rows[:, tap : tap + time] * weight for tap, weight in enumerate(block.taps))
        return Signal(F.layer_norm(y, y.shape[2:], eps=_LAYER_NORM_EPS))

    def conv(
        self, x: Signal, conv: Conv, *, snake: Snake | None = None, residual: Signal | None = None, plain: bool = True
    ) -> Signal:
        """Convolve. A snake is applied with the product, or by the next layer, which copies its rows anyway."""
        batch, time, _ = x.values.shape
        product, rows = self._backend.products[conv], self._rows(x, conv)
        if isinstance(product, Convolution):
            is_between = snake is not None and snake.frequency is None and not plain
            new = self._new("unit" if is_between else str(id(conv)))
            if is_between:
                return Signal(product(rows, snake=snake, new=new))
            y = product(rows, total=None if residual is None else residual.values, new=new)
            residual = None
        else:
            assert not isinstance(product, ProductToOneChannel)
            y = product(rows)
        y = y.reshape(batch, time * conv.upsampling, -1)
        return Signal(y if residual is None else residual.values.add_(y), snake)

    def _rows(self, x: Signal, conv: Conv) -> Tensor:
        """Return the input rows of a convolution, preceded by its context."""
        batch, time, channels = x.values.shape
        dtype = self._backend.products[conv].dtype
        if not conv.context and x.snake is None and x.values.dtype == dtype:
            return x.values
        rows = scratch.buffer("rows", (batch, conv.context + time, channels), self._backend.device, dtype)
        memories = self._turned(self._backend.memories[conv]) if conv.context else []
        gather(x.values, rows, x.snake, [past for past, _ in memories], [following for _, following in memories])
        return rows

    def samples(self, x: Signal, conv: Conv) -> Tensor:
        product, rows = self._backend.products[conv], self._rows(x, conv)
        assert isinstance(product, ProductToOneChannel)

        def new(_: str, shape: Sequence[int], __: torch.dtype) -> Tensor:
            count = prod(shape)
            place, self._samples[0] = self._samples[0][:count], self._samples[0][count:]
            return place.view(shape)

        return product(rows, new=new).flatten()

    def pieces(self, x: Signal, block: Block) -> Iterator[tuple["_TorchPass", Signal]]:
        """Split x. Units add to a copy in place, because new memory for each sum would not stay in the cache."""
        for call, rows in self._cut(x.values):
            if block.units:
                signal = scratch.buffer("signal", rows.shape, rows.device)
                gather(rows, signal)
                yield call, Signal(signal, x.snake)
            else:
                yield call, Signal(rows, x.snake)

    def _cut(self, x: Tensor) -> Iterator[tuple["_TorchPass", Tensor]]:
        _, time, channels = x.shape
        if self._backend.device.type != "cpu" or channels >= MANY_CHANNELS:
            yield self, x
            return
        for call, row in zip(self._alone(), torch.split(x, 1), strict=True):
            yield from ((call, piece) for piece in torch.split(row, piece_rows(time, channels), dim=1))

    def _alone(self) -> "Iterator[_TorchPass]":
        """Yield a pass for each stream that holds only that stream's memories. All other attributes are shared."""
        if len(self.memories) == 1:
            yield self
            return
        for memory, following in zip(self.memories, self.nexts, strict=True):
            call = copy(self)
            call.memories, call.nexts = [memory], [following]
            yield call


def _multiplies_bfloat16() -> bool:
    """Return whether the C kernels or oneDNN multiply bfloat16 using this CPU's hardware units.

    Checks CPU flags for oneDNN, because it also packs for CPUs on which it emulates bfloat16 slowly.
    """
    has_units = not {"amx_bf16", "avx512_bf16"}.isdisjoint(_cpu_flags())
    return c_kernels.MATRIX_UNITS > 0 or (has_units and onednn_packs(torch.bfloat16))


def _cpu_flags() -> list[str]:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return next((line.split() for line in lines if line.startswith("flags")), [])


class _CapturedCall:
    """Captured kernel calls for batches of one shape, replayed for later batches. Belongs to one thread."""

    def __init__(self, backend: TorchBackend, call: "_TorchPass") -> None:
        """Capture the kernel calls of `call`, whose streams must not share states."""
        tensors = [*_tensors(call.memories), *_tensors(call.nexts)]
        self._backend = backend
        self._inputs = (call.codes, call.num_past, *call.rotary)
        self._audio = call.audio
        with scratch.kept() as self._buffers:
            self._kernel_calls = CapturedCalls(lambda: backend.decoded(call), tensors)

    def __call__(self, codes: Tensor, states: Sequence[DecoderState]) -> tuple[Tensor, list[DecoderState]]:
        call = _TorchPass(self._backend, codes, states)
        for own, new in zip(self._inputs, (codes, call.num_past, *call.rotary), strict=True):
            own.copy_(new)
        self._kernel_calls.replay([*_tensors(call.memories), *_tensors(call.nexts)])
        call.memories = call.nexts
        return self._audio.view(len(states), -1).clone(), call.states()


class _Captured(threading.local):
    """A thread's captured calls, keyed by number of streams and number of frames."""

    def __init__(self) -> None:
        self.calls: dict[tuple[int, ...], _CapturedCall] = {}


def _tensors(states: Iterable[Iterable[Tensor]]) -> Iterator[Tensor]:
    for tensor in chain.from_iterable(states):
        assert tensor.is_contiguous(), tensor.stride()
        yield tensor


def _attend(q: Tensor, new: Tensor, mask: Tensor, histories: tuple[Tensor, Tensor]) -> Tensor:
    """Attention within one stream: queries [1, heads, frames, size], new keys and values [2, heads, frames, size]."""
    past, following = histories
    joined = torch.cat((past, new), dim=2)
    following.copy_(joined[:, :, -past.shape[2] :])
    grouped = q.shape[1] != joined.shape[1]
    return F.scaled_dot_product_attention(q, joined[:1], joined[1:], attn_mask=mask, enable_gqa=grouped)


def _window_mask(positions: Tensor, num_frames: int, *, window: int) -> Tensor:
    """Return the keys that each new frame attends to, [B, 1, num_frames, window - 1 + num_frames] bool.

    Key j is the frame at position - (window - 1) + j. The history is right-aligned. Keys before a stream's first frame
    are masked.
    """
    query = torch.arange(num_frames, device=positions.device)[:, None]
    key = torch.arange(window - 1 + num_frames, device=positions.device)
    in_window = (key >= query) & (key < query + window)
    exists = key >= window - 1 - positions[:, None]
    return (in_window & exists[:, None, :])[:, None]


def _normed(x: Tensor, eps: float) -> Tensor:
    """Divide x by its root mean square. The norm's weight is folded into the next layer."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def piece_rows(time: int, channels: int) -> int:
    """Return the number of rows in each piece when `time` rows pass through a block."""
    count = -(-time * channels // _PIECE)
    rows = -(-time // count)
    return -(-rows // _ROWS_OF_A_PIECE) * _ROWS_OF_A_PIECE
