"""The codec's own kernels for CPUs, of cpu_kernels.c; where it was not built there are none, and torch does all.

They are called through ctypes, whose calls leave Python to other threads.
"""

import ctypes
import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from importlib.util import find_spec

import torch
from torch import Tensor

from deployments.codec.fold import Snake

_Function = Callable[..., int]
_TYPES = {torch.float32: "float", torch.bfloat16: "bfloat16"}
SIDE = 32  # inputs and outputs of the blocks that a product is made of
_HALF = SIDE // 2  # and rows
_LINE = 64  # bytes
_MOST = 256  # keys of a query, and values of each
_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_ssize_t
_INTERFACE = 3  # what is called here, and how: both files change it together
_GATHERS = [f"gather_{source}_{target}" for source in _TYPES.values() for target in _TYPES.values()]
_PARAMETERS = {
    **{name: [*[_POINTER] * 6, *[_COUNT] * 3] for name in _GATHERS},
    "add_bfloat16": [*[_POINTER] * 2, _COUNT],
    "convolve_to_one": [*[_POINTER] * 4, *[_COUNT] * 3],
    "convolve": [*[ctypes.c_int] * 2, *[_POINTER] * 5, *[_COUNT] * 6],
    "multiply": [ctypes.c_int, *[_POINTER] * 4, *[_COUNT] * 3],
    "attend": [*[_POINTER] * 6, *[_COUNT] * 6],
    "depthwise_norm": [*[_POINTER] * 6, ctypes.c_float, *[_COUNT] * 3],
    "normed_bfloat16": [*[_POINTER] * 2, ctypes.c_float, *[_COUNT] * 2],
}


class Kind(IntEnum):
    """What becomes of the sums of a convolution, as cpu_kernels.c numbers it."""

    WIDE = 0  # float32
    ADDED = 1  # to float32
    ROUNDED = 2  # bfloat16, and so are those below
    SNAKED = 3
    GELU = 4
    GATED = 5


def _built() -> dict[str, _Function]:
    spec = find_spec("deployments.codec._cpu_kernels")
    if spec is None or spec.origin is None:
        return {}
    library = ctypes.CDLL(spec.origin)
    if library.interface() != _INTERFACE:
        return {}
    for name, parameters in _PARAMETERS.items():
        getattr(library, name).argtypes, getattr(library, name).restype = parameters, None
    return {name: getattr(library, name) for name in ("matrix_units", *_PARAMETERS)}


_functions = _built()
BUILT = bool(_functions)
# What multiplies bfloat16 here: 0 nothing, 1 AVX-512's dot products, 2 AMX. Asked once: AMX wants the kernel's leave.
MATRIX_UNITS = _functions["matrix_units"]() if BUILT else 0


def fits(weight: Tensor) -> bool:
    """Whether this CPU has units for a decoder in bfloat16 with such a weight [taps, in, out]."""
    return weight.is_cpu and MATRIX_UNITS > 0 and not any(size % SIDE for size in weight.shape[1:])


class _HugePages:
    """Memory for weights in pages of 2 MB, where the kernel has them to give.

    A core reads weights a quarter faster from those: prefetching ends at pages, and their addresses have to be found.
    """

    _CHUNK, _PAGE = 32 << 20, 2 << 20

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensor: Tensor) -> Tensor:
        """Of a tensor, without gaps, for good."""
        size = -(-tensor.nbytes // _LINE) * _LINE
        if size > len(self._free):
            self._free = self._mapped(max(size, self._CHUNK))
        taken, self._free = self._free[: tensor.nbytes], self._free[size:]
        return taken.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def _mapped(self, size: int) -> Tensor:
        memory = mmap.mmap(-1, size + self._PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        chunk = torch.frombuffer(memory, dtype=torch.uint8)
        return chunk[-chunk.data_ptr() % self._PAGE :][:size]


_pages = _HugePages()


class Convolution:
    """A convolution of each stream's rows in bfloat16 on the matrix units of a core, its sums in float32."""

    dtype = torch.bfloat16

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        dilation: int = 1,
        *,
        gated: bool = False,
        units: int = MATRIX_UNITS,
    ) -> None:
        """`weight` is [taps, in, out], `bias` [out]; with fewer `units` than there are the same, slower.

        `gated` makes silu of the first half of the outputs times the second one.
        """
        taps, inputs, outputs = self._shape = weight.shape
        bias = weight.new_zeros(outputs) if bias is None else bias
        if gated:
            order = torch.arange(outputs).view(2, -1, _HALF).transpose(0, 1).flatten()
            weight, bias = weight[:, :, order], bias[order]
        tiles = weight.reshape(taps, inputs // SIDE, _HALF, 2, outputs // SIDE, 2, _HALF)
        self._weight = _pages.copy(tiles.permute(4, 0, 1, 5, 2, 6, 3).bfloat16())
        self._bias, self._dilation, self._gated, self._units = bias.float().contiguous(), dilation, gated, units

    def __call__(
        self,
        rows: Tensor,
        *,
        snake: Snake | None = None,
        total: Tensor | None = None,
        gelu: bool = False,
        wide: bool = False,
    ) -> Tensor:
        """`rows` [B, context + time, in] bfloat16 without gaps -> [B, time, out] bfloat16, or float32 if `wide`.

        Behind a `snake` without a frequency, or `gelu`; or `total` [B, time, out] float32, to which the results are
        added.
        """
        assert snake is None or snake.frequency is None
        assert rows.dtype == torch.bfloat16, rows.dtype
        taps, inputs, outputs = self._shape
        dilation, streams, time = self._dilation, len(rows), rows.shape[1] - (taps - 1) * self._dilation
        width = outputs // 2 if self._gated else outputs
        if total is not None:
            out, kind = total, Kind.ADDED
        elif wide:
            out, kind = rows.new_empty((streams, time, width), dtype=torch.float32), Kind.WIDE
        else:
            out, kind = rows.new_empty((streams, time, width)), Kind.GATED if self._gated else Kind.ROUNDED
            kind = Kind.GELU if gelu else kind if snake is None else Kind.SNAKED
        if taps > 1 and time < _HALF:
            rows, taps, dilation, inputs = unfolded(rows, taps, dilation), 1, 1, taps * inputs
        if taps == 1:
            streams, time = 1, streams * time
        assert rows.is_contiguous(), rows.stride()
        assert out.is_contiguous(), out.stride()
        amplitude = None if snake is None else snake.amplitude.data_ptr()
        pointers = (rows.data_ptr(), self._weight.data_ptr(), self._bias.data_ptr(), amplitude, out.data_ptr())
        _functions["convolve"](self._units, kind, *pointers, streams, time, taps, dilation, inputs, outputs)
        return out


class ExactConvolution:
    """A convolution of few rows in float32, for a CPU with such units."""

    dtype = torch.float32

    def __init__(self, weight: Tensor, bias: Tensor | None, dilation: int = 1, *, units: int = MATRIX_UNITS) -> None:
        """As Convolution."""
        self._taps, inputs, outputs = weight.shape
        self._dilation, self._units = dilation, units
        self._weight = _pages.copy(weight.reshape(self._taps * inputs, -1, SIDE).transpose(0, 1).float())
        self._bias = weight.new_zeros(outputs) if bias is None else bias.float().contiguous()

    def __call__(self, rows: Tensor) -> Tensor:
        """`rows` [B, context + time, in] float32 without gaps -> [B, time, out] float32."""
        assert rows.dtype == torch.float32, rows.dtype
        rows = unfolded(rows, self._taps, self._dilation) if self._taps > 1 else rows
        assert rows.is_contiguous(), rows.stride()
        panels, inputs, _ = self._weight.shape
        out = rows.new_empty(*rows.shape[:2], panels * SIDE)
        pointers = (rows.data_ptr(), self._weight.data_ptr(), self._bias.data_ptr(), out.data_ptr())
        _functions["multiply"](self._units, *pointers, out[:, :, 0].numel(), inputs, panels * SIDE)
        return out


def unfolded(rows: Tensor, taps: int, dilation: int) -> Tensor:
    """What each row of a convolution is a product of, [B, time, taps * in], of rows [B, context + time, in]."""
    batch, length, channels = rows.shape
    shape = (batch, length - (taps - 1) * dilation, taps, channels)
    return rows.as_strided(shape, (length * channels, channels, dilation * channels, 1)).flatten(2).contiguous()


def normed(x: Tensor, eps: float) -> Tensor:
    """x [..., channels] float32 over its root mean square, bfloat16; channels are a multiple of 32."""
    assert x.is_contiguous(), x.stride()
    out = torch.empty_like(x, dtype=torch.bfloat16)
    channels = x.shape[-1]
    _functions["normed_bfloat16"](x.data_ptr(), out.data_ptr(), eps, x.numel() // channels, channels)
    return out


def attends(size: int, window: int) -> bool:
    """Whether `attend` takes heads of this size and windows of so many frames."""
    return size % SIDE == 0 and max(size, window) <= _MOST


def attend(qkv: Tensor, rotary: Sequence[Tensor], history: Tensor, *, heads: int, known: int) -> tuple[Tensor, Tensor]:
    """Attention of one stream [frames, heads * size] bfloat16, and its next history.

    `qkv` [frames, (heads + 2 * kv_heads) * size] float32 is lost, `rotary` are cosines and sines [frames, size],
    `history` [2, kv_heads, window - 1, size] float32 has `known` frames, and as many are used as it has rows.
    """
    _, kv_heads, past, size = history.shape
    frames, following = len(qkv), torch.empty_like(history)
    out = qkv.new_empty((frames, heads * size), dtype=torch.bfloat16)
    tensors = (qkv, *rotary, history, following, out)
    assert all(tensor.is_contiguous() for tensor in tensors)
    pointers = [tensor.data_ptr() for tensor in tensors]
    _functions["attend"](*pointers, frames, heads, kv_heads, past + 1, size, known)
    return out, following


def depthwise_norm(x: Tensor, memory: Tensor, taps: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """One stream's rows [time, channels] behind the convolution of each channel, normed, in bfloat16; its next memory.

    x, `memory` [count - 1, channels] and `taps` [count, channels] are float32, channels at most 4096.
    """
    out, following = torch.empty_like(x, dtype=torch.bfloat16), torch.empty_like(memory)
    tensors = (memory, x, taps, bias, following, out)
    assert all(tensor.is_contiguous() for tensor in tensors)
    pointers = [tensor.data_ptr() for tensor in tensors]
    _functions["depthwise_norm"](*pointers, eps, len(x), *taps.shape)
    return out, following


def gather(x: Tensor, out: Tensor, snake: Snake | None = None, pasts: Sequence[Tensor] = ()) -> list[Tensor] | None:
    """Fill `out` [B, context + time, channels] with the streams' pasts [context, channels], and x behind the snake.

    Returns the next pasts; None: not done. Rows of each stream have no gaps, pasts are of the type of `out`.
    """
    function = _functions.get(f"gather_{_TYPES.get(x.dtype)}_{_TYPES.get(out.dtype)}")
    streams, time, channels = x.shape
    rows = channels, 1
    if function is None or not x.is_cpu or x.stride()[1:] != rows or out.stride()[1:] != rows:
        return None
    frequency = None if snake is None or snake.frequency is None else snake.frequency.data_ptr()
    amplitude = None if snake is None else snake.amplitude.data_ptr()
    context, nexts = out.shape[1] - time, [torch.empty_like(past) for past in pasts]
    assert len(pasts) == (streams if context else 0), len(pasts)
    source, target = x.data_ptr(), out.data_ptr()
    from_one, to_one = x.stride(0) * x.itemsize, out.stride(0) * out.itemsize
    for stream in range(streams):
        past, following = (pasts[stream].data_ptr(), nexts[stream].data_ptr()) if context else (target, target)
        function(source, target, frequency, amplitude, past, following, context, time, channels)
        source, target = source + from_one, target + to_one
    return nexts


def convolve_to_one(rows: Tensor, taps: Tensor, bias: Tensor) -> Tensor | None:
    """A convolution of rows [B, count - 1 + time, channels] with taps [count, channels] -> [B, time, 1], or None.

    None is: not done. All in float32.
    """
    function, (streams, length, channels), count = _functions.get("convolve_to_one"), rows.shape, len(taps)
    if function is None or not rows.is_cpu or channels % _HALF or not rows.is_contiguous():
        return None
    out = rows.new_empty(streams, length - count + 1, 1)
    for own, samples in zip(rows, out, strict=True):
        pointers = (own.data_ptr(), taps.data_ptr(), bias.data_ptr(), samples.data_ptr())
        function(*pointers, len(samples), count, channels)
    return out


def add(total: Tensor, x: Tensor) -> Tensor:
    """`total` float32, to which x of the same shape is added."""
    function = _functions.get("add_bfloat16")
    fits = x.dtype == torch.bfloat16 and total.dtype == torch.float32 and total.is_contiguous() and x.is_contiguous()
    if function is None or not x.is_cpu or not fits:
        return total.add_(x)
    function(total.data_ptr(), x.data_ptr(), x.numel())
    return total
