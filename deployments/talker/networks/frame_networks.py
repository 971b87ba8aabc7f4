"""A batch's work on the device as pure functions of tensors: the two halves of a frame, and prefill.

The functions never read tensor values on the host, so each can be captured as a CUDA graph. On a CPU the same functions
run directly. A frame has two halves. `predict` samples codebook 0 from the talker's hidden state and runs the code
predictor; the codes are then complete. `advance` feeds the frame to the talker. A sequence ends when codebook 0 is the
end of speech. The other codes of that step are meaningless.
"""

from abc import ABC, abstractmethod
from copy import copy
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from deployments.talker.model.input_tables import MAX_PASS_POSITIONS, InputTables
from deployments.talker.state.batch_state import NARROW, WIDE, BatchState, Breadth, Context
from deployments.talker.state.kv_cache import KVCache

NetworkKind = Literal["fused", "cpu", "exact", "plain"]
"""Kinds of networks, as in `registry.py`."""

# Marks a code whose talker state contains NaN or infinity.
NOT_FINITE = -1
# As in official generation, speech never ends before this many codes from codebook 0.
MIN_NEW_TOKENS = 2


@dataclass(frozen=True, slots=True)
class PrefillTensors:
    """Inputs to a prefill pass: positions of any number of sequences, and the sequences whose prompts end in it."""

    text_ids: Tensor  # [positions] int32
    codec_ids: Tensor  # [positions] int32
    owners: Tensor  # [positions] int32: state row of each position's sequence
    positions: Tensor  # [positions] int32: position within the sequence
    last: Tensor  # [sequences] int32: index of each sequence's last position
    finished: Tensor  # [sequences] int32: state row of each sequence; padded with the scratch row


class FrameNetworks(ABC):
    """A talker's networks, which work on a batch's state. `registry.py` lists the kinds."""

    kind: NetworkKind
    breadths: tuple[Breadth, ...] = (NARROW, WIDE)  # breadths that steps are captured for

    def __init__(self, tables: InputTables, state: BatchState, cache: KVCache, *, attention: str) -> None:
        """Create networks on shared state. `attention` is the value of `talker.attention`."""
        self.tables, self.state, self.cache = tables, state, cache
        self.talker, self.config = tables.talker, tables.talker.config
        self._make_buffers(num_rows=state.size.max_num_seqs, num_positions=MAX_PASS_POSITIONS)

    def another(self, *, num_rows: int, num_positions: int) -> Self:
        """Return networks for a lane, with the same weights, state and cache, but separate buffers."""
        lane = copy(self)
        lane._make_buffers(num_rows=num_rows, num_positions=num_positions)
        return lane

    def _make_buffers(self, *, num_rows: int, num_positions: int) -> None:
        """Allocate buffers for steps of at most `num_rows` rows and prefills of at most `num_positions` positions."""
        like = self.state.hidden
        # Results of `predict` by batch index. Other CUDA streams may read them after the event of the codes.
        self.codes = torch.zeros((num_rows, self.config.num_code_groups), dtype=torch.int16, device=like.device)
        self.forced_codes = torch.zeros_like(self.codes, dtype=torch.int32)  # input to `feed_forced` by batch index
        # Results of the last `advance` by batch index: the sum of the alignment head's attention on text positions,
        # and the attention-weighted sum of these positions. Both are zero without an alignment head.
        self.readings = torch.zeros((num_rows, 2), dtype=torch.float32, device=like.device)
        self._embeds = torch.zeros((num_rows, like.shape[1]), dtype=like.dtype, device=like.device)

    @property
    def name(self) -> str:
        """Kind and variant of the networks, for the startup log."""
        return self.kind

    @abstractmethod
    def predict(self, rows: Tensor, breadth: Breadth) -> None:
        """Sample the next frames of state rows [rows] int64 into `codes`, and sum their embeddings into `_embeds`."""

    @abstractmethod
    def advance(self, rows: Tensor, *, length: int) -> None:
        """Run the talker's step after `predict`. All positions must be below `length`."""

    def feed_forced(self, rows: Tensor) -> None:
        """Take the next frames for state rows [rows] from `forced_codes` instead of sampling them with `predict`."""
        self._embeds[: len(rows)] = self._embed(self.forced_codes[: len(rows)].long())

    def prefill(self, tensors: PrefillTensors, *, length: int) -> None:
        """Run positions of prompts, and store the hidden state of each sequence's last position.

        If `length` is 0, each sequence's positions begin at 0. Otherwise all positions belong to one sequence, and
        attend to at most `length` positions.
        """
        owners = tensors.owners.long()
        context = self._context(owners, tensors.positions)
        inputs = self.tables.rows(tensors.text_ids, tensors.codec_ids)
        hidden = self._run_prompt(owners, inputs, context, length)
        self.state.hidden[tensors.finished.long()] = hidden[tensors.last.long()]

    def _embed(self, frames: Tensor) -> Tensor:
        """Return the sums [rows, hidden] of the embeddings of frames [rows, groups], bitwise equal to `predict`."""
        return self.talker.embed_frames(frames)

    @abstractmethod
    def _run_prompt(self, owners: Tensor, inputs: Tensor, context: Context, length: int) -> Tensor:
        """Convert input rows [rows, hidden] for the state rows `owners` [rows] to hidden states [rows, hidden].

        See `prefill` for `length`.
        """

    def _context(self, owners: Tensor, positions: Tensor) -> Context:
        state = self.state
        return Context(
            positions=positions,
            slot_mapping=state.slot_mapping(owners, positions),
            block_tables=state.block_tables[owners],
            lengths=positions + 1,
        )
