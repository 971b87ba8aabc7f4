"""Choosing codes from logits, for a batch of rows with options of their own.

A code is `argmax(probs / noise)` with exponential noise, which is how `torch.multinomial` draws. In production the
noise is a function of (seed, frame, codebook, code) alone, so a stream's codes do not depend on its batch, its row or
on where it was resumed. The order of the filters is Hugging Face's: temperature, top-k, top-p.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deployments.protocol import FILTERS, SUBTALKER, Sampling

Words = TypeVar("Words", Tensor, NDArray[np.int64])

_MASK = 0xFFFFFFFF
_ROUNDS, _MULTIPLIERS, _KEY_STEPS = 10, (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
# Top-k keeps every candidate equal to the k-th; bfloat16 logits are often equal. Room for that many more.
_TIES = 14


@dataclass(frozen=True, slots=True)
class FilterOptions:
    """How one codebook of one sequence is sampled: `do_sample` and the `FILTERS`, whose defaults filter nothing."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @classmethod
    def for_talker(cls, sampling: Sampling) -> "FilterOptions":
        """Options of codebook 0 from a complete `Sampling`."""
        return cls._of(sampling, bool(sampling.do_sample), "")

    @classmethod
    def for_predictor(cls, sampling: Sampling) -> "FilterOptions":
        """Options of codebooks 1 and up from a complete `Sampling`."""
        return cls._of(sampling, bool(sampling.subtalker_dosample), SUBTALKER)

    @classmethod
    def _of(cls, sampling: Sampling, do_sample: bool, prefix: str) -> "FilterOptions":
        return cls(do_sample, **{name: getattr(sampling, prefix + name) for name in FILTERS})

    def pack(self) -> NDArray[np.int32]:
        """[options]: a column each, a float as its bits."""
        packed = np.zeros(len(OPTION_COLUMNS), dtype=np.int32)
        for option in fields(self):
            column = packed[OPTION_COLUMNS[option.name], None]
            (column.view(np.float32) if option.type is float else column)[:] = getattr(self, option.name)
        return packed


# The column of each option in a packed `FilterOptions`, by name.
OPTION_COLUMNS = {option.name: column for column, option in enumerate(fields(FilterOptions))}


@dataclass(frozen=True, slots=True)
class Draw:
    """Which noise a batch draws: each row's seed and frame, and the codebook they all are at."""

    seeds: Tensor  # [rows] int64, the bits of an unsigned seed
    frames: Tensor  # [rows] int64
    codebook: int


NoiseSource = Callable[[Draw, Tensor], Tensor]  # candidate codes [rows, n] -> exponential noise [rows, n] float32


def philox_noise(draw: Draw, codes: Tensor) -> Tensor:
    """Philox4x32-10 keyed by the seed, counting (code, codebook, frame); Salmon et al. 2011.

    The logarithm runs in float64, so that vector and scalar code paths round to the same float32.
    """
    words = _first_words(draw, codes)
    uniform = (words.double() + 0.5) / 2**32
    return (-uniform.log()).float()


def _first_words(draw: Draw, codes: Tensor) -> Tensor:
    frame, seed = draw.frames[:, None], draw.seeds[:, None]
    low, high = seed & _MASK, (seed >> 32) & _MASK
    codebook, zero = torch.full_like(seed, draw.codebook), torch.zeros_like(seed)
    if not codes.is_cpu:
        return philox4x32((codes, codebook, frame, zero), (low, high))[0]
    # For a hundred small operations NumPy takes a third of the time that torch takes on a CPU.
    counter = (codes.numpy(), codebook.numpy(), frame.numpy(), zero.numpy())
    return torch.from_numpy(philox4x32(counter, (low.numpy(), high.numpy()))[0])


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Ten rounds. Every word is 32 bits in an int64 array; the least significant word comes first."""
    first, second, third, fourth = counter
    low, high = key
    for _ in range(_ROUNDS):
        product_1, product_3 = first * _MULTIPLIERS[0], third * _MULTIPLIERS[1]
        first, second = ((product_3 >> 32) & _MASK) ^ second ^ low, product_3 & _MASK
        third, fourth = ((product_1 >> 32) & _MASK) ^ fourth ^ high, product_1 & _MASK
        low, high = (low + _KEY_STEPS[0]) & _MASK, (high + _KEY_STEPS[1]) & _MASK
    return first, second, third, fourth


@dataclass(frozen=True, slots=True)
class Breadth:
    """How many candidates a batch looks at, and whether top-p is among its filters. A CUDA graph fixes both."""

    num_candidates: int | None  # None: the whole vocabulary
    top_p: bool

    @classmethod
    def of(cls, options: list[FilterOptions]) -> "Breadth":
        """The least that serves all of `options`."""
        limited = all(option.top_k > 0 or not option.do_sample for option in options)
        largest = max((option.top_k for option in options if option.do_sample), default=0)
        return cls(largest + _TIES if limited else None, any(option.top_p < 1.0 for option in options))

    def covers(self, other: "Breadth") -> bool:
        """Whether options that need `other` are served."""
        if other.top_p and not self.top_p:
            return False
        if self.num_candidates is None or other.num_candidates is None:
            return self.num_candidates is None
        return other.num_candidates <= self.num_candidates


# The breadth that nearly all requests need, with the checkpoints' defaults, and the breadth that serves every request.
NARROW = Breadth(50 + _TIES, top_p=False)
WIDE = Breadth(None, top_p=True)


class BatchSampler:
    """Samples a batch of rows, each by its own options."""

    def __init__(self, packed: Tensor, breadth: Breadth) -> None:
        """`packed` [rows, options] int32: each row as `FilterOptions.pack` has it."""
        self.packed, self.breadth = packed, breadth

    @classmethod
    def of(cls, options: list[FilterOptions], *, device: torch.device) -> "BatchSampler":
        """A row for each of `options`."""
        packed = np.stack([option.pack() for option in options])
        return cls(torch.from_numpy(packed).to(device), Breadth.of(options))

    def sample(self, logits: Tensor, draw: Draw, noise: NoiseSource = philox_noise) -> Tensor:
        """Logits [rows, vocab] float32 -> codes [rows] int64."""
        vocab = logits.shape[-1]
        num_candidates = self.breadth.num_candidates
        count = vocab if num_candidates is None else min(num_candidates, vocab)
        values, codes = (logits / self.floats("temperature")).topk(count)
        values = self._keep_top_k(values)
        if self.breadth.top_p:
            values = self._keep_top_p(values)
        weights = (values - values[:, :1]).exp()  # not normalised: a sum would depend on the number of candidates
        best = (weights / noise(draw, codes)).argmax(-1, keepdim=True)
        sampled = codes.gather(-1, best)
        return torch.where(self.ints("do_sample") != 0, sampled, logits.argmax(-1, keepdim=True))[:, 0]

    def ints(self, name: str) -> Tensor:
        """[rows, 1] int32: each row's option `name`."""
        return self.packed[:, OPTION_COLUMNS[name], None]

    def floats(self, name: str) -> Tensor:
        """[rows, 1] float32."""
        return self.ints(name).view(torch.float32)

    def _keep_top_k(self, values: Tensor) -> Tensor:
        """Values in descending order: values below each row's k-th one go."""
        top_k = self.ints("top_k").long()
        last = torch.where(top_k > 0, top_k, values.shape[-1]).clamp(max=values.shape[-1]) - 1
        return values.masked_fill(values < values.gather(-1, last), -torch.inf)

    def _keep_top_p(self, values: Tensor) -> Tensor:
        """Values in descending order: the tail that sums to a probability of at most 1 - top_p goes, the best never."""
        tail = values.softmax(-1).flip(-1).cumsum(-1).flip(-1)
        top_p = self.floats("top_p")
        drop = (tail <= 1 - top_p) & (top_p < 1)
        drop[:, 0] = False
        return values.masked_fill(drop, -torch.inf)


def penalise_repetition(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Logits [rows, vocab]; logits of codes already `seen` [rows, vocab] are pushed down by `penalty` [rows, 1]."""
    pushed = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(seen, pushed, logits)
