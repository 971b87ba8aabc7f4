"""The codec's own kernels for CPUs, of cpu_kernels.c; where it was not built there are none, and torch does all.

They are called through ctypes, whose calls leave Python to other threads.
"""

import ctypes
import mmap
from collections.abc import Callable
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
_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_ssize_t
_INTERFACE = 2  # what is called here, and how: both files change it together
_SNAKES = [f"snake_{source}_{target}" for source in _TYPES.values() for target in _TYPES.values()]
_PARAMETERS = {
    **{name: [*[_POINTER] * 4, *[_COUNT] * 2] for name in _SNAKES},
    "add_bfloat16": [*[_POINTER] * 2, _COUNT],
    "convolve": [*[ctypes.c_int] * 2, *[_POINTER] * 5, *[_COUNT] * 6],
    "multiply": [ctypes.c_int, *[_POINTER] * 4, *[_COUNT] * 3],
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


def apply_snake(snake: Snake, x: Tensor, out: Tensor) -> bool:
    """Fill `out` [B, time, channels] with x behind the snake, each stream's rows without gaps; False: not done."""
    function = _functions.get(f"snake_{_TYPES.get(x.dtype)}_{_TYPES.get(out.dtype)}")
    _, time, channels = x.shape
    rows = channels, 1
    if function is None or not x.is_cpu or x.stride()[1:] != rows or out.stride()[1:] != rows:
        return False
    frequency = None if snake.frequency is None else snake.frequency.data_ptr()
    for source, target in zip(x, out, strict=True):
        function(source.data_ptr(), target.data_ptr(), frequency, snake.amplitude.data_ptr(), time, channels)
    return True


def add(total: Tensor, x: Tensor) -> Tensor:
    """`total` float32, to which x of the same shape is added."""
    function = _functions.get("add_bfloat16")
    fits = x.dtype == torch.bfloat16 and total.dtype == torch.float32 and total.is_contiguous() and x.is_contiguous()
    if function is None or not x.is_cpu or not fits:
        return total.add_(x)
    function(total.data_ptr(), x.data_ptr(), x.numel())
    return total
