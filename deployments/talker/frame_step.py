"""What the device does for a batch, as functions of tensors alone: the two halves of a frame, and prefill.

Nothing here looks at values on the host, so that each function can be recorded as a CUDA graph; on a CPU the same
functions run as they are. A frame is made in two halves: `predict` samples codebook 0 from the talker's hidden state
and lets the predictor complete the frame, whereupon the codes can leave; `advance` feeds the frame to the talker. A
sequence has ended when codebook 0 is the end of speech: what stands behind it is no frame.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deployments.talker.batch_state import BatchState
from deployments.talker.input_tables import MAX_DENSE_ROWS, InputTables
from deployments.talker.sampling import NARROW, WIDE, Breadth, Draw, NoiseSource, penalise_repetition, philox_noise
from deployments.talker.stacks import Networks, Rows

# In place of a code where the talker's state has become NaN or infinite.
SPOILT = -1
# The official generation never ends speech before this many codes of codebook 0.
MIN_NEW_TOKENS = 2


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """Rows of one prefill pass, of any number of sequences, and whose last row is among them."""

    text_ids: Tensor  # [rows] int32
    codec_ids: Tensor  # [rows] int32
    owners: Tensor  # [rows] int32: rows of the state
    positions: Tensor  # [rows] int32
    last: Tensor  # [sequences] int32: which rows are the last of their sequence
    finished: Tensor  # [sequences] int32: rows of the state they belong to; padded with the scratch row


class FrameStep:
    """The networks of one talker over the state of a batch."""

    packed_rows = MAX_DENSE_ROWS  # rows of a pass up to which prompts are packed
    breadths: tuple[Breadth, ...] = (NARROW, WIDE)  # those that are worth a recording of their own

    def __init__(self, tables: InputTables, state: BatchState, networks: Networks) -> None:
        self.tables, self.state, self.networks = tables, state, networks
        self.talker, self.config = tables.talker, tables.talker.config
        self.noise: NoiseSource = philox_noise
        max_num_seqs = state.size.max_num_seqs
        like = state.hidden
        # Results of `predict`, by place in the batch: other streams may read them behind the event of the codes.
        self.codes = torch.zeros((max_num_seqs, self.config.num_code_groups), dtype=torch.int16, device=like.device)
        self.given = torch.zeros_like(
            self.codes, dtype=torch.int32
        )  # frames that `recall` takes, by place in the batch
        self._embeds = torch.zeros((max_num_seqs, like.shape[1]), dtype=like.dtype, device=like.device)

    @property
    def name(self) -> str:
        """What runs, for reports."""
        return self.networks.name

    def predict(self, rows: Tensor, breadth: Breadth) -> None:
        """The next frames of state rows [rows] int64 into `codes`."""
        state = self.state
        hidden, seeds, frames = state.hidden[rows], state.seeds[rows], state.frames[rows].long()
        options = state.predictor_filter(rows, breadth)

        def sample(logits: Tensor, codebook: int) -> Tensor:
            return options.sample(logits, Draw(seeds, frames, codebook), self.noise)

        code0 = self._sample_code0(rows, hidden, breadth)
        codes, embeds = self.networks.predictor(hidden, code0, sample)
        sound = torch.isfinite(hidden).all(-1, keepdim=True)
        self.codes[: len(rows)] = codes.masked_fill(~sound, SPOILT)
        self._embeds[: len(rows)] = embeds

    def recall(self, rows: Tensor) -> None:
        """In place of `predict`: the next frames of state rows [rows] are those `given`."""
        self._embeds[: len(rows)] = self._embed(self.given[: len(rows)].long())

    def advance(self, rows: Tensor, *, length: int) -> None:
        """The talker's step behind `predict`; no position is at or beyond `length`."""
        state = self.state
        inputs = self._embeds[: len(rows)] + self.tables.text[state.trailing(rows, self.tables.pad)]
        state.hidden[rows] = self.networks.talker(inputs, self._rows(rows, state.positions[rows]), length)
        state.move_on(rows)

    def prefill(self, rows: PrefillRows, *, length: int) -> None:
        """Run prompt rows; the hidden states of last rows become their sequences'. `length` is RunPrompt's."""
        inputs, owners = self.tables.rows(rows.text_ids, rows.codec_ids), rows.owners.long()
        hidden = self.networks.prompt(inputs, self._rows(owners, rows.positions), owners, length)
        self.state.hidden[rows.finished.long()] = hidden[rows.last.long()]

    def _embed(self, frames: Tensor) -> Tensor:
        """Sums [rows, hidden] of the embeddings of frames [rows, groups], bit for bit as `predict` adds them."""
        return self.talker.embed_frames(frames)

    def _sample_code0(self, rows: Tensor, hidden: Tensor, breadth: Breadth) -> Tensor:
        """Codebook 0 [rows] int64 of the next frames of state rows [rows], whose hidden states are [rows, hidden]."""
        state, eos = self.state, self.config.codes.eos
        frames = state.frames[rows].long()
        logits = penalise_repetition(self.talker.logits(hidden), state.seen[rows], state.penalty(rows))
        logits = logits.masked_fill(self.talker.suppressed, -torch.inf)
        too_early = (frames < MIN_NEW_TOKENS) | state.ignore_eos(rows)
        logits[:, eos] = logits[:, eos].masked_fill(too_early, -torch.inf)
        code0 = state.talker_filter(rows, breadth).sample(logits, Draw(state.seeds[rows], frames, 0), self.noise)
        state.seen.index_put_((rows, code0), torch.ones_like(code0, dtype=torch.bool))
        return code0

    def _rows(self, owners: Tensor, positions: Tensor) -> Rows:
        state = self.state
        return Rows(
            positions=positions,
            slots=state.slots(owners, positions),
            block_tables=state.block_tables[owners],
            lengths=positions + 1,
        )
