"""Triton sampler, which converts logits to a code and its embedding with one program per row.

The code is the same as from `torch_sampler.sample`, because filters, order and noise bits are the same. Top-k and top-p
thresholds are found by bisection over the logits' bits, without sorting. If several candidates tie with the last one
within top-p, all of them are kept. A sort would keep only some of them.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.random import philox_impl

from deployments.gpu.launch import hash_helpers, wait_for_predecessor
from deployments.talker.kernels.matmul import Activations
from deployments.talker.sampling.torch_sampler import NoiseKey
from deployments.talker.state.batch_state import OPTION_COLUMNS, BatchOptions

_DO_SAMPLE, _TEMPERATURE = tl.constexpr(OPTION_COLUMNS["do_sample"]), tl.constexpr(OPTION_COLUMNS["temperature"])
_TOP_K, _TOP_P = tl.constexpr(OPTION_COLUMNS["top_k"]), tl.constexpr(OPTION_COLUMNS["top_p"])
assert set(OPTION_COLUMNS) == {"do_sample", "temperature", "top_k", "top_p"}, "`_choose` does not read all options"


@triton.jit
def _noise(seed, frame, codebook, codes):
    """Return float32 exponential noise for candidate `codes`, using a float64 logarithm as on the CPU."""
    zero = codes.to(tl.uint32) * 0
    low, high = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    word, _, _, _ = philox_impl(
        codes.to(tl.uint32), zero + codebook.to(tl.uint32), zero + frame.to(tl.uint32), zero, zero + low, zero + high
    )
    uniform = (word.to(tl.float64) + 0.5) * (1.0 / 4294967296.0)
    return (-tl.log(uniform)).to(tl.float32)


@triton.jit
def _ordered(values):
    """Map float32 to uint32, preserving order. Both zeros map to the same value."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _last_of(keys, wanted, bits: tl.constexpr):
    """Return the largest threshold of `bits` leading bits that at least `wanted` keys reach. Each sum yields two bits.

    Three 20-bit counts share an int64, because latency dominates the cost of a sum over the program.
    """
    one = tl.full([], 1, tl.uint32)
    threshold = one * 0
    for step in tl.static_range(bits // 2):
        first, second = threshold | (one << (30 - 2 * step)), threshold | (one << (31 - 2 * step))
        third = first | second
        reached = (keys >= first).to(tl.int64) + ((keys >= second).to(tl.int64) << 20)
        counts = tl.sum(reached + ((keys >= third).to(tl.int64) << 40))
        threshold = tl.where((counts & 0xFFFFF) >= wanted, first, threshold)
        threshold = tl.where(((counts >> 20) & 0xFFFFF) >= wanted, second, threshold)
        threshold = tl.where((counts >> 40) >= wanted, third, threshold)
    return threshold


@triton.jit
def _choose(values, inside, noise, filters, vocab: tl.constexpr, bits: tl.constexpr):
    """Return the code of one row from float32 logits, whose order is in the first `bits` bits of `_ordered`.

    `filters` points to the row's packed `DrawingOptions`.
    """
    do_sample, top_k = tl.load(filters + _DO_SAMPLE) != 0, tl.load(filters + _TOP_K)
    temperature = tl.load(filters + _TEMPERATURE).to(tl.float32, bitcast=True)
    top_p = tl.load(filters + _TOP_P).to(tl.float32, bitcast=True)
    scaled = values / temperature
    keys = tl.where(inside, _ordered(values), tl.zeros_like(values).to(tl.uint32))
    wanted = tl.where(top_k > 0, tl.minimum(top_k, vocab), vocab).to(tl.int64)
    one = tl.full([], 1, tl.uint32)
    threshold = _last_of(keys, wanted, bits)
    keep = inside & (keys >= threshold)
    weights = tl.where(keep, tl.exp(scaled - tl.max(scaled, axis=0)), 0.0)
    if top_p < 1.0:
        limit = (1.0 - top_p) * tl.sum(weights)
        border = one * 0
        for bit in tl.static_range(bits):
            candidate = border | (one << (31 - bit))
            tail = tl.sum(tl.where(keys < candidate, weights, 0.0))
            border = tl.where(tail <= limit, candidate, border)
        best = tl.max(tl.where(inside, scaled, float("-inf")), axis=0)
        keep = keep & ((keys >= border) | (scaled == best))
    code = tl.argmax(tl.where(do_sample, tl.where(keep, weights / noise, -1.0), values), axis=0, tie_break_left=True)
    return tl.minimum(code, vocab - 1)  # if logits are NaN, argmax may return an index in the padding


@triton.jit
def _embed(row, code, table, inputs, squares, width: tl.constexpr, block: tl.constexpr):
    """Store the code's projected embedding as the row's next input."""
    column = tl.arange(0, block)
    projected = tl.load(table + code * width + column, mask=column < width, other=0.0)
    tl.store(inputs + row * width + column, projected, mask=column < width)
    exact = projected.to(tl.float32)
    tl.store(squares + row, tl.sum(exact * exact))


hash_helpers(_noise, _ordered, _last_of, _choose, _embed)


@triton.jit(do_not_specialize=["codebook"])
def _sample_code(
    logits, filters, filter_stride, seeds, frames, codes, codebook,
    table, inputs, squares, embeddings, sums, total,
    groups: tl.constexpr, vocab: tl.constexpr, block: tl.constexpr, bits: tl.constexpr,
    width: tl.constexpr, wide: tl.constexpr, input_block: tl.constexpr, sum_block: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    code_ids = tl.arange(0, block)
    inside = code_ids < vocab
    noise = _noise(
        tl.load(seeds + row, cache_modifier=".cg"), tl.load(frames + row, cache_modifier=".cg"), codebook, code_ids
    )
    wait_for_predecessor(pdl)
    values = tl.load(logits + row * vocab + code_ids, mask=inside, other=float("-inf")).to(tl.float32)
    code = _choose(values, inside, noise, filters + row * filter_stride, vocab, bits)
    tl.store(codes + row * groups + codebook, code.to(tl.int64))
    if table is not None:
        _embed(row, code, table, inputs, squares, width, input_block)
    column = tl.arange(0, sum_block)
    real = column < wide
    so_far = tl.load(sums + row * wide + column, mask=real, other=0.0)
    so_far += tl.load(embeddings + code * wide + column, mask=real, other=0.0).to(tl.float32)
    if total is not None:
        tl.store(total + row * wide + column, so_far.to(total.dtype.element_ty), mask=real)
    else:
        tl.store(sums + row * wide + column, so_far, mask=real)


@triton.jit
def _begin_frame(
    code0, codes, table, inputs, squares, embeddings, sums, num_rows,
    groups: tl.constexpr, width: tl.constexpr, wide: tl.constexpr, input_block: tl.constexpr, sum_block: tl.constexpr,
    pdl: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(pdl)
    row = tl.program_id(0).to(tl.int64)
    code = tl.load(code0 + row)
    tl.store(codes + row * groups, code)
    before = tl.arange(0, input_block)
    first_input = tl.load(inputs + row * width + before, mask=before < width, other=0.0).to(tl.float32)
    tl.store(squares + row, tl.sum(first_input * first_input))
    _embed(num_rows + row, code, table, inputs, squares, width, input_block)
    column = tl.arange(0, sum_block)
    first = tl.load(embeddings + code * wide + column, mask=column < wide, other=0.0)
    tl.store(sums + row * wide + column, first.to(tl.float32), mask=column < wide)


@triton.jit
def _sample_first_code(
    logits, filters, filter_stride, seeds, frames, state_rows, seen, penalty, suppressed, ignore_eos, code0, eos,
    min_new_tokens, vocab: tl.constexpr, block: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    code_ids = tl.arange(0, block)
    inside = code_ids < vocab
    frame = tl.load(frames + row, cache_modifier=".cg")
    noise = _noise(tl.load(seeds + row, cache_modifier=".cg"), frame, tl.full([], 0, tl.int32), code_ids)
    wait_for_predecessor(pdl)
    state_row = tl.load(state_rows + row)
    values = tl.load(logits + row * vocab + code_ids, mask=inside, other=float("-inf")).to(tl.float32)
    was_seen = tl.load(seen + state_row * vocab + code_ids, mask=inside, other=0) != 0
    factor = tl.load(penalty + row)
    values = tl.where(was_seen, tl.where(values < 0, values * factor, values / factor), values)
    too_early = (frame < min_new_tokens) | (tl.load(ignore_eos + row) != 0)
    barred = (tl.load(suppressed + code_ids, mask=inside, other=1) != 0) | (too_early & (code_ids == eos))
    values = tl.where(barred, float("-inf"), values)
    code = _choose(values, inside, noise, filters + row * filter_stride, vocab, 32)
    tl.store(code0 + row, code.to(tl.int64))
    tl.store(seen + state_row * vocab + code, tl.full([], 1, tl.int8))


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Embeddings for one codebook's codes."""

    projected: Tensor  # [vocab, predictor hidden]: next input of the predictor
    summed: Tensor  # [vocab, talker hidden]: summand of the talker's next input


@dataclass(frozen=True, slots=True)
class FrameOutputs:
    """Buffers for a frame's codes and the sum of their embeddings."""

    codes: Tensor  # [rows, groups] int64
    sums: Tensor  # [rows, talker hidden] float32: running sum
    total: Tensor  # [rows, talker hidden]: complete sum


def order_bits(dtype: torch.dtype) -> int:
    """Return the number of leading bits that suffice to distinguish any two logits."""
    return 16 if dtype == torch.bfloat16 else 32


def begin_frame(
    code0: Tensor, embeddings: Embeddings, inputs: Activations, outputs: FrameOutputs, *, pdl: bool = False
) -> None:
    """Embed codebook 0 [rows] as the predictor's second input, and as the first summand of the embedding sum.

    `inputs` [2 * rows, width] begins with the first inputs, whose squares are computed here too.
    """
    width, wide = embeddings.projected.shape[1], embeddings.summed.shape[1]
    _begin_frame[(len(code0),)](
        code0, outputs.codes, embeddings.projected, inputs.values, inputs.squares, embeddings.summed, outputs.sums,
        len(code0), groups=outputs.codes.shape[1], width=width, wide=wide, input_block=triton.next_power_of_2(width),
        sum_block=triton.next_power_of_2(wide), pdl=pdl, launch_pdl=pdl,
    )  # fmt: skip
    inputs.parts = 1


def sample_code(logits: Tensor, options: BatchOptions, noise_key: NoiseKey, embeddings: Embeddings, inputs: Activations,
                outputs: FrameOutputs, *, pdl: bool = False) -> None:  # fmt: skip
    """Sample codebook `noise_key.codebook` from logits [rows, vocab], embed the codes in `inputs`, and add to sums."""
    num_rows, vocab = logits.shape
    last = noise_key.codebook == outputs.codes.shape[1] - 1
    width, wide = embeddings.projected.shape[1], embeddings.summed.shape[1]
    _sample_code[(num_rows,)](
        logits, options.packed, options.packed.stride(0), noise_key.seeds, noise_key.frames, outputs.codes,
        noise_key.codebook, None if last else embeddings.projected, inputs.values, inputs.squares, embeddings.summed,
        outputs.sums, outputs.total if last else None,
        groups=outputs.codes.shape[1], vocab=vocab, block=triton.next_power_of_2(vocab), bits=order_bits(logits.dtype),
        width=width, wide=wide, input_block=triton.next_power_of_2(width), sum_block=triton.next_power_of_2(wide),
        pdl=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    inputs.parts = 1


@dataclass(frozen=True, slots=True)
class FirstCodeRules:
    """Rules that exclude or penalize codes in codebook 0."""

    state_rows: Tensor  # [rows] int64: row of each sequence in `seen`
    seen: Tensor  # [state rows, vocab] bool: codes that the sequence has sampled
    penalty: Tensor  # [rows, 1] float32
    suppressed: Tensor  # [vocab] bool
    ignore_eos: Tensor  # [rows] bool
    eos: int
    min_new_tokens: int


def sample_first_code(logits: Tensor, options: BatchOptions, noise_key: NoiseKey, rules: FirstCodeRules, code0: Tensor,
                      *, pdl: bool = False) -> None:  # fmt: skip
    """Sample codebook 0 from logits [rows, vocab] into `code0` [rows] int64, and mark the codes as seen."""
    num_rows, vocab = logits.shape
    _sample_first_code[(num_rows,)](
        logits, options.packed, options.packed.stride(0), noise_key.seeds, noise_key.frames, rules.state_rows,
        rules.seen.view(torch.int8), rules.penalty, rules.suppressed.view(torch.int8),
        rules.ignore_eos.view(torch.int8), code0, rules.eos, rules.min_new_tokens,
        vocab=vocab, block=triton.next_power_of_2(vocab), pdl=pdl, num_warps=8, launch_pdl=pdl,
    )  # fmt: skip
