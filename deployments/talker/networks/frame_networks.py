"""Device work for a batch as pure functions of tensors: the two halves of a frame, and prefill.

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
from deployments.talker.model.talker import SampleCode
from deployments.talker.sampling import torch_sampler
from deployments.talker.sampling.torch_sampler import Draw, NoiseSource, penalise_repetition, philox_noise
from deployments.talker.state.batch_state import NARROW, WIDE, BatchOptions, BatchState, Breadth, Context
from deployments.talker.state.kv_cache import KVCache

NetworkKind = Literal["fused", "cpu", "exact", "plain"]
"""Kinds of networks, as in `registry.py`."""

# Marks a code if the talker's state contains NaN or infinity.
NOT_FINITE = -1
# As in the official generation, speech never ends before this many codes of codebook 0.
MIN_NEW_TOKENS = 2


@dataclass(frozen=True, slots=True)
class PrefillTensors:
    """Inputs of one prefill pass: positions of any number of sequences, and the sequences whose prompts end in it."""

    text_ids: Tensor  # [positions] int32
    codec_ids: Tensor  # [positions] int32
    owners: Tensor  # [positions] int32: state row of each position's sequence
    positions: Tensor  # [positions] int32: position within the sequence
    last: Tensor  # [sequences] int32: index of each sequence's last position
    finished: Tensor  # [sequences] int32: state row of each sequence; padded with the scratch row


class FrameNetworks(ABC):
    """Networks of one talker over the state of a batch. `registry.py` lists the kinds."""

    kind: NetworkKind
    breadths: tuple[Breadth, ...] = (NARROW, WIDE)  # breadths for which steps are captured

    def __init__(self, tables: InputTables, state: BatchState, cache: KVCache, *, attention: str) -> None:
        """Create networks over shared state. `attention` is the value of `talker.attention`."""
        self.tables, self.state, self.cache = tables, state, cache
        self.talker, self.config = tables.talker, tables.talker.config
        self._make_buffers(num_rows=state.size.max_num_seqs, num_positions=MAX_PASS_POSITIONS)

    def another(self, *, num_rows: int, num_positions: int) -> Self:
        """Return networks for a lane, with the same weights, state and cache, and with separate buffers."""
        lane = copy(self)
        lane._make_buffers(num_rows=num_rows, num_positions=num_positions)
        return lane

    def _make_buffers(self, *, num_rows: int, num_positions: int) -> None:
        """Allocate buffers for steps of at most `num_rows` rows and prefills of at most `num_positions` positions."""
        like = self.state.hidden
        # Results of `predict` by batch index. Other CUDA streams may read them after the event of the codes.
        self.codes = torch.zeros((num_rows, self.config.num_code_groups), dtype=torch.int16, device=like.device)
        self.given = torch.zeros_like(self.codes, dtype=torch.int32)  # input of `feed_given` by batch index
        # Results of the last `advance` by batch index: the sum of the alignment head's attention on text positions,
        # and the attention-weighted sum of these positions. Both are zero without an alignment head.
        self.readings = torch.zeros((num_rows, 2), dtype=torch.float32, device=like.device)
        self._embeds = torch.zeros((num_rows, like.shape[1]), dtype=like.dtype, device=like.device)

    @property
    def name(self) -> str:
        """Kind and variant of the networks, for the start-up log."""
        return self.kind

    @abstractmethod
    def predict(self, rows: Tensor, breadth: Breadth) -> None:
        """Sample the next frames of state rows [rows] int64 into `codes`, and sum their embeddings into `_embeds`."""

    @abstractmethod
    def advance(self, rows: Tensor, *, length: int) -> None:
        """Run the talker's step after `predict`. All positions must be below `length`."""

    def feed_given(self, rows: Tensor) -> None:
        """Take the next frames of state rows [rows] from `given` instead of sampling them with `predict`."""
        self._embeds[: len(rows)] = self._embed(self.given[: len(rows)].long())

    def prefill(self, tensors: PrefillTensors, *, length: int) -> None:
        """Run positions of prompts, and store the hidden state of each sequence's last position.

        If `length` is 0, the positions of each sequence begin at 0. Otherwise all positions belong to one sequence, and
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
        """Convert input rows [rows, hidden] of the state rows `owners` [rows] to hidden states [rows, hidden].

        `prefill` describes `length`.
        """

    def _context(self, owners: Tensor, positions: Tensor) -> Context:
        state = self.state
        return Context(
            positions=positions,
            slot_mapping=state.slot_mapping(owners, positions),
            block_tables=state.block_tables[owners],
            lengths=positions + 1,
        )


class UnfusedNetworks(FrameNetworks):
    """Networks with sampling and row state in PyTorch: the base of all kinds except `fused`."""

    noise: NoiseSource = staticmethod(philox_noise)

    def predict(self, rows: Tensor, breadth: Breadth) -> None:
        state = self.state
        hidden, seeds, frames = state.hidden[rows], state.seeds[rows], state.num_frames[rows].long()
        options = state.predictor_options(rows, breadth)

        def sample(logits: Tensor, codebook: int) -> Tensor:
            return self.choose(logits, options, Draw(seeds, frames, codebook))

        codes, embeds = self._complete(hidden, self._sample_code0(rows, hidden, breadth), sample=sample)
        sound = torch.isfinite(hidden).all(-1, keepdim=True)
        self.codes[: len(rows)] = codes.masked_fill(~sound, NOT_FINITE)
        self._embeds[: len(rows)] = embeds

    def advance(self, rows: Tensor, *, length: int) -> None:
        state = self.state
        inputs = self._embeds[: len(rows)] + self.tables.text[state.trailing(rows, self.tables.pad)]
        context = self._context(rows, state.positions[rows])
        state.hidden[rows], weights = self._step(inputs, context, length)
        if weights is not None:
            self._read(rows, weights)
        state.move_on(rows)

    @abstractmethod
    def _first_logits(self, hidden: Tensor) -> Tensor:
        """Return the float32 logits of codebook 0 [rows, vocab]."""

    @abstractmethod
    def _complete(self, hidden: Tensor, code0: Tensor, *, sample: SampleCode) -> tuple[Tensor, Tensor]:
        """Return frames [rows, groups] that begin with `code0`, and the sums [rows, hidden] of their embeddings."""

    @abstractmethod
    def _step(self, inputs: Tensor, context: Context, length: int) -> tuple[Tensor, Tensor | None]:
        """Convert input rows [rows, hidden] to hidden states, and the alignment head's attention [rows, length]."""

    def _sample_code0(self, rows: Tensor, hidden: Tensor, breadth: Breadth) -> Tensor:
        """Sample codebook 0 [rows] int64 of the next frames of state rows [rows] from hidden states [rows, hidden]."""
        state, eos = self.state, self.config.codes.eos
        frames = state.num_frames[rows].long()
        logits = penalise_repetition(self._first_logits(hidden), state.seen[rows], state.penalty(rows))
        logits = logits.masked_fill(self.talker.suppressed, -torch.inf)
        too_early = (frames < MIN_NEW_TOKENS) | state.ignore_eos(rows)
        logits[:, eos] = logits[:, eos].masked_fill(too_early, -torch.inf)
        code0 = self.choose(logits, state.talker_options(rows, breadth), Draw(state.seeds[rows], frames, 0))
        state.seen.index_put_((rows, code0), torch.ones_like(code0, dtype=torch.bool))
        return code0

    def choose(self, logits: Tensor, options: BatchOptions, draw: Draw) -> Tensor:
        """Sample codes [rows] int64 from float32 logits [rows, vocab]. `sampling/` contains a sampler per device."""
        if torch_sampler.IN_C and logits.is_cpu and self.noise is philox_noise:
            return torch_sampler.sample_in_c(logits, options, draw)
        return torch_sampler.sample(logits, options, draw, self.noise)

    def _read(self, rows: Tensor, weights: Tensor) -> None:
        """Compute the `readings` of state rows [rows] from attention weights [rows, length]."""
        start, count = self.state.text(rows)
        token = torch.arange(weights.shape[1], device=weights.device) - start[:, None]
        on_text = weights * ((token >= 0) & (token < count[:, None]))
        self.readings[: len(rows), 0], self.readings[: len(rows), 1] = on_text.sum(-1), (on_text * token).sum(-1)
