"""Splits and packs prompts, and the frames of resumed sequences, into prefill passes."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from deployments.gpu.graphs import Staging
from deployments.talker.model.input_tables import Ids, InputTables
from deployments.talker.networks.frame_networks import PrefillTensors
from deployments.talker.state.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SequencePart:
    """Consecutive positions of one sequence."""

    sequence: Sequence
    start: int
    stop: int
    is_last: bool  # whether it contains the last position to prefill


Pass = list[SequencePart]


def pack(sized: Iterable[tuple[Sequence, int]], *, num_positions: int, together: int) -> Iterator[Pass]:
    """Yield passes of at most `num_positions` positions. Each sequence comes with its number of positions to run.

    Sequences with up to `together` positions share passes. A longer sequence gets passes of its own.
    """
    packed: Pass = []
    for sequence, size in sized:
        if size > together:
            starts = range(0, size, num_positions)
            yield from (
                [SequencePart(sequence, at, min(at + num_positions, size), at + num_positions >= size)] for at in starts
            )
            continue
        if sum(part.stop for part in packed) + size > together:
            yield packed
            packed = []
        packed.append(SequencePart(sequence, 0, size, is_last=True))
    if packed:
        yield packed


class PrefillInputs:
    """Static input buffers for passes with a given number of positions, filled with a single copy."""

    def __init__(self, num_positions: int, *, scratch_row: int, tables: InputTables) -> None:
        self._tables, self._scratch_row = tables, scratch_row
        self.num_positions, self.num_sequences = num_positions, max(1, num_positions // 8)
        size = 4 * num_positions + 2 * self.num_sequences
        self._memory = torch.zeros(size, dtype=torch.int32, device=tables.device)
        self._staging = Staging(size, device=tables.device, rows=8)
        self.tensors = PrefillTensors(*(self._memory[bounds] for bounds in self._fields()))

    def fits(self, parts: Pass) -> bool:
        return sum(part.stop - part.start for part in parts) <= self.num_positions and len(parts) <= self.num_sequences

    def fill(self, parts: Pass) -> None:
        """Write the inputs of a prefill pass. Padding refers to the scratch row."""
        staged = self._staging.next_row()
        text_ids, codec_ids, owners, positions, last, finished = (staged.values[bounds] for bounds in self._fields())
        text_ids[:], codec_ids[:] = self._tables.no_text, self._tables.no_code
        owners[:], finished[:] = self._scratch_row, self._scratch_row
        positions[:] = last[:] = 0
        at = 0
        for number, part in enumerate(parts):
            assert part.sequence.row is not None
            rows = slice(at, at + part.stop - part.start)
            text_ids[rows], codec_ids[rows] = self._ids(part, at)
            owners[rows], positions[rows] = part.sequence.row, np.arange(part.start, part.stop)
            if part.is_last:
                last[number], finished[number] = rows.stop - 1, part.sequence.row
            at = rows.stop
        self._memory.copy_(staged.tensor, non_blocking=True)

    def _ids(self, part: SequencePart, at: int) -> tuple[Ids, Ids]:
        """Return the table indices for a part's rows. Stores its dense rows for the pass's rows from `at` on."""
        tables, prompt, frames = self._tables, part.sequence.prompt, part.sequence.frames
        first, rows = tables.first_dense, slice(part.start, part.stop)
        trailing = np.full(len(frames), tables.pad, dtype=np.int32)
        num_trailing = min(len(frames), len(prompt.trailing))
        trailing[:num_trailing] = prompt.trailing[:num_trailing]
        num_dense = 0 if prompt.dense is None else len(prompt.dense)
        of_frames = np.arange(first + num_dense, first + num_dense + len(frames), dtype=np.int32)
        text_ids = np.concatenate((prompt.text_ids, trailing))[rows]
        codec_ids = np.concatenate((prompt.codec_ids, of_frames))[rows]
        is_dense = codec_ids >= first
        if is_dense.any():
            numbers = codec_ids[is_dense] - first
            tables.dense[at : at + len(numbers)] = self._dense(part.sequence, int(numbers[0]), int(numbers[-1]) + 1)
            codec_ids[is_dense] = first + at + np.arange(len(numbers))
        return text_ids, codec_ids

    def _dense(self, sequence: Sequence, start: int, stop: int) -> Tensor:
        """Return the dense rows numbered `start` to `stop`: rows of the prompt, then rows of frames."""
        prompt = sequence.prompt.dense
        num_prompt = 0 if prompt is None else len(prompt)
        rows = [] if prompt is None else [prompt[start:stop]]
        frames = sequence.frames[max(0, start - num_prompt) : max(0, stop - num_prompt)]
        if frames:
            codes = torch.from_numpy(np.stack(frames)).long().to(self._tables.device, non_blocking=True)
            rows.append(self._tables.talker.embed_frames(codes))
        return torch.cat(rows)

    def _fields(self) -> list[slice]:
        """Return where each PrefillTensors field is located in the memory."""
        n, m = self.num_positions, self.num_sequences
        bounds = [0, n, 2 * n, 3 * n, 4 * n, 4 * n + m, 4 * n + 2 * m]
        return [slice(start, stop) for start, stop in pairwise(bounds)]
