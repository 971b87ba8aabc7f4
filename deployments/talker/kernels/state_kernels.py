"""Kernels that convert between the batch state, indexed by row, and the inputs of other kernels, by batch index."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deployments.talker.state.batch_state import OPTION_COLUMNS, WIDE, BatchOptions, BatchState, Columns, Context

_IGNORE_EOS, _PENALTY = tl.constexpr(Columns.IGNORE_EOS), tl.constexpr(Columns.PENALTY)
_POSITION, _FRAME = tl.constexpr(Columns.POSITION), tl.constexpr(Columns.FRAME)
_NUM_TRAILING, _HEADER = tl.constexpr(Columns.NUM_TRAILING), tl.constexpr(Columns.HEADER)
_ALIGNMENT = 16  # bytes; Triton compiles kernels for unaligned pointers separately
_FILTERS, _NUM_OPTIONS = tl.constexpr(Columns.FILTERS), tl.constexpr(2 * len(OPTION_COLUMNS))


@triton.jit
def _gather(
    rows, packed, hidden, seeds, frames, penalty, ignore_eos, filters, out, is_finite, packed_width,
    width: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    row = tl.load(rows + index)
    source = packed + row * packed_width
    low, high = tl.load(source).to(tl.int64), tl.load(source + 1).to(tl.int64)
    tl.store(seeds + index, (high << 32) | (low & 0xFFFFFFFF))
    tl.store(frames + index, tl.load(source + _FRAME).to(tl.int64))
    tl.store(penalty + index, tl.load(source + _PENALTY).to(tl.float32, bitcast=True))
    tl.store(ignore_eos + index, tl.load(source + _IGNORE_EOS).to(tl.int8))
    for column in tl.static_range(_NUM_OPTIONS):
        tl.store(filters + index * _NUM_OPTIONS + column, tl.load(source + _FILTERS + column))
    column = tl.arange(0, block)
    real = column < width
    values = tl.load(hidden + row * width + column, mask=real, other=0.0)
    tl.store(out + index.to(tl.int64) * width + column, values, mask=real)
    finite = tl.abs(values.to(tl.float32)) < float("inf")  # false for NaN too
    tl.store(is_finite + index, tl.min(finite.to(tl.int32), axis=0).to(tl.int8))


@triton.jit
def _store_codes(codes, is_finite, out, not_finite, groups: tl.constexpr, block: tl.constexpr):
    index, group = tl.program_id(0), tl.arange(0, block)
    frame = tl.load(codes + index * groups + group, mask=group < groups, other=0)
    frame = tl.where(tl.load(is_finite + index) != 0, frame, not_finite)
    tl.store(out + index * groups + group, frame.to(out.dtype.element_ty), mask=group < groups)


@triton.jit
def _talker_inputs(
    rows, packed, sums, text, positions, slot_mapping, lengths, tables, inputs, packed_width, first_block, padding,
    block_size: tl.constexpr, max_frames: tl.constexpr, num_blocks: tl.constexpr, table_block: tl.constexpr,
    width: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    row = tl.load(rows + index)
    source = packed + row * packed_width
    position, frame = tl.load(source + _POSITION), tl.load(source + _FRAME)
    known = frame < tl.load(source + _NUM_TRAILING)
    text_id = tl.where(known, tl.load(source + _HEADER + tl.minimum(frame, max_frames - 1)), padding)
    number = tl.arange(0, table_block)
    table = tl.load(source + first_block + number, mask=number < num_blocks, other=0)
    tl.store(tables + index * num_blocks + number, table, mask=number < num_blocks)
    own = tl.load(source + first_block + tl.minimum(position // block_size, num_blocks - 1)).to(tl.int64)
    tl.store(positions + index, position)
    tl.store(lengths + index, position + 1)
    tl.store(slot_mapping + index, own * block_size + position % block_size)
    column = tl.arange(0, block)
    real = column < width
    frame_row = tl.load(sums + index.to(tl.int64) * width + column, mask=real)
    text_row = tl.load(text + text_id.to(tl.int64) * width + column, mask=real)
    tl.store(inputs + index.to(tl.int64) * width + column, frame_row + text_row, mask=real)


@triton.jit
def _store_hidden(rows, packed, hidden, out, packed_width, scratch_row, width: tl.constexpr, block: tl.constexpr):
    index = tl.program_id(0)
    row = tl.load(rows + index)
    column = tl.arange(0, block)
    real = column < width
    values = tl.load(out + index.to(tl.int64) * width + column, mask=real)
    tl.store(hidden + row * width + column, values, mask=real)
    if row != scratch_row:
        source = packed + row * packed_width
        tl.store(source + _POSITION, tl.load(source + _POSITION) + 1)
        tl.store(source + _FRAME, tl.load(source + _FRAME) + 1)


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """State that a batch's rows need for the first half of a step, by batch index."""

    hidden: Tensor  # [batch, hidden]
    seeds: Tensor  # [batch] int64
    frames: Tensor  # [batch] int64
    penalty: Tensor  # [batch, 1] float32
    ignore_eos: Tensor  # [batch] bool
    is_finite: Tensor  # [batch, 1] bool: whether the hidden state is finite
    talker_options: BatchOptions
    predictor_options: BatchOptions


class StateKernels:
    """Gather and scatter kernels for a state, with their buffers. Results are valid until the next call."""

    def __init__(self, state: BatchState, text: Tensor, *, padding: int, num_rows: int) -> None:
        """Allocate buffers for batches of at most `num_rows` rows."""
        self.state, self.text, self.padding = state, text, padding
        device = state.hidden.device
        self._hidden = torch.zeros((num_rows, state.hidden.shape[1]), dtype=state.hidden.dtype, device=device)
        self._inputs = torch.zeros_like(self._hidden)
        self._seeds, self._frames, self._slot_mapping = torch.zeros((3, num_rows), dtype=torch.long, device=device)
        self._penalty = torch.ones((num_rows, 1), dtype=torch.float32, device=device)
        aligned = _ALIGNMENT * -(-num_rows // _ALIGNMENT)
        self._ignore_eos, self._is_finite = torch.zeros((2, aligned), dtype=torch.bool, device=device)
        self._options = torch.zeros((num_rows, 2, len(OPTION_COLUMNS)), dtype=torch.int32, device=device)
        self._positions, self._lengths = torch.zeros((2, num_rows), dtype=torch.int32, device=device)
        self._tables = torch.zeros((num_rows, state.size.blocks), dtype=torch.int32, device=device)

    def gather(self, rows: Tensor) -> SamplingInputs:
        """Return the state that sampling needs for rows [batch] int64."""
        state, count = self.state, len(rows)
        width = state.hidden.shape[1]
        _gather[(count,)](
            rows, state.packed, state.hidden, self._seeds, self._frames, self._penalty,
            self._ignore_eos.view(torch.int8), self._options, self._hidden, self._is_finite.view(torch.int8),
            state.packed.stride(0), width=width, block=triton.next_power_of_2(width),
        )  # fmt: skip
        return SamplingInputs(
            self._hidden[:count],
            self._seeds[:count],
            self._frames[:count],
            self._penalty[:count],
            self._ignore_eos[:count],
            self._is_finite[:count, None],
            BatchOptions(self._options[:count, 0], WIDE),
            BatchOptions(self._options[:count, 1], WIDE),
        )

    def store_codes(self, codes: Tensor, is_finite: Tensor, out: Tensor, *, not_finite: int) -> None:
        """Copy codes [batch, groups] to the first rows of `out`, or `not_finite` for rows that are not `is_finite`."""
        count, groups = codes.shape
        _store_codes[(count,)](
            codes, is_finite.view(torch.int8), out, not_finite, groups=groups, block=triton.next_power_of_2(groups)
        )

    def talker_inputs(self, rows: Tensor, sums: Tensor) -> tuple[Tensor, Context]:
        """Return the talker's next input rows from embedding sums [batch, hidden], and their positions."""
        state, count = self.state, len(rows)
        width, blocks = sums.shape[1], state.size.blocks
        _talker_inputs[(count,)](
            rows, state.packed, sums, self.text, self._positions, self._slot_mapping, self._lengths, self._tables,
            self._inputs, state.packed.stride(0), state.first_block, self.padding, block_size=state.size.block_size,
            max_frames=state.size.max_model_len, num_blocks=blocks, table_block=triton.next_power_of_2(blocks),
            width=width, block=triton.next_power_of_2(width),
        )  # fmt: skip
        places = (self._positions, self._slot_mapping, self._tables, self._lengths)
        return self._inputs[:count], Context(*(each[:count] for each in places))

    def store_hidden(self, rows: Tensor, hidden: Tensor) -> None:
        """Store the talker's output [batch, hidden] as the hidden state of `rows`, and count a frame for each."""
        state, width = self.state, hidden.shape[1]
        _store_hidden[(len(rows),)](
            rows, state.packed, state.hidden, hidden, state.packed.stride(0), state.scratch_row, width=width,
            block=triton.next_power_of_2(width),
        )  # fmt: skip
