"""Everything a running sequence is between two frames, by its row, in tensors that CUDA graphs read and write.

The host writes a row once, when its sequence is admitted; from then on a step moves it along by itself. The row that
is handed to no sequence belongs to the padding of a batch.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deployments.talker.model.config import ModelConfig
from deployments.talker.sampling import BatchFilter, Breadth, FilterOptions
from deployments.talker.sequence import Sequence
from deployments.talker.staging import Staging

# Columns of a packed row, 32 bits each. The seed takes two.
_SEED, _POSITION, _FRAME, _NUM_TRAILING, _IGNORE_EOS, _PENALTY = 0, 2, 3, 4, 5, 6
_TALKER, _PREDICTOR = 8, 12  # greedy, temperature, top_k, top_p
_HEADER = 16
_GREEDY, _TEMPERATURE, _TOP_K, _TOP_P = range(4)


@dataclass(frozen=True, slots=True)
class StateSize:
    """Dimensions of the state."""

    max_num_seqs: int
    max_model_len: int
    block_size: int

    @property
    def blocks(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.max_model_len // self.block_size)

    @property
    def width(self) -> int:
        """Columns of a packed row; even, so that seeds are aligned."""
        return _HEADER + self.max_model_len + self.blocks + (self.max_model_len + self.blocks) % 2


class BatchState:
    """One row for each sequence that runs, and one for padding."""

    def __init__(self, config: ModelConfig, size: StateSize, *, dtype: torch.dtype, device: torch.device) -> None:
        rows = size.max_num_seqs + 1
        self.size, self.scratch_row = size, size.max_num_seqs
        self.hidden = torch.zeros((rows, config.talker.hidden_size), dtype=dtype, device=device)
        self.seen = torch.zeros((rows, config.vocab_size), dtype=torch.bool, device=device)
        self._packed = torch.zeros((rows, size.width), dtype=torch.int32, device=device)
        floats = self._packed.view(torch.float32)
        self.seeds = self._packed.view(torch.long)[:, _SEED // 2]
        self.positions, self.frames = self._packed[:, _POSITION], self._packed[:, _FRAME]
        self._num_trailing, self._ignore_eos = self._packed[:, _NUM_TRAILING], self._packed[:, _IGNORE_EOS]
        self._penalty, self._floats = floats[:, _PENALTY], floats
        self._trailing = self._packed[:, _HEADER : _HEADER + size.max_model_len]
        self._first_block = _HEADER + size.max_model_len
        self.block_tables = self._packed[:, self._first_block : self._first_block + size.blocks]
        self._staging = Staging(size.width, device=device)
        self._packed[:, _PENALTY] = int(np.float32(1.0).view(np.int32))
        for column in (_TALKER, _PREDICTOR):
            floats[:, column + _TEMPERATURE] = 1.0
            floats[:, column + _TOP_P] = 1.0
            self._packed[:, column + _GREEDY] = 1

    def admit(self, sequence: Sequence, blocks: list[int]) -> None:
        """Write the row of a sequence that is about to be prefilled."""
        assert sequence.row is not None
        staged = self._staging.take()
        self._pack(staged.values, sequence, blocks)
        self._packed[sequence.row].copy_(staged.tensor, non_blocking=True)
        seen = self.seen[sequence.row]
        seen.zero_()
        if sequence.frames:
            codes = torch.from_numpy(np.stack(sequence.frames)[:, 0]).long()
            seen[codes.to(seen.device, non_blocking=True)] = True

    def extend(self, row: int, index: int, block: int) -> None:
        """Give a running sequence the block at `index` of its table."""
        staged = self._staging.take()
        staged.values[0] = block
        column = self._first_block + index
        self._packed[row, column : column + 1].copy_(staged.tensor[:1], non_blocking=True)

    def trailing(self, rows: Tensor, padding: int) -> Tensor:
        """[rows] int32: the text id that goes into the talker together with each row's next frame."""
        frames = self.frames[rows]
        known = frames < self._num_trailing[rows]
        ids = self._trailing[rows, frames.clamp(max=self.size.max_model_len - 1)]
        return torch.where(known, ids, padding)

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """[rows] int64: cache indices of positions [rows] of sequences' rows."""
        index = (positions // self.size.block_size).clamp(max=self.size.blocks - 1)
        return self.block_tables[rows, index].long() * self.size.block_size + positions % self.size.block_size

    def talker_filter(self, rows: Tensor, breadth: Breadth) -> BatchFilter:
        """How codebook 0 is sampled."""
        return self._filter(rows, _TALKER, breadth)

    def predictor_filter(self, rows: Tensor, breadth: Breadth) -> BatchFilter:
        """How the other codebooks are sampled."""
        return self._filter(rows, _PREDICTOR, breadth)

    def penalty(self, rows: Tensor) -> Tensor:
        """[rows, 1]: repetition penalties."""
        return self._penalty[rows][:, None]

    def ignore_eos(self, rows: Tensor) -> Tensor:
        """[rows] bool."""
        return self._ignore_eos[rows] != 0

    def move_on(self, rows: Tensor) -> None:
        """Each row has a frame more; that of padding stays where it is."""
        one = (rows != self.scratch_row).int()
        self.positions[rows] = self.positions[rows] + one
        self.frames[rows] = self.frames[rows] + one

    def _filter(self, rows: Tensor, start: int, breadth: Breadth) -> BatchFilter:
        ints = self._packed[rows, start : start + 4]
        floats = ints.view(torch.float32)
        return BatchFilter(
            ints[:, _GREEDY, None] != 0,
            floats[:, _TEMPERATURE, None],
            ints[:, _TOP_K, None].long(),
            floats[:, _TOP_P, None],
            breadth,
        )

    def _pack(self, out: NDArray[np.int32], sequence: Sequence, blocks: list[int]) -> None:
        floats = out.view(np.float32)
        out[_SEED : _SEED + 2] = np.array([sequence.signed_seed], dtype=np.int64).view(np.int32)
        out[_POSITION], out[_FRAME] = sequence.num_positions, sequence.num_frames
        trailing = sequence.prompt.trailing[: self.size.max_model_len]
        out[_NUM_TRAILING] = len(trailing)
        out[_IGNORE_EOS] = sequence.request.synthesis.ignore_eos
        floats[_PENALTY] = sequence.sampling.repetition_penalty or 1.0
        _pack_options(out[_TALKER : _TALKER + 4], FilterOptions.for_talker(sequence.sampling))
        _pack_options(out[_PREDICTOR : _PREDICTOR + 4], FilterOptions.for_predictor(sequence.sampling))
        out[_HEADER : _HEADER + len(trailing)] = trailing
        out[self._first_block :] = 0
        out[self._first_block : self._first_block + len(blocks)] = blocks


def _pack_options(out: NDArray[np.int32], options: FilterOptions) -> None:
    floats = out.view(np.float32)
    out[_GREEDY], out[_TOP_K] = not options.do_sample, options.top_k
    floats[_TEMPERATURE], floats[_TOP_P] = options.temperature, options.top_p
