"""PyTorch sampler, and the interface to the C sampler, which is used on CPUs if a C compiler is available.

A code is `argmax(probs / noise)` with exponential noise, as in `torch.multinomial`. In production the noise is a
function of (seed, frame, codebook, code). A stream's codes therefore do not depend on its batch, its row, or where
it was resumed. Filters are applied in Hugging Face's order: temperature, top-k, top-p.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deployments.c_library import COUNT, POINTER, built_library
from deployments.talker.state.batch_state import BatchOptions, DrawingOptions

Words = TypeVar("Words", Tensor, NDArray[np.int64])

_INTERFACE = 5  # version of the functions and their arguments; must match the one in c_sampler.c
_C_TYPES: dict[object, str] = {bool: "int32_t", int: "int32_t", float: "float"}
_PARAMETERS = {"sample": [*[POINTER] * 5, *[COUNT] * 3, POINTER]}
_MASK = 0xFFFFFFFF
_ROUNDS, _MULTIPLIERS, _KEY_STEPS = 10, (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """Key for a batch's noise: each row's seed and frame, and the codebook for all rows."""

    seeds: Tensor  # [rows] int64, the bits of an unsigned seed
    frames: Tensor  # [rows] int64
    codebook: int


NoiseSource = Callable[[NoiseKey, Tensor], Tensor]  # candidate codes [rows, n] -> exponential noise [rows, n] float32


def philox_noise(noise_key: NoiseKey, codes: Tensor) -> Tensor:
    """Return Philox4x32-10 noise with the seed as key and (code, codebook, frame) as counter (Salmon et al. 2011).

    The logarithm uses float64, so vector and scalar code paths round to the same float32.
    """
    words = _first_words(noise_key, codes)
    uniform = (words.double() + 0.5) / 2**32
    return (-uniform.log()).float()


def _first_words(noise_key: NoiseKey, codes: Tensor) -> Tensor:
    frame, seed = noise_key.frames[:, None], noise_key.seeds[:, None]
    low, high = seed & _MASK, (seed >> 32) & _MASK
    codebook, zero = torch.full_like(seed, noise_key.codebook), torch.zeros_like(seed)
    if not codes.is_cpu:
        return philox4x32((codes, codebook, frame, zero), (low, high))[0]
    # For a hundred small operations on a CPU, NumPy takes a third of the time that torch does.
    counter = (codes.numpy(), codebook.numpy(), frame.numpy(), zero.numpy())
    return torch.from_numpy(philox4x32(counter, (low.numpy(), high.numpy()))[0])


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Run ten rounds. All words are 32 bits in int64 arrays, least significant word first."""
    first, second, third, fourth = counter
    low, high = key
    for _ in range(_ROUNDS):
        product_1, product_3 = first * _MULTIPLIERS[0], third * _MULTIPLIERS[1]
        first, second = ((product_3 >> 32) & _MASK) ^ second ^ low, product_3 & _MASK
        third, fourth = ((product_1 >> 32) & _MASK) ^ fourth ^ high, product_1 & _MASK
        low, high = (low + _KEY_STEPS[0]) & _MASK, (high + _KEY_STEPS[1]) & _MASK
    return first, second, third, fourth


def sample(logits: Tensor, options: BatchOptions, noise_key: NoiseKey, noise: NoiseSource = philox_noise) -> Tensor:
    """Sample codes [rows] int64 from float32 logits [rows, vocab]."""
    vocab = logits.shape[-1]
    num_candidates = options.breadth.num_candidates
    count = vocab if num_candidates is None else min(num_candidates, vocab)
    values, codes = (logits / options.floats("temperature")).topk(count)
    values = _keep_top_k(values, options)
    if options.breadth.top_p:
        values = _keep_top_p(values, options)
    weights = (values - values[:, :1]).exp()  # not normalized, because the sum would depend on the number of candidates
    best = (weights / noise(noise_key, codes)).argmax(-1, keepdim=True)
    sampled = codes.gather(-1, best)
    return torch.where(options.ints("do_sample") != 0, sampled, logits.argmax(-1, keepdim=True))[:, 0]


def _keep_top_k(values: Tensor, options: BatchOptions) -> Tensor:
    """Mask values below each row's k-th value. `values` must be in descending order."""
    top_k = options.ints("top_k").long()
    last = torch.where(top_k > 0, top_k, values.shape[-1]).clamp(max=values.shape[-1]) - 1
    return values.masked_fill(values < values.gather(-1, last), -torch.inf)


def _keep_top_p(values: Tensor, options: BatchOptions) -> Tensor:
    """Mask the tail of each row, whose total probability is at most 1 - top_p, but never the best value.

    `values` must be in descending order.
    """
    tail = values.softmax(-1).flip(-1).cumsum(-1).flip(-1)
    top_p = options.floats("top_p")
    drop = (tail <= 1 - top_p) & (top_p < 1)
    drop[:, 0] = False
    return values.masked_fill(drop, -torch.inf)


def apply_repetition_penalty(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Reduce the logits [rows, vocab] of codes already `seen` [rows, vocab] by `penalty` [rows, 1]."""
    pushed = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(seen, pushed, logits)


def _checked_library() -> ctypes.CDLL | None:
    library = built_library("deployments.talker.sampling._c_sampler", _PARAMETERS, interface=_INTERFACE)
    if library is not None:
        library.option_columns.restype = ctypes.c_char_p
        check_columns(library.option_columns().decode())
    return library


def check_columns(built: str) -> None:
    """Raise RuntimeError unless the library's option columns match those of `DrawingOptions`, in order."""
    packed = "".join(f"{_C_TYPES[option.type]} {option.name};" for option in fields(DrawingOptions))
    if built != packed:
        raise RuntimeError(
            f"c_sampler.c was built with OPTIONS `{built}`, but DrawingOptions packs `{packed}`: make both equal, "
            "and run `make install`"
        )


_built = _checked_library()
IN_C = _built is not None


def sample_in_c(logits: Tensor, options: BatchOptions, noise_key: NoiseKey) -> Tensor:
    """Return the codes of `sample` with `philox_noise`. Requires the C library (IN_C)."""
    assert _built is not None
    assert logits.dtype is torch.float32
    rows, vocab = logits.shape
    codes, scratch = torch.empty(rows, dtype=torch.long), torch.empty(2, vocab)
    arguments = [each.contiguous() for each in (logits, options.packed, noise_key.seeds, noise_key.frames)]
    pointers = (each.data_ptr() for each in (codes, *arguments))
    _built.sample(*pointers, noise_key.codebook, rows, vocab, scratch.data_ptr())
    return codes


def sample_address() -> int | None:
    """Return the address of the C library's `sample`, for other C code."""
    return ctypes.cast(_built.sample, POINTER).value if _built is not None else None
