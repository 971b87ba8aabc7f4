"""The state of the running sequences between two frames: one row for each, in tensors that CUDA graphs read and write.

The host writes a row once, when its sequence is admitted. From then on each step updates it on the device. One row, the
scratch row, belongs to no sequence: batches are padded with it.
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

# Top-k keeps every candidate equal to the k-th; bfloat16 logits are often equal. Room for that many more.
_TIES = 14


@dataclass(frozen=True, slots=True)
class DrawingOptions:
    """How one codebook of one sequence is sampled: `do_sample` and DRAWING_OPTIONS, whose defaults change nothing."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @classmethod
    def for_talker(cls, sampling: Sampling) -> "DrawingOptions":
        """Options of codebook 0 from a complete `Sampling`."""
        return cls._of(sampling, bool(sampling.do_sample), "")

    @classmethod
    def for_predictor(cls, sampling: Sampling) -> "DrawingOptions":
        """Options of codebooks 1 and up from a complete `Sampling`."""
        return cls._of(sampling, bool(sampling.subtalker_dosample), SUBTALKER)

    @classmethod
    def _of(cls, sampling: Sampling, do_sample: bool, prefix: str) -> "DrawingOptions":
        return cls(do_sample, **{name: getattr(sampling, prefix + name) for name in DRAWING_OPTIONS})

    def pack(self) -> NDArray[np.int32]:
        """[options]: a column each, a float as its bits."""
        packed = np.zeros(len(OPTION_COLUMNS), dtype=np.int32)
        for option in fields(self):
            column = packed[OPTION_COLUMNS[option.name], None]
            (column.view(np.float32) if option.type is float else column)[:] = getattr(self, option.name)
        return packed


# The column of each option in a packed `DrawingOptions`, by name.
OPTION_COLUMNS = {option.name: column for column, option in enumerate(fields(DrawingOptions))}


@dataclass(frozen=True, slots=True)
class Breadth:
    """How many candidates a batch looks at, and whether top-p is among its filters. A CUDA graph fixes both."""

    num_candidates: int | None  # None: the whole vocabulary
    top_p: bool

    @classmethod
    def of(cls, options: list[DrawingOptions]) -> "Breadth":
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


class BatchOptions:
    """The options of a batch of rows, each row with its own."""

    def __init__(self, packed: Tensor, breadth: Breadth) -> None:
        """`packed` [rows, options] int32: each row as `DrawingOptions.pack` has it."""
        self.packed, self.breadth = packed, breadth

    @classmethod
    def of(cls, options: list[DrawingOptions], *, device: torch.device) -> "BatchOptions":
        """A row for each of `options`."""
        packed = np.stack([option.pack() for option in options])
        return cls(torch.from_numpy(packed).to(device), Breadth.of(options))

    def ints(self, name: str) -> Tensor:
        """[rows, 1] int32: each row's option `name`."""
        return self.packed[:, OPTION_COLUMNS[name], None]

    def floats(self, name: str) -> Tensor:
        """[rows, 1] float32."""
        return self.ints(name).view(torch.float32)


class Columns:
    """The columns of a packed row of 32-bit values. The header is followed by trailing text ids, then by the blocks.

    The talker's `DrawingOptions` and the predictor's are packed side by side. The header is a multiple of 16 columns
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
    """Locations of the rows of one pass of the talker. Rows of one sequence may be adjacent: a prefill."""

    positions: Tensor  # [rows] int32
    slot_mapping: Tensor  # [rows] int64: cache index each row's key and value go to
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
            self.packed[:, columns] = torch.from_numpy(DrawingOptions().pack()).to(device)

    def trailing(self, rows: Tensor, padding: int) -> Tensor:
        """[rows] int32: the text id that goes into the talker together with each row's next frame."""
        frames = self.num_frames[rows]
        has_id = frames < self._num_trailing[rows]
        ids = self._trailing[rows, frames.clamp(max=self.size.max_model_len - 1)]
        return torch.where(has_id, ids, padding)

    def slot_mapping(self, rows: Tensor, positions: Tensor) -> Tensor:
        """[rows] int64: cache indices of positions [rows] of sequences' rows."""
        index = (positions // self.size.block_size).clamp(max=self.size.blocks - 1)
        return self.block_tables[rows, index].long() * self.size.block_size + positions % self.size.block_size

    def text(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Two int32 tensors of shape [rows]: the position of each row's first text token, and how many positions are
        text.
        """
        return self.packed[rows, Columns.TEXT_START], self.packed[rows, Columns.NUM_TEXT]

    def talker_options(self, rows: Tensor, breadth: Breadth) -> BatchOptions:
        return BatchOptions(self.packed[rows, Columns.TALKER], breadth)

    def predictor_options(self, rows: Tensor, breadth: Breadth) -> BatchOptions:
        return BatchOptions(self.packed[rows, Columns.PREDICTOR], breadth)

    def penalty(self, rows: Tensor) -> Tensor:
        """[rows, 1]: repetition penalties."""
        return self._penalty[rows][:, None]

    def ignore_eos(self, rows: Tensor) -> Tensor:
        """[rows] bool."""
        return self._ignore_eos[rows] != 0

    def move_on(self, rows: Tensor) -> None:
        """Count one more frame for each row of a sequence; the scratch row stays as it is."""
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
        out[Columns.TALKER] = DrawingOptions.for_talker(sequence.sampling).pack()
        out[Columns.PREDICTOR] = DrawingOptions.for_predictor(sequence.sampling).pack()
        out[Columns.HEADER : Columns.HEADER + len(trailing)] = trailing
        out[self._state.first_block :] = 0
        out[self._state.first_block : self._state.first_block + len(blocks)] = blocks
