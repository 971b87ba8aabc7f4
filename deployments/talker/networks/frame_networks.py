"""Device work for a batch as pure functions of tensors: the two halves of a frame, and prefill.

No function looks at values on the host, so that each can be captured as a CUDA graph; on a CPU the same functions run
as they are. A frame is made in two halves: `predict` samples codebook 0 from the talker's hidden state and lets the
predictor complete the frame, after which the codes can leave; `advance` feeds the frame to the talker. A sequence has
ended when codebook 0 is the end of speech; the other codes do not form a frame then.
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
"""The kinds are those of `registry.py`."""

# Replaces a code if the talker's state has become NaN or infinite.
NOT_FINITE = -1
# The official generation never ends speech before this many codes of codebook 0.
MIN_NEW_TOKENS = 2


@dataclass(frozen=True, slots=True)
class PrefillTensors:
    """One prefill pass: positions of any number of sequences, and the sequences that end in it."""

    text_ids: Tensor  # [positions] int32
    codec_ids: Tensor  # [positions] int32
    owners: Tensor  # [positions] int32: the sequences' rows of the state
    positions: Tensor  # [positions] int32: within their sequence
    last: Tensor  # [sequences] int32: which of the positions are the last of their sequence
    finished: Tensor  # [sequences] int32: the sequences' rows of the state; padded with the scratch row


class FrameNetworks(ABC):
    """The networks of one talker over the state of a batch. `registry.py` has the kinds."""

    kind: NetworkKind
    breadths: tuple[Breadth, ...] = (NARROW, WIDE)  # breadths that are worth a capture of their own

    def __init__(self, tables: InputTables, state: BatchState, cache: KVCache, *, attention: str) -> None:
        """`attention` is the setting."""
        self.tables, self.state, self.cache = tables, state, cache
        self.talker, self.config = tables.talker, tables.talker.config
        self._make_buffers(num_rows=state.size.max_num_seqs, num_positions=MAX_PASS_POSITIONS)

    def another(self, *, num_rows: int, num_positions: int) -> Self:
        """Networks of a lane: the same weights, state and cache, and buffers of their own."""
        lane = copy(self)
        lane._make_buffers(num_rows=num_rows, num_positions=num_positions)
        return lane

    def _make_buffers(self, *, num_rows: int, num_positions: int) -> None:
        """Buffers that steps of at most `num_rows` rows and prefills of at most `num_positions` positions write."""
        like = self.state.hidden
        # Results of `predict`, by index in the batch: other CUDA streams may read them after the event of the codes.
        self.codes = torch.zeros((num_rows, self.config.num_code_groups), dtype=torch.int16, device=like.device)
        self.given = torch.zeros_like(self.codes, dtype=torch.int32)  # for `feed_given`, by index in the batch
        # Of the last `advance`, by index in the batch: how much of the alignment head's attention is on the text, and
        # the same times the text positions. Zero if no head is known.
        self.readings = torch.zeros((num_rows, 2), dtype=torch.float32, device=like.device)
        self._embeds = torch.zeros((num_rows, like.shape[1]), dtype=like.dtype, device=like.device)

    @property
    def name(self) -> str:
        """The kind and what its speed depends on, for reports."""
        return self.kind

    @abstractmethod
    def predict(self, rows: Tensor, breadth: Breadth) -> None:
        """The next frames of state rows [rows] int64 into `codes`, and the sums of their embeddings into `_embeds`."""

    @abstractmethod
    def advance(self, rows: Tensor, *, length: int) -> None:
        """The talker's step after `predict`; no position is at or beyond `length`."""

    def feed_given(self, rows: Tensor) -> None:
        """Take the next frames of state rows [rows] from `given`, in place of `predict`."""
        self._embeds[: len(rows)] = self._embed(self.given[: len(rows)].long())

    def prefill(self, tensors: PrefillTensors, *, length: int) -> None:
        """Run positions of prompts; the hidden states of last positions become their sequences'.

        `length` 0: each sequence's positions begin at 0. Else all are of one sequence, and none attends beyond `length`
        positions.
        """
        owners = tensors.owners.long()
        context = self._context(owners, tensors.positions)
        inputs = self.tables.rows(tensors.text_ids, tensors.codec_ids)
        hidden = self._run_prompt(owners, inputs, context, length)
        self.state.hidden[tensors.finished.long()] = hidden[tensors.last.long()]

    def _embed(self, frames: Tensor) -> Tensor:
        """Sums [rows, hidden] of the embeddings of frames [rows, groups], bit for bit as `predict` adds them."""
        return self.talker.embed_frames(frames)

    @abstractmethod
    def _run_prompt(self, owners: Tensor, inputs: Tensor, context: Context, length: int) -> Tensor:
        """Input rows [rows, hidden] of the state rows `owners` [rows] -> hidden states [rows, hidden]; `length` is that
        of `prefill`.
        """

    def _context(self, owners: Tensor, positions: Tensor) -> Context:
        state = self.state
        return Context(
            positions=positions,
            slot_mapping=state.slot_mapping(owners, positions),
            block_tables=state.block_tables[owners],
            lengths=positions + 1,
        )
