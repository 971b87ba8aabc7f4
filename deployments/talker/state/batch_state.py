"""State of running sequences between two frames: one row per sequence, in static tensors for CUDA graphs.

The host writes a row once, when its sequence is admitted. Each step then updates the row on the device. One additional
row, the scratch row, pads batches.
"""

from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deployments.gpu.graphs import Staging
from deployments.protocol import DRAWING_OPTIONS, SUBTALKER, Sampling
from deployments.talker.model.model_config import ModelConfig
from deployments.talker.state.sequence import Sequence

# Top-k keeps all candidates that tie with the k-th, and ties are common in bfloat16. Reserve room for more candidates.
_TIES = 14


@dataclass(frozen=True, slots=True)
class DrawingOptions:
    """Sampling options for one codebook: `do_sample` and DRAWING_OPTIONS. The defaults have no effect."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @classmethod
    def for_talker(cls, sampling: Sampling) -> "DrawingOptions":
        """Return the options for codebook 0 from a complete `Sampling`."""
        return cls._of(sampling, bool(sampling.do_sample), "")

    @classmethod
    def for_predictor(cls, sampling: Sampling) -> "DrawingOptions":
        """Return the options for codebooks 1 and up from a complete `Sampling`."""
        return cls._of(sampling, bool(sampling.subtalker_dosample), SUBTALKER)

    @classmethod
    def _of(cls, sampling: Sampling, do_sample: bool, prefix: str) -> "DrawingOptions":
        return cls(do_sample, **{name: getattr(sampling, prefix + name) for name in DRAWING_OPTIONS})

    def pack(self) -> NDArray[np.int32]:
        """Pack the options into int32 [options], with floats stored as their bits."""
        packed = np.zeros(len(OPTION_COLUMNS), dtype=np.int32)
        for option in fields(self):
            column = packed[OPTION_COLUMNS[option.name], None]
            (column.view(np.float32) if option.type is float else column)[:] = getattr(self, option.name)
        return packed


# Column of each option in a packed `DrawingOptions`, by name
OPTION_COLUMNS = {option.name: column for column, option in enumerate(fields(DrawingOptions))}


@dataclass(frozen=True, slots=True)
class Breadth:
    """Number of candidates that sampling considers, and whether it applies top-p. A CUDA graph fixes both."""

    num_candidates: int | None  # None: the entire vocabulary
    top_p: bool

    @classmethod
    def of(cls, options: list[DrawingOptions]) -> "Breadth":
        """Return the smallest breadth that supports all of `options`."""
        limited = all(option.top_k > 0 or not option.do_sample for option in options)
        largest = max((option.top_k for option in options if option.do_sample), default=0)
        return cls(largest + _TIES if limited else None, any(option.top_p < 1.0 for option in options))

    def covers(self, other: "Breadth") -> bool:
        """Return whether this breadth supports all options that `other` supports."""
        if other.top_p and not self.top_p:
            return False
        if self.num_candidates is None or other.num_candidates is None:
            return self.num_candidates is None
        return other.num_candidates <= self.num_candidates


# NARROW is enough for nearly all requests that use the checkpoints' defaults. WIDE supports all requests.
NARROW = Breadth(50 + _TIES, top_p=False)
WIDE = Breadth(None, top_p=True)


class BatchOptions:
    """Sampling options for the rows of a batch."""

    def __init__(self, packed: Tensor, breadth: Breadth) -> None:
        """Wrap `packed` [rows, options] int32, in the format of `DrawingOptions.pack`."""
        self.packed, self.breadth = packed, breadth

    @classmethod
    def of(cls, options: list[DrawingOptions], *, device: torch.device) -> "BatchOptions":
        """Pack one row for each of `options`."""
        packed = np.stack([option.pack() for option in options])
        return cls(torch.from_numpy(packed).to(device), Breadth.of(options))

    def ints(self, name: str) -> Tensor:
        """Return option `name` of each row, [rows, 1] int32."""
        return self.packed[:, OPTION_COLUMNS[name], None]

    def floats(self, name: str) -> Tensor:
        """Return option `name` of each row, [rows, 1] float32."""
        return self.ints(name).view(torch.float32)


class Columns:
    """Columns of a packed row of 32-bit values: a header, then trailing text ids, then block numbers.

    The talker's and the predictor's `DrawingOptions` are packed side by side. The header's width is a multiple of 16
    columns, because Triton loads aligned block tables as vectors.
    """

    SEED, _SEED_HIGH, POSITION, FRAME, NUM_TRAILING, NUM_TEXT, TEXT_START, IGNORE_EOS, PENALTY, FILTERS = range(10)
    COUNTS = slice(NUM_TRAILING, NUM_TEXT + 1)
    TALKER = slice(FILTERS, FILTERS + len(OPTION_COLUMNS))
    PREDICTOR = slice(TALKER.stop, TALKER.stop + len(OPTION_COLUMNS))
    HEADER = -(-PREDICTOR.stop // 16) * 16


@dataclass(frozen=True, slots=True)
class StateSize:
    """Dimensions of the batch state."""

    max_num_seqs: int
    max_model_len: int
    block_size: int

    @property
    def blocks(self) -> int:
        return -(-self.max_model_len // self.block_size)

    @property
    def width(self) -> int:
        """Number of columns of a packed row; even, to align seeds."""
        return Columns.HEADER + self.max_model_len + self.blocks + (self.max_model_len + self.blocks) % 2


@dataclass(frozen=True, slots=True)
class Context:
    """Positions and cache locations of the rows in a talker pass. In a prefill, a sequence's rows are adjacent."""

    positions: Tensor  # [rows] int32
    slot_mapping: Tensor  # [rows] int64: cache index of each row's key and value
    block_tables: Tensor  # [rows, blocks] int32
    lengths: Tensor  # [rows] int32: number of positions that each row attends to, including its own


class BatchState:
    """State tensors with one row for each running sequence and one row for padding."""

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
            self.packed[:, columns] = torch.from_numpy(DrawingOptions().pack()).to(device)

    def trailing(self, rows: Tensor, padding: int) -> Tensor:
        """Return the text id that is added to each row's next frame, [rows] int32."""
        frames = self.num_frames[rows]
        has_id = frames < self._num_trailing[rows]
        ids = self._trailing[rows, frames.clamp(max=self.size.max_model_len - 1)]
        return torch.where(has_id, ids, padding)

    def slot_mapping(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return the cache indices of positions [rows] for state rows [rows], [rows] int64."""
        index = (positions // self.size.block_size).clamp(max=self.size.blocks - 1)
        return self.block_tables[rows, index].long() * self.size.block_size + positions % self.size.block_size

    def text(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return two int32 tensors [rows]: position of the first text token, and number of text positions."""
        return self.packed[rows, Columns.TEXT_START], self.packed[rows, Columns.NUM_TEXT]

    def talker_options(self, rows: Tensor, breadth: Breadth) -> BatchOptions:
        return BatchOptions(self.packed[rows, Columns.TALKER], breadth)

    def predictor_options(self, rows: Tensor, breadth: Breadth) -> BatchOptions:
        return BatchOptions(self.packed[rows, Columns.PREDICTOR], breadth)

    def penalty(self, rows: Tensor) -> Tensor:
        """Return the repetition penalties, [rows, 1]."""
        return self._penalty[rows][:, None]

    def ignore_eos(self, rows: Tensor) -> Tensor:
        """Return `ignore_eos` of each row, [rows] bool."""
        return self._ignore_eos[rows] != 0

    def move_on(self, rows: Tensor) -> None:
        """Count one more frame for every row except the scratch row."""
        step = (rows != self.scratch_row).int()
        self.positions[rows] = self.positions[rows] + step
        self.num_frames[rows] = self.num_frames[rows] + step


class RowWriter:
    """Writes state rows from the host, on the current CUDA stream.

    Each lane has its own writer, because pinned memory may be used on only one CUDA stream. Two writers may write to
    the scratch row concurrently, because no sequence depends on it.
    """

    def __init__(self, state: BatchState) -> None:
        self._state = state
        self._staging = Staging(state.size.width, device=state.packed.device)

    def write_row(self, sequence: Sequence, blocks: list[int], *, num_frames: int) -> None:
        """Write a sequence's row before its prefill, which includes `num_frames` of its frames."""
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
        """Write the trailing text ids of a running sequence's prompt from `start` on."""
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
        """Write `block` at `index` of a running sequence's block table."""
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
        out[Columns.TALKER] = DrawingOptions.for_talker(sequence.sampling).pack()
        out[Columns.PREDICTOR] = DrawingOptions.for_predictor(sequence.sampling).pack()
        out[Columns.HEADER : Columns.HEADER + len(trailing)] = trailing
        out[self._state.first_block :] = 0
        out[self._state.first_block : self._state.first_block + len(blocks)] = blocks
