"""Runs the networks over a batch of sequences: prefill, and the step that makes one frame for each.

Between two steps a sequence is its row in `hidden`, `code0` and `seen`, and its positions in the KV cache. On CPU every
matrix product has the same number of rows: what a row comes out as then depends on that row alone, so codes are equal
whether a sequence runs by itself, in a batch, or is resumed.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deployments.protocol import Codes
from deployments.talker.block_manager import BlockManager
from deployments.talker.cuda_graphs import PredictorGraphs, PredictorInputs, predict
from deployments.talker.kv_cache import KVCache, PagedAttention, RowLayout, padded_length
from deployments.talker.model.talker import Talker
from deployments.talker.sampling import (
    BatchFilter,
    Draw,
    FilterOptions,
    NoiseSource,
    penalise_repetition,
    philox_noise,
)
from deployments.talker.sequence import Sequence

# Rows of one prefill pass on a GPU: bounds the memory of gathered contexts.
_GPU_PREFILL_ROWS = 128
# The official generation never ends speech before this many codes of codebook 0.
_MIN_NEW_TOKENS = 2
_GREEDY = FilterOptions(do_sample=False, temperature=1.0, top_k=1, top_p=1.0)


@dataclass(frozen=True, slots=True)
class Step:
    """What a decode step brought, sequence by sequence."""

    frames: Codes  # [sequences, groups]
    ended: np.ndarray  # [sequences] bool: end of speech comes behind this frame


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Sampling options of the sequences in a batch as tensors, padded to the pass's rows."""

    members: tuple[tuple[int, int], ...]  # each sequence's id and row
    rows: Tensor  # [rows] int64: each sequence's row of the state; padding shares a scratch row
    seeds: Tensor  # [rows] int64
    talker: BatchFilter
    predictor: BatchFilter
    penalty: Tensor  # [rows, 1]
    ignore_eos: Tensor  # [rows] bool


class ModelRunner:
    """Owns the KV cache and the batch state of one talker."""

    def __init__(self, talker: Talker, cache: KVCache, blocks: BlockManager, *, max_num_seqs: int) -> None:
        self.talker, self.cache, self.blocks = talker, cache, blocks
        self.noise: NoiseSource = philox_noise
        weight = talker.codec_head.weight
        self.device = weight.device
        self.buckets = [max_num_seqs] if self.device.type == "cpu" else powers_of_two(max_num_seqs)
        self.graphs: PredictorGraphs | None = None
        self.scratch_row = max_num_seqs
        hidden_shape = (max_num_seqs + 1, talker.config.talker.hidden_size)
        self.hidden = torch.zeros(hidden_shape, dtype=weight.dtype, device=self.device)
        self.code0 = torch.zeros(max_num_seqs + 1, dtype=torch.long, device=self.device)
        self.seen = torch.zeros((max_num_seqs + 1, talker.config.vocab_size), dtype=torch.bool, device=self.device)
        self._options: BatchOptions | None = None

    def capture(self) -> None:
        """On a GPU, record the predictor for every batch size; without this it runs operation by operation."""
        if self.device.type == "cpu":
            return
        graphs = PredictorGraphs(self.talker, self.noise)
        for rows in reversed(self.buckets):  # the largest first: smaller ones reuse its memory
            graphs.capture(rows)
        self.graphs = graphs

    @torch.inference_mode()
    def prefill(self, sequences: list[Sequence]) -> np.ndarray:
        """Run prompts, and the frames of resumed sequences, and sample each sequence's next codebook 0.

        Returns which [sequences] bool get no further frame: end of speech comes right behind those they resume from.
        """
        if not sequences:
            return np.zeros(0, dtype=bool)
        self._options = None
        for sequence in sequences:
            self._prefill_rows(sequence)
            self._recall_codes(sequence)
        return self._sample_code0(sequences)[: len(sequences)].cpu().numpy()

    @torch.inference_mode()
    def decode(self, sequences: list[Sequence]) -> Step:
        """One frame for each sequence: predictor, then the talker's step and the next codebook 0."""
        options = self._batch_options(sequences)
        codes, embeds = self._predict(options, self._frame_numbers(sequences, len(options.rows)))
        text = torch.stack([sequence.prompt.text_row(sequence.num_frames) for sequence in sequences])
        rows = embeds + _pad(text, len(embeds))
        layout = self._layout([(sequence, sequence.num_positions) for sequence in sequences], len(embeds))
        hidden = self.talker(rows, layout.positions, PagedAttention(self.cache, layout))
        self.hidden[options.rows] = hidden
        ended = self._sample_code0(sequences, ahead=1)
        frames = codes[: len(sequences)].cpu().numpy().astype(np.int16)
        return Step(frames, ended[: len(sequences)].cpu().numpy())

    def _prefill_rows(self, sequence: Sequence) -> None:
        """All rows of a sequence through the talker, some at a time; its last hidden state is its state."""
        rows = self._input_rows(sequence)
        at_once = self.buckets[0] if self.device.type == "cpu" else _GPU_PREFILL_ROWS
        for start in range(0, len(rows), at_once):
            part = rows[start : start + at_once]
            count = at_once if self.device.type == "cpu" else len(part)
            layout = self._layout([(sequence, start + offset) for offset in range(len(part))], count)
            hidden = self.talker(_pad(part, count), layout.positions, PagedAttention(self.cache, layout))
            self.hidden[sequence.row] = hidden[len(part) - 1]

    def _input_rows(self, sequence: Sequence) -> Tensor:
        """[positions, hidden]: the prompt, then what the talker was fed for each frame that exists."""
        if not sequence.frames:
            return sequence.prompt.rows
        frames = torch.from_numpy(np.stack(sequence.frames)).long().to(self.device)
        text = torch.stack([sequence.prompt.text_row(frame) for frame in range(sequence.num_frames)])
        return torch.cat((sequence.prompt.rows, self.talker.embed_frames(frames) + text))

    def _recall_codes(self, sequence: Sequence) -> None:
        """Mark the codes of codebook 0 that the repetition penalty has to know of."""
        seen = self.seen[sequence.row]
        seen.fill_(False)
        if sequence.frames:
            codes = torch.from_numpy(np.stack(sequence.frames)[:, 0]).long().to(self.device)
            seen[codes] = True

    def _predict(self, options: BatchOptions, frames: Tensor) -> tuple[Tensor, Tensor]:
        """The frames numbered `frames` [rows]: codes [rows, groups] and the sums of their embeddings [rows, hidden]."""
        rows = options.rows
        inputs = PredictorInputs(self.hidden[rows], self.code0[rows], frames, options.seeds, options.predictor)
        return predict(self.talker, inputs, self.noise) if self.graphs is None else self.graphs(inputs)

    def _sample_code0(self, sequences: list[Sequence], *, ahead: int = 0) -> Tensor:
        """Sample codebook 0 of the frame `ahead` of the next one; returns which rows [rows] end there."""
        options = self._batch_options(sequences)
        eos = self.talker.config.codes.eos
        frames = self._frame_numbers(sequences, len(options.rows)) + ahead
        logits = self.talker.logits(self.hidden[options.rows])
        logits = penalise_repetition(logits, self.seen[options.rows], options.penalty)
        logits = logits.masked_fill(self.talker.suppressed, -torch.inf)
        too_early = (frames < _MIN_NEW_TOKENS) | options.ignore_eos
        logits[:, eos] = logits[:, eos].masked_fill(too_early, -torch.inf)
        code0 = options.talker.sample(logits, Draw(options.seeds, frames, 0), self.noise)
        self.code0[options.rows] = code0
        self.seen[options.rows, code0] = True
        return code0 == eos

    def _frame_numbers(self, sequences: list[Sequence], count: int) -> Tensor:
        numbers = [sequence.num_frames for sequence in sequences]
        return self._column(numbers + [0] * (count - len(numbers)))

    def _batch_options(self, sequences: list[Sequence]) -> BatchOptions:
        """The batch's options; rebuilt only when a sequence joined, left, or moved to another row."""
        members = tuple((sequence.id, _row(sequence)) for sequence in sequences)
        if self._options is not None and self._options.members == members:
            return self._options
        padding = next(rows for rows in self.buckets if rows >= len(sequences)) - len(sequences)
        self._options = BatchOptions(
            members=members,
            rows=self._column([row for _, row in members] + [self.scratch_row] * padding),
            seeds=self._column([sequence.signed_seed for sequence in sequences] + [0] * padding),
            talker=self._filter([FilterOptions.for_talker(s.sampling) for s in sequences], padding),
            predictor=self._filter([FilterOptions.for_predictor(s.sampling) for s in sequences], padding),
            penalty=torch.tensor(
                [[sequence.sampling.repetition_penalty or 1.0] for sequence in sequences] + [[1.0]] * padding,
                device=self.device,
            ),
            ignore_eos=self._column([int(s.request.synthesis.ignore_eos) for s in sequences] + [0] * padding).bool(),
        )
        return self._options

    def _column(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.device)

    def _filter(self, options: list[FilterOptions], padding: int) -> BatchFilter:
        return BatchFilter(options + [_GREEDY] * padding, device=self.device)

    def _layout(self, places: list[tuple[Sequence, int]], count: int) -> RowLayout:
        """Where `count` rows stand: the places (sequence, position), then padding that writes to the scratch block."""
        length = padded_length(max(position for _, position in places) + 1)
        context = np.zeros((count, length), dtype=np.int64)
        sizes = np.ones(count, dtype=np.int64)
        slots, positions = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
        for row, (sequence, position) in enumerate(places):
            known = self.blocks.slots(sequence.id, position + 1)
            context[row, : position + 1] = known
            sizes[row], positions[row], slots[row] = position + 1, position, known[-1]
        mask = np.arange(length)[None] < sizes[:, None]
        return RowLayout(
            positions=torch.from_numpy(positions).to(self.device),
            slots=torch.from_numpy(slots).to(self.device),
            context=torch.from_numpy(context).to(self.device),
            mask=torch.from_numpy(mask[:, None, None]).to(self.device),
        )


def powers_of_two(largest: int) -> list[int]:
    """1, 2, 4, ... and `largest` itself."""
    sizes = [1 << exponent for exponent in range(largest.bit_length()) if 1 << exponent < largest]
    return [*sizes, largest]


def _row(sequence: Sequence) -> int:
    assert sequence.row is not None, "only running sequences are run"
    return sequence.row


def _pad(rows: Tensor, count: int) -> Tensor:
    """[n, hidden] -> [count, hidden] with zero rows behind."""
    return torch.nn.functional.pad(rows, (0, 0, 0, count - len(rows)))
