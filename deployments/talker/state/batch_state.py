"""The state of the running sequences between two frames: one row for each, in tensors that CUDA graphs read and write.

The host writes a row once, when its sequence is admitted. From then on each step updates it on the device. One row, the
scratch row, belongs to no sequence: batches are padded with it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deployments.gpu.graphs import Staging
from deployments.talker.model.model_config import ModelConfig
from deployments.talker.state.sampling import OPTION_COLUMNS, BatchSampler, Breadth, FilterOptions
from deployments.talker.state.sequence import Sequence


class Columns:
    """The columns of a packed row of 32-bit values. After the header stand trailing text ids, then the blocks.

    The talker's `FilterOptions` and the predictor's are packed side by side. The header is a multiple of 16 columns
    wide, because Triton loads aligned block tables as vectors.
    """

    SEED, _SEED_HIGH, POSITION, FRAME, NUM_TRAILING, NUM_TEXT, TEXT_START, IGNORE_EOS, PENALTY, FILTERS = range(10)
    COUNTS = slice(NUM_TRAILING, NUM_TEXT + 1)
    TALKER = slice(FILTERS, FILTERS + len(OPTION_COLUMNS))
    PREDICTOR = slice(TALKER.stop, TALKER.stop + len(OPTION_COLUMNS))
    HEADER = -(-PREDICTOR.stop // 16) * 16


@dataclass(frozen=True, slots=True)
class StateSize:
    """Dimensions of the state."""

    max_num_seqs: int
    max_model_len: int
    block_size: int

    @property
    def blocks(self) -> int:
        return -(-self.max_model_len // self.block_size)

    @property
    def width(self) -> int:
        """Columns of a packed row; even, so that seeds are aligned."""
        return Columns.HEADER + self.max_model_len + self.blocks + (self.max_model_len + self.blocks) % 2


@dataclass(frozen=True, slots=True)
class Context:
    """Where the rows of one pass of the talker stand. Rows of one sequence may stand side by side: a prefill."""

    positions: Tensor  # [rows] int32
    slots: Tensor  # [rows] int64: cache index each row's key and value go to
    block_tables: Tensor  # [rows, blocks] int32
    lengths: Tensor  # [rows] int32: positions each row attends to, its own included


class BatchState:
    """One row for each sequence that runs, and one for padding."""

    def __init__(self, config: ModelConfig, size: StateSize, *, dtype: torch.dtype, device: torch.device) -> None:
        rows = size.max_num_seqs + 1
        self.size, self.scratch_row = size, size.max_num_seqs
        self.hidden = torch.zeros((rows, config.talker.hidden_size), dtype=dtype, device=device)
        self.seen = torch.zeros((rows, config.vocab_size), dtype=torch.bool, device=device)
        self.packed = torch.zeros((rows, size.width), dtype=torch.int32, device=device)
        floats = self.packed.view(torch.float32)
        self.seeds = self.packed.view(torch.long)[:, Columns.SEED // 2]
        self.positions, self.num_frames = self.packed[:, Columns.POSITION], self.packed[:, Columns.FRAME]
        self._num_trailing, self._ignore_eos = self.packed[:, Columns.NUM_TRAILING], self.packed[:, Columns.IGNORE_EOS]
        self._penalty = floats[:, Columns.PENALTY]
        self._trailing = self.packed[:, Columns.HEADER : Columns.HEADER + size.max_model_len]
        self.first_block = Columns.HEADER + size.max_model_len
        self.block_tables = self.packed[:, self.first_block : self.first_block + size.blocks]
        self.packed[:, Columns.PENALTY] = int(np.float32(1.0).view(np.int32))
        for columns in (Columns.TALKER, Columns.PREDICTOR):
            self.packed[:, columns] = torch.from_numpy(FilterOptions().pack()).to(device)

    def trailing(self, rows: Tensor, padding: int) -> Tensor:
        """[rows] int32: the text id that goes into the talker together with each row's next frame."""
        frames = self.num_frames[rows]
        has_id = frames < self._num_trailing[rows]
        ids = self._trailing[rows, frames.clamp(max=self.size.max_model_len - 1)]
        return torch.where(has_id, ids, padding)

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """[rows] int64: cache indices of positions [rows] of sequences' rows."""
        index = (positions // self.size.block_size).clamp(max=self.size.blocks - 1)
        return self.block_tables[rows, index].long() * self.size.block_size + positions % self.size.block_size

    def text(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Twice [rows] int32: the position of each row's first text token, and how many positions are text."""
        return self.packed[rows, Columns.TEXT_START], self.packed[rows, Columns.NUM_TEXT]

    def talker_sampler(self, rows: Tensor, breadth: Breadth) -> BatchSampler:
        return BatchSampler(self.packed[rows, Columns.TALKER], breadth)

    def predictor_sampler(self, rows: Tensor, breadth: Breadth) -> BatchSampler:
        return BatchSampler(self.packed[rows, Columns.PREDICTOR], breadth)

    def penalty(self, rows: Tensor) -> Tensor:
        """[rows, 1]: repetition penalties."""
        return self._penalty[rows][:, None]

    def ignore_eos(self, rows: Tensor) -> Tensor:
        """[rows] bool."""
        return self._ignore_eos[rows] != 0

    def move_on(self, rows: Tensor) -> None:
        """Each row of a sequence has one frame more; the scratch row stays as it is."""
        step = (rows != self.scratch_row).int()
        self.positions[rows] = self.positions[rows] + step
        self.num_frames[rows] = self.num_frames[rows] + step


class RowWriter:
    """Writes rows of a state from the host, on the current CUDA stream.

    A lane has its own, because the pinned memory of one serves one CUDA stream. Two may write the scratch row at the
    same time: no row of a sequence depends on it.
    """

    def __init__(self, state: BatchState) -> None:
        self._state = state
        self._staging = Staging(state.size.width, device=state.packed.device)

    def admit(self, sequence: Sequence, blocks: list[int], *, num_frames: int) -> None:
        """Write the row of a sequence that is about to be prefilled together with `num_frames` of its frames."""
        assert sequence.row is not None
        staged = self._staging.next_row()
        self._pack(staged.values, sequence, blocks)
        staged.values[Columns.POSITION] = sequence.prompt.num_positions + num_frames
        staged.values[Columns.FRAME] = num_frames
        self._state.packed[sequence.row].copy_(staged.tensor, non_blocking=True)
        seen = self._state.seen[sequence.row]
        seen.zero_()
        if sequence.frames:
            codes = torch.from_numpy(np.stack(sequence.frames)[:, 0]).long()
            seen[codes.to(seen.device, non_blocking=True)] = True

    def extend_text(self, sequence: Sequence, start: int) -> None:
        """Give a running sequence the trailing text ids of its prompt from `start` on."""
        assert sequence.row is not None
        ids = sequence.prompt.trailing[start : self._state.size.max_model_len]
        staged = self._staging.next_row()
        counts = start + len(ids), sequence.prompt.num_text_positions
        staged.values[: len(ids)] = ids
        staged.values[len(ids) : len(ids) + 2] = counts
        row, first = self._state.packed[sequence.row], Columns.HEADER + start
        row[first : first + len(ids)].copy_(staged.tensor[: len(ids)], non_blocking=True)
        row[Columns.COUNTS].copy_(staged.tensor[len(ids) : len(ids) + 2], non_blocking=True)

    def add_block(self, row: int, index: int, block: int) -> None:
        """Give a running sequence the block at `index` of its table."""
        staged = self._staging.next_row()
        staged.values[0] = block
        column = self._state.first_block + index
        self._state.packed[row, column : column + 1].copy_(staged.tensor[:1], non_blocking=True)

    def _pack(self, out: NDArray[np.int32], sequence: Sequence, blocks: list[int]) -> None:
        floats = out.view(np.float32)
        out[Columns.SEED : Columns.SEED + 2] = np.array([sequence.signed_seed], dtype=np.int64).view(np.int32)
        trailing = sequence.prompt.trailing[: self._state.size.max_model_len]
        out[Columns.NUM_TRAILING] = len(trailing)
        out[Columns.NUM_TEXT], out[Columns.TEXT_START] = sequence.prompt.num_text_positions, sequence.prompt.text_start
        out[Columns.IGNORE_EOS] = sequence.request.ignore_eos
        floats[Columns.PENALTY] = sequence.sampling.repetition_penalty or 1.0
        out[Columns.TALKER] = FilterOptions.for_talker(sequence.sampling).pack()
        out[Columns.PREDICTOR] = FilterOptions.for_predictor(sequence.sampling).pack()
        out[Columns.HEADER : Columns.HEADER + len(trailing)] = trailing
        out[self._state.first_block :] = 0
        out[self._state.first_block : self._state.first_block + len(blocks)] = blocks
