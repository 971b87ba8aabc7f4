"""The codec's own kernels for CPUs, of cpu_kernels.c; where it was not built there are none, and torch does all.

They are called through ctypes, whose calls leave Python to other threads.
"""

import ctypes
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from deployments.codec.fold import Snake

_Function = Callable[..., int]
_TYPES = {torch.float32: "float", torch.bfloat16: "bfloat16"}
SIDE = 32  # rows, inputs and outputs of the blocks that a convolution is made of
_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_ssize_t
_INTERFACE = 1  # what is called here, and how: both files change it together
_SNAKES = [f"snake_{source}_{target}" for source in _TYPES.values() for target in _TYPES.values()]
_PARAMETERS = {
    **{name: [*[_POINTER] * 4, *[_COUNT] * 2] for name in _SNAKES},
    "add_bfloat16": [*[_POINTER] * 2, _COUNT],
    "convolve": [ctypes.c_int, *[_POINTER] * 6, *[_COUNT] * 5],
}


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


class Convolution:
    """A convolution of each stream's rows in bfloat16 on the matrix units of a core, its sums in float32."""

    def __init__(self, weight: Tensor, bias: Tensor, dilation: int, *, units: int = MATRIX_UNITS) -> None:
        """`weight` is [taps, in, out], `bias` [out]; with fewer `units` than there are the same, slower."""
        taps, inputs, outputs = self._shape = weight.shape
        tiles = weight.reshape(taps, inputs // SIDE, SIDE // 2, 2, outputs // SIDE, 2, SIDE // 2)
        self._weight = tiles.permute(4, 0, 1, 5, 2, 6, 3).bfloat16().contiguous()
        self._bias, self._dilation, self._units = bias.float().contiguous(), dilation, units

    @staticmethod
    def fits(weight: Tensor, dtype: torch.dtype) -> bool:
        """Whether this CPU has units for such a weight [taps, in, out] in this type."""
        is_whole = not any(size % SIDE for size in weight.shape[1:])
        return weight.is_cpu and dtype == torch.bfloat16 and is_whole and MATRIX_UNITS > 0

    def __call__(self, rows: Tensor, *, snake: Snake | None = None, total: Tensor | None = None) -> Tensor:
        """`rows` [B, context + time, in] bfloat16 without gaps, `time` at least SIDE -> [B, time, out] bfloat16.

        Behind a `snake` without a frequency; or `total` [B, time, out] float32, to which the results are added.
        """
        taps, inputs, outputs = self._shape
        time = rows.shape[1] - (taps - 1) * self._dilation
        out = rows.new_empty(len(rows), time, outputs) if total is None else total
        assert rows.is_contiguous(), rows.stride()
        assert out.is_contiguous(), out.stride()
        assert snake is None or snake.frequency is None
        amplitude = None if snake is None else snake.amplitude.data_ptr()
        fixed, shape = (self._weight.data_ptr(), self._bias.data_ptr(), amplitude), (time, taps, self._dilation)
        for own, result in zip(rows, out, strict=True):
            pointer = result.data_ptr()
            target = (pointer, None) if total is None else (None, pointer)
            _functions["convolve"](self._units, own.data_ptr(), *fixed, *target, *shape, inputs, outputs)
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
