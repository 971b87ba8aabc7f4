"""Interface to the codec's CPU kernels in c_kernels.c. If they are not built, torch computes everything.

Kernels are called through ctypes, which releases the GIL during calls.
"""

import ctypes
from collections.abc import Callable, Sequence
from contextvars import ContextVar

import torch
from torch import Tensor

from deployments.c_library import COUNT, POINTER, built_library
from deployments.codec.fold import ConvNeXt, Snake
from deployments.huge_pages import copy_to_huge_pages

_Function = Callable[..., int]
New = Callable[[str, Sequence[int], torch.dtype], Tensor]  # allocates memory for a named result of a shape and a dtype
_TYPES = {torch.float32: "float", torch.bfloat16: "bfloat16"}
SIDE = 32  # number of inputs and outputs in one block of a matrix product
_HALF = SIDE // 2  # number of rows in a block
_MOST = 256  # maximum number of keys per query, and of values per key
_INTERFACE = 6  # version of the functions and their arguments; must match the one in c_kernels.c
_GATHERS = [f"gather_{source}_{target}" for source in _TYPES.values() for target in _TYPES.values()]
_PARAMETERS = {
    **{name: [*[POINTER] * 6, *[COUNT] * 3] for name in _GATHERS},
    "convolve_to_one": [*[POINTER] * 4, *[COUNT] * 3],
    "convolve": [*[COUNT] * 3, *[POINTER] * 5, *[COUNT] * 6],
    "multiply": [*[COUNT] * 2, *[POINTER] * 5, *[COUNT] * 6],
    "filter": [*[POINTER] * 6, *[COUNT] * 5],
    "unfold": [*[POINTER] * 2, *[COUNT] * 5],
    "embed": [*[POINTER] * 4, *[COUNT] * 3],
    "norm": [*[POINTER] * 2, COUNT, POINTER, *[COUNT] * 2],
    "attend": [*[POINTER] * 6, *[COUNT] * 6, POINTER],
    "depthwise_norm": [*[POINTER] * 6, COUNT, POINTER, *[COUNT] * 3],
    "replay": [POINTER, COUNT],
}
_WORDS = 16  # size of one replay step: the function and its arguments
_PLAIN, _ADDED, _SNAKED, _GELU, _GATED = range(5)  # what happens to a convolution's sums, numbered as in c_kernels.c


def _built() -> dict[str, _Function]:
    library = built_library("deployments.codec.backends._c_kernels", _PARAMETERS, interface=_INTERFACE)
    names = ("matrix_units", "multiplies_floats", *_PARAMETERS)
    return {} if library is None else {name: getattr(library, name) for name in names}


_functions = _built()
BUILT = bool(_functions)
# Hardware unit of this CPU for bfloat16 products: 0 none, 1 AVX-512 dot products, 2 AMX. Queried once, because the
# query asks the kernel for permission to use AMX.
MATRIX_UNITS = _functions["matrix_units"]() if BUILT else 0
MULTIPLIES_FLOATS = BUILT and bool(_functions["multiplies_floats"]())


# Calls captured in this thread; None while calls are not being captured
_captured: ContextVar[list[tuple[int, ...]] | None] = ContextVar("captured", default=None)


def _invoke(name: str, *words: int | None) -> None:
    function = _functions[name]
    function(*words)
    if (steps := _captured.get()) is not None:
        address = ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]
        steps.append((address, *(word or 0 for word in words)))


class CapturedCalls:
    """Captured kernel calls that can be replayed with some tensors replaced.

    A replay avoids the 50 us that Python and torch spend between two kernels. They are that slow because the weights
    have evicted their data from the cache.
    """

    def __init__(self, calls: Callable[[], object], tensors: Sequence[Tensor]) -> None:
        """Run `calls` and capture their kernel calls. All tensors used, except `tensors`, must stay in place."""
        steps: list[tuple[int, ...]] = []
        token = _captured.set(steps)
        try:
            calls()
        finally:
            _captured.reset(token)
        words = [word for step in steps for word in (*step, *[0] * (_WORDS - len(step)))]
        numbers = {tensor.data_ptr(): number for number, tensor in enumerate(tensors)}
        self._words = torch.tensor(words, dtype=torch.int64)
        self._places = torch.tensor([place for place, word in enumerate(words) if word in numbers])
        self._numbers = torch.tensor([numbers[word] for word in words if word in numbers])

    def replay(self, tensors: Sequence[Tensor]) -> None:
        """Repeat the calls with these tensors instead of the captured ones."""
        pointers = torch.tensor([tensor.data_ptr() for tensor in tensors])
        self._words[self._places] = pointers[self._numbers]
        _functions["replay"](self._words.data_ptr(), len(self._words) // _WORDS)


def _empty(_: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(*shape, dtype=dtype)


def fits(weight: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the kernels support a weight [taps, in, out] in `dtype`, and are faster than oneDNN."""
    has_units = {torch.bfloat16: MATRIX_UNITS > 0, torch.float32: MULTIPLIES_FLOATS}.get(dtype, False)
    return has_units and weight.is_cpu and not any(size % SIDE for size in weight.shape[1:])


class Convolution:
    """Convolution of each stream's rows in bfloat16 on a core's matrix units, accumulating in float32."""

    dtype = torch.bfloat16

    def __init__(self, weight: Tensor, bias: Tensor | None, dilation: int = 1, *, gated: bool = False) -> None:
        """Pack `weight` [taps, in, out] and `bias` [out].

        `gated` multiplies silu of the first half of the outputs by the second half.
        """
        outputs = weight.shape[2]
        bias = weight.new_zeros(outputs) if bias is None else bias
        if gated:
            order = torch.arange(outputs).view(2, -1, _HALF).transpose(0, 1).flatten()
            weight, bias = weight[:, :, order], bias[order]
        self._shape = weight.shape
        self._dilation = dilation
        self._gated = gated
        self._bias = bias.float().contiguous()
        self._weight = copy_to_huge_pages(self._packed(weight))

    def __call__(
        self,
        rows: Tensor,
        *,
        snake: Snake | None = None,
        total: Tensor | None = None,
        gelu: bool = False,
        wide: bool = False,
        new: New = _empty,
    ) -> Tensor:
        """Convolve `rows` [B, context + time, in] contiguous to [B, time, out], both in `dtype`.

        The results are float32 if `wide`. They pass through a `snake` without a frequency, or through `gelu`, or are
        added to `total` [B, time, out] float32.
        """
        assert snake is None or snake.frequency is None
        assert rows.dtype == self.dtype, rows.dtype
        assert rows.is_contiguous(), rows.stride()
        (taps, _, outputs), (streams, length, _) = self._shape, rows.shape
        kind = _GATED if self._gated else _GELU if gelu else _PLAIN
        kind = _SNAKED if snake is not None else kind if total is None else _ADDED
        if total is None:
            shape = (streams, length - (taps - 1) * self._dilation, outputs // 2 if self._gated else outputs)
            total = new("out", shape, torch.float32 if wide else self.dtype)
        assert total.is_contiguous(), total.stride()
        self._run(rows, kind, None if snake is None else snake.amplitude.data_ptr(), total, new)
        return total

    def _packed(self, weight: Tensor) -> Tensor:
        taps, inputs, outputs = weight.shape
        tiles = weight.reshape(taps, inputs // SIDE, _HALF, 2, outputs // SIDE, 2, _HALF)
        return tiles.permute(4, 0, 1, 5, 2, 6, 3).bfloat16()

    def _run(self, rows: Tensor, kind: int, amplitude: int | None, out: Tensor, new: New) -> None:
        (taps, inputs, outputs), (streams, time, _), dilation = self._shape, out.shape, self._dilation
        if taps > 1 and time < _HALF:
            rows = unfolded(rows, taps, dilation, new)
            taps, dilation, inputs = 1, 1, taps * inputs
        if taps == 1:
            streams, time = 1, streams * time
        pointers = (rows.data_ptr(), self._weight.data_ptr(), self._bias.data_ptr(), amplitude, out.data_ptr())
        halves = out.dtype == torch.bfloat16
        _invoke("convolve", MATRIX_UNITS, kind, halves, *pointers, streams, time, taps, dilation, inputs, outputs)


class ExactConvolution(Convolution):
    """Convolution in float32, for CPUs with bfloat16 units and for those without AVX-512."""

    dtype = torch.float32

    def _packed(self, weight: Tensor) -> Tensor:
        width = SIDE if MATRIX_UNITS else _HALF
        return weight.reshape(-1, weight.shape[2] // width, width).transpose(0, 1).float()

    def _run(self, rows: Tensor, kind: int, amplitude: int | None, out: Tensor, new: New) -> None:
        (taps, inputs, outputs), (streams, time, _) = self._shape, out.shape
        if taps > 1 and (self._dilation > 1 or time < _HALF):
            rows = unfolded(rows, taps, self._dilation, new)
            taps, inputs = 1, taps * inputs
        if taps == 1:
            streams, time = 1, streams * time
        pointers = (rows.data_ptr(), self._weight.data_ptr(), self._bias.data_ptr(), amplitude, out.data_ptr())
        _invoke("multiply", MATRIX_UNITS, kind, *pointers, streams, rows.shape[1], inputs, time, taps * inputs, outputs)


class FilteredConvolution(ExactConvolution):
    """Convolution of seven taps in float32 with 29 % of the products, for CPUs without AVX-512."""

    _POINTS = (0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 1.5, -1.5, 0.75, -0.75)  # and infinity
    _TILES = 48  # as in c_kernels.c

    def _packed(self, weight: Tensor) -> Tensor:
        points = torch.tensor(self._POINTS, dtype=torch.float64)[:, None]
        scales = (points - points.T).fill_diagonal_(1.0).prod(dim=1, keepdim=True)
        powers = torch.cat((points ** torch.arange(len(weight)) / scales, torch.zeros(1, len(weight))))
        powers[-1, -1] = 1.0  # at infinity
        values: Tensor = torch.tensordot(powers, weight.double(), dims=1)
        return values.view(*values.shape[:2], -1, _HALF).permute(2, 0, 1, 3).float()

    def _run(self, rows: Tensor, kind: int, amplitude: int | None, out: Tensor, new: New) -> None:
        assert kind in {_PLAIN, _SNAKED}
        (_, inputs, outputs), (streams, time, _) = self._shape, out.shape
        scratch = new("values", (len(self._POINTS) + 1, self._TILES, inputs), torch.float32)
        pointers = (rows.data_ptr(), self._weight.data_ptr(), self._bias.data_ptr(), amplitude, out.data_ptr())
        _invoke("filter", *pointers, scratch.data_ptr(), streams, time, self._dilation, inputs, outputs)


def unfolded(rows: Tensor, taps: int, dilation: int, new: New) -> Tensor:
    """Return the rows [B, time, taps * in] whose products are a convolution of rows [B, context + time, in]."""
    streams, length, channels = rows.shape
    time = length - (taps - 1) * dilation
    out = new("unfolded", (streams, time, taps * channels), rows.dtype)
    _invoke("unfold", rows.data_ptr(), out.data_ptr(), streams, time, taps, dilation, channels * rows.itemsize)
    return out


def embed(codes: Tensor, offsets: Tensor, tables: Tensor, *, new: New = _empty) -> Tensor:
    """Return sums [B, frames, channels] of the table entries for codes [B, frames, groups]. Tensors are contiguous."""
    streams, frames, groups = codes.shape
    channels = tables.shape[1]
    out = new("out", (streams, frames, channels), torch.float32)
    pointers = (codes.data_ptr(), offsets.data_ptr(), tables.data_ptr(), out.data_ptr())
    _invoke("embed", *pointers, streams * frames, groups, channels)
    return out


def normed(x: Tensor, eps: Tensor, dtype: torch.dtype, *, new: New = _empty) -> Tensor:
    """Divide float32 x [..., channels] by its root mean square. Channels must be a multiple of 32. Returns `dtype`."""
    assert x.is_contiguous(), x.stride()
    out, channels = new("out", x.shape, dtype), x.shape[-1]
    rows = x.numel() // channels
    _invoke("norm", x.data_ptr(), out.data_ptr(), int(dtype == torch.bfloat16), eps.data_ptr(), rows, channels)
    return out


def attends(size: int, window: int) -> bool:
    """Return whether `attend` supports heads of `size` values and windows of `window` frames."""
    return size % SIDE == 0 and max(size, window) <= _MOST


def attend(
    qkv: Tensor, rotary: Sequence[Tensor], histories: tuple[Tensor, Tensor], num_past: Tensor, out: Tensor
) -> None:
    """Compute attention for one stream into `out` [frames, heads * size], which is bfloat16 or float32.

    Overwrites `qkv` [frames, (heads + 2 * kv_heads) * size] float32. `rotary` holds cosines and sines [frames, size].
    The last `num_past` [1] int64 rows of the history [2, kv_heads, window - 1, size] float32 contain frames. The next
    history is written to a separate tensor.
    """
    _, kv_heads, past, size = histories[0].shape
    tensors = (qkv, *rotary, *histories, out)
    assert all(tensor.is_contiguous() for tensor in tensors)
    pointers, halves = [tensor.data_ptr() for tensor in tensors], out.dtype == torch.bfloat16
    _invoke("attend", *pointers, halves, len(qkv), out.shape[1] // size, kv_heads, past + 1, size, num_past.data_ptr())


def depthwise_norm(x: Tensor, memories: tuple[Tensor, Tensor], block: ConvNeXt, eps: Tensor, out: Tensor) -> None:
    """Convolve each channel of one stream's rows [time, channels] and normalize them into `out` bfloat16 or float32.

    x and the memory [taps - 1, channels] are float32, with at most 4096 channels. The next memory is written to a
    separate tensor.
    """
    past, following = memories
    tensors = (past, x, block.taps, block.bias, following, out)
    assert all(tensor.is_contiguous() for tensor in tensors)
    pointers, halves = [tensor.data_ptr() for tensor in tensors], out.dtype == torch.bfloat16
    _invoke("depthwise_norm", *pointers, halves, eps.data_ptr(), len(x), *block.taps.shape)


def gather(
    x: Tensor, out: Tensor, snake: Snake | None = None, pasts: Sequence[Tensor] = (), nexts: Sequence[Tensor] = ()
) -> bool:
    """Fill `out` [B, context + time, channels] with each stream's past [context, channels], and x after the snake.

    The last rows of `out` fill `nexts`, which may be the pasts. Returns False if the kernels do not support the inputs.
    Rows of each stream must be contiguous, and pasts must have the dtype of `out`.
    """
    name = f"gather_{_TYPES.get(x.dtype)}_{_TYPES.get(out.dtype)}"
    streams, time, channels = x.shape
    rows = channels, 1
    if name not in _functions or not x.is_cpu or x.stride()[1:] != rows or out.stride()[1:] != rows:
        return False
    frequency = None if snake is None or snake.frequency is None else snake.frequency.data_ptr()
    amplitude = None if snake is None else snake.amplitude.data_ptr()
    context = out.shape[1] - time
    assert len(pasts) == len(nexts) == (streams if context else 0), len(pasts)
    source, target = x.data_ptr(), out.data_ptr()
    from_one, to_one = x.stride(0) * x.itemsize, out.stride(0) * out.itemsize
    for stream in range(streams):
        past, following = (pasts[stream].data_ptr(), nexts[stream].data_ptr()) if context else (target, target)
        _invoke(name, source, target, frequency, amplitude, past, following, context, time, channels)
        source, target = source + from_one, target + to_one
    return True


def convolve_to_one(rows: Tensor, taps: Tensor, bias: Tensor, *, new: New = _empty) -> Tensor | None:
    """Convolve rows [B, count - 1 + time, channels] with taps [count, channels] to [B, time, 1], all in float32.

    Returns None if the kernels do not support the inputs.
    """
    (streams, length, channels), count = rows.shape, len(taps)
    if "convolve_to_one" not in _functions or not rows.is_cpu or channels % _HALF or not rows.is_contiguous():
        return None
    out = new("out", (streams, length - count + 1, 1), torch.float32)
    for stream, samples in zip(rows, out, strict=True):
        pointers = (stream.data_ptr(), taps.data_ptr(), bias.data_ptr(), samples.data_ptr())
        _invoke("convolve_to_one", *pointers, len(samples), count, channels)
    return out
