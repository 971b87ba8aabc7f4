"""Runs a batch of sequences on the device: prefill, and the step that makes one frame for each.

On a CPU a row's result depends on that row alone, so codes are equal whether a sequence runs by itself, in a batch, or
is resumed: kernels of our own add in one order, and where they were not built every matrix product has the same number
of rows. `advance` of a step comes when its codes have been handed on. On a GPU a batch takes the smallest bucket it
fits in, all work is replayed from CUDA graphs, and the host waits for the codes only: `advance` of a step still runs
while the host hands the codes on and prepares the next step.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from deployments.gpu.graphs import Graphs, Staging, buckets
from deployments.protocol import Codes, Frame
from deployments.talker.cpu_kernels import fits
from deployments.talker.cpu_networks import CpuNetworks
from deployments.talker.kv_cache import BlockManager, KVCache, padded_length
from deployments.talker.networks import FrameNetworks
from deployments.talker.prefill import Pass, PrefillInputs, pack
from deployments.talker.prompt import MAX_PASS_POSITIONS, InputTables
from deployments.talker.sampling import Breadth, FilterOptions
from deployments.talker.sequence import Sequence
from deployments.talker.state import BatchState, StateSize

# Powers of two, with finer steps above 32; no 4: the kernels are faster with 8 rows (measured).
BATCHES = (1, 2, 8, 16, 32, 48, 64, 96, 128, 192, 256)
_PREFILL_POSITIONS = (16, 32, 64, 128, 256, MAX_PASS_POSITIONS)


OnCodes = Callable[[Tensor], None]
NetworkKind = Literal["by_rows", "plain", "fused"]


@dataclass(frozen=True, slots=True)
class RunnerShape:
    """The shapes of batches on the device."""

    max_num_seqs: int
    max_model_len: int
    deterministic: bool = False
    """A GPU has one bucket, takes prompts one by one, and runs frames that exist through the steps that made them."""
    networks: NetworkKind = "by_rows"
    """A CPU computes by rows, each with a context of its own."""
    attention: str = "auto"  # how the fused kernels attend: see `choose_attention`

    @property
    def by_rows(self) -> bool:
        """Whether a row's result depends on nothing but the row."""
        return self.networks == "by_rows"


@dataclass(frozen=True, slots=True)
class _Batch:
    """A batch on the device, which is uploaded again only when its members change."""

    members: tuple[tuple[int, int], ...]  # each sequence's id and row
    rows: Tensor  # [bucket] int64: rows of the state, padded with the scratch row
    breadth: Breadth


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that may still run. Its buffers are used again: `Engine` says until when they can be read."""

    sequences: list[Sequence]
    _codes: Tensor  # [sequences, groups] int16, pinned
    _readings: Tensor | None  # [sequences, 2] float32, pinned; None without an alignment head
    _codes_event: torch.cuda.Event | None  # the codes are there; None on a CPU, where `launch` waits for them
    _advance_event: torch.cuda.Event | None  # `advance` is over

    @property
    def has_codes(self) -> bool:
        """Whether `result` returns at once."""
        return self._codes_event is None or bool(self._codes_event.query())  # type: ignore[no-untyped-call]

    def result(self) -> Codes:
        """Frames [sequences, groups]. A row that starts with the end of speech or NOT_FINITE is no frame.

        `advance` of the step may still run.
        """
        if self._codes_event is not None:
            self._codes_event.synchronize()
        frames: Codes = self._codes.numpy().copy()
        return frames

    def readings(self) -> list[list[float]]:
        """[sequences, 2] of `FrameNetworks.readings`; empty without an alignment head. To be called once a later step
        has its codes, and before the one after that is launched.
        """
        return [] if self._readings is None else self._readings.tolist()

    def advance_ns(self) -> int:
        """How long `advance` took; 0 while it runs."""
        codes, over = self._codes_event, self._advance_event
        if codes is None or over is None or not over.query():  # type: ignore[no-untyped-call]
            return 0
        return int(codes.elapsed_time(over) * 1e6)


class ModelRunner:
    """Owns the batch state of one talker and its CUDA graphs."""

    def __init__(self, tables: InputTables, cache: KVCache, blocks: BlockManager, shape: RunnerShape) -> None:
        self.blocks, self.shape, self.device = blocks, shape, tables.device
        self._on_cpu, self._by_rows = self.device.type == "cpu", shape.by_rows
        size = StateSize(shape.max_num_seqs, shape.max_model_len, blocks.block_size)
        self.state = BatchState(tables.talker.config, size, dtype=tables.dtype, device=self.device)
        self.networks = _build_networks(tables, self.state, cache, shape)
        self.graphs = Graphs()
        pads = self.networks.pads
        sizes: tuple[int, ...] = _PREFILL_POSITIONS
        if shape.by_rows:
            self.buckets = [shape.max_num_seqs] if pads else list(range(1, shape.max_num_seqs + 1))
            sizes = (shape.max_num_seqs,) if pads else _PREFILL_POSITIONS[-1:]
        else:
            self.buckets = [shape.max_num_seqs] if shape.deterministic else buckets(shape.max_num_seqs, BATCHES)
        self._prefills = [PrefillInputs(rows, scratch_row=self.state.scratch_row, tables=tables) for rows in sizes]
        self._rows = torch.zeros(shape.max_num_seqs, dtype=torch.long, device=self.device)
        self._staging = Staging(2 * shape.max_num_seqs, device=self.device)
        self._retraces = shape.deterministic and not shape.by_rows
        self._given = Staging(self.networks.given.numel(), device=self.device) if self._retraces else None
        self._batch: _Batch | None = None
        self._pending_advance: Callable[[], None] | None = None  # `advance` of the last step, until it is done
        self._codes = torch.zeros_like(self.networks.codes, device="cpu", pin_memory=not self._on_cpu)
        num_buffers = 0 if tables.talker.config.text.alignment_head is None else 2  # one is read, one is written
        buffers = torch.zeros((num_buffers, *self.networks.readings.shape), pin_memory=not self._on_cpu)
        self._readings = deque(buffers)

    def capture(self, progress: Callable[[int, int], None]) -> None:
        """Record each shape of a step or a prefill on a GPU, the largest first because all share its memory.

        `progress` is called with the number of shapes that are done, and of all.
        """
        if self._on_cpu:
            return
        shapes = list(self._shapes())
        for number, (key, work) in enumerate(shapes):
            progress(number, len(shapes))
            self.graphs.capture(key, work)
        torch.cuda.synchronize()

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Run everything that `capture` records once, without recording it."""
        for _, work in self._shapes():
            work()

    def _shapes(self) -> Iterator[tuple[Hashable, Callable[[], None]]]:
        """Every shape of a step or a prefill on a GPU, and its work."""
        assert not self._by_rows
        most = self._length(0)
        for bucket in reversed(self.buckets):
            rows = self._rows[:bucket]
            rows.fill_(self.state.scratch_row)
            for breadth in reversed(self.networks.breadths):
                yield ("predict", bucket, breadth), partial(self.networks.predict, rows, breadth)
            yield ("advance", bucket), partial(self.networks.advance, rows, length=most)
            if self._retraces:
                yield ("feed_given", bucket), partial(self.networks.feed_given, rows)
        for inputs in reversed(self._prefills):
            inputs.fill([])
            for length in {0, most if inputs is self._prefills[-1] else 0}:
                yield (
                    ("prefill", inputs.num_positions, length),
                    partial(self.networks.prefill, inputs.tensors, length=length),
                )

    @torch.inference_mode()
    def prefill(self, sequences: list[Sequence]) -> None:
        """Take sequences in: write their rows of the state, and run their prompts and the frames they have."""
        self.run_pending_advance()
        if sequences:
            self._batch = None
        for sequence in sequences:
            num_frames = 0 if self._retraces else sequence.num_frames
            self.state.admit(sequence, self.blocks.table(sequence.id), num_frames=num_frames)
        sized = [(each, each.prompt.num_positions if self._retraces else each.num_positions) for each in sequences]
        limit = self._prefills[-1].num_positions
        alone = self._by_rows or self.shape.deterministic
        for parts in pack(sized, num_positions=limit, together=0 if alone else limit):
            self._run_prefill(parts)
        if self._retraces:
            self._retrace(sequences)

    @torch.inference_mode()
    def launch(self, sequences: list[Sequence], on_codes: OnCodes | None = None) -> LaunchedStep:
        """Start the step that makes each sequence's next frame.

        `on_codes` is called with the frames [sequences, groups] int16 on the device, after their computation is queued
        and before later work is.
        """
        self.run_pending_advance()
        batch = self._as_batch(sequences)
        positions = [sequence.num_positions for sequence in sequences]
        for sequence, position in zip(sequences, positions, strict=True):
            if position % self.blocks.block_size == 0:
                self._send_block(sequence)
        self._predict(batch)
        frames = self.networks.codes[: len(sequences)]
        codes = self._codes[: len(sequences)]
        codes.copy_(frames, non_blocking=True)
        codes_event = self._record_event()
        if on_codes is not None:
            on_codes(frames)
        self._readings.rotate()
        readings = self._readings[0][: len(sequences)] if self._readings else None
        length = self._length(max(positions) + 1)
        advance = partial(self._advance, batch, length=length, readings=readings)
        if self._on_cpu:
            self._pending_advance = advance
        else:
            advance()
        return LaunchedStep(sequences, codes, readings, codes_event, self._record_event())

    @torch.inference_mode()
    def run_pending_advance(self) -> None:
        """Run `advance` of the last step, unless it has run. A step and a prefill do so first."""
        pending, self._pending_advance = self._pending_advance, None
        if pending is not None:
            pending()

    def drop_pending_advance(self) -> None:
        """Leave `advance` of the last step out, because none of its sequences goes on."""
        self._pending_advance = None

    @torch.inference_mode()
    def extend_text(self, sequence: Sequence, start: int) -> None:
        """Upload the sequence's text from trailing id `start` on. A sequence without a row gets it with its prefill."""
        if sequence.row is not None:
            self.state.extend_text(sequence, start)

    @torch.inference_mode()
    def repeat_step(self, sequences: list[Sequence]) -> None:
        """A step for benchmarks, whose frames the host does not take."""
        self.run_pending_advance()
        batch = self._as_batch(sequences)
        self._predict(batch)
        self._advance(batch, length=self._length(0))

    def _retrace(self, sequences: list[Sequence]) -> None:
        """Run the frames that sequences have, one step after the other.

        A prefill would add in another order than the steps that made the frames, and so round to other bits.
        """
        for number in range(max((sequence.num_frames for sequence in sequences), default=0)):
            going = [sequence for sequence in sequences if number < sequence.num_frames]
            batch = self._as_batch(going)
            self._send_frames([sequence.frames[number] for sequence in going])
            self.graphs.run(("feed_given", len(batch.rows)), partial(self.networks.feed_given, batch.rows))
            self._advance(batch, length=self._length(0))

    def _send_frames(self, frames: list[Frame]) -> None:
        assert self._given is not None
        given = self.networks.given
        staged = self._given.next_row()
        staged.values.reshape(given.shape)[: len(frames)] = frames
        given.copy_(staged.tensor.view(given.shape), non_blocking=True)

    def _predict(self, batch: _Batch) -> None:
        work = partial(self.networks.predict, batch.rows, batch.breadth)
        self.graphs.run(("predict", len(batch.rows), batch.breadth), work)

    def _advance(self, batch: _Batch, *, length: int, readings: Tensor | None = None) -> None:
        self.graphs.run(("advance", len(batch.rows)), partial(self.networks.advance, batch.rows, length=length))
        if readings is not None:
            readings.copy_(self.networks.readings[: len(readings)], non_blocking=True)

    def _run_prefill(self, parts: Pass) -> None:
        continued = parts[0].start > 0
        sizes = self._prefills[-1:] if continued else self._prefills
        inputs = next(each for each in sizes if each.fits(parts))
        inputs.fill(parts)
        length = self._length(parts[-1].stop) if self._by_rows or continued else 0
        key: Hashable = ("prefill", inputs.num_positions, length)
        self.graphs.run(key, lambda: self.networks.prefill(inputs.tensors, length=length))

    def _as_batch(self, sequences: list[Sequence]) -> _Batch:
        """The batch on the device, uploaded again if a sequence has joined, left or moved to another row."""
        members = tuple((sequence.id, _row(sequence)) for sequence in sequences)
        if self._batch is None or self._batch.members != members:
            bucket = next(size for size in self.buckets if size >= len(sequences))
            staged = self._staging.next_row()
            rows = staged.values.view(np.int64)
            rows[: len(members)] = [row for _, row in members]
            rows[len(members) : bucket] = self.state.scratch_row
            self._rows[:bucket].copy_(staged.tensor.view(torch.long)[:bucket], non_blocking=True)
            self._batch = _Batch(members, self._rows[:bucket], self._breadth(sequences))
        return self._batch

    def _breadth(self, sequences: list[Sequence]) -> Breadth:
        options = [FilterOptions.for_talker(each.sampling) for each in sequences]
        needed = Breadth.of(options + [FilterOptions.for_predictor(each.sampling) for each in sequences])
        if self._by_rows:
            return needed
        return next(breadth for breadth in self.networks.breadths if breadth.covers(needed))

    def _send_block(self, sequence: Sequence) -> None:
        """Upload the number of the block in which the next position is the first."""
        index = sequence.num_positions // self.blocks.block_size
        self.state.extend(_row(sequence), index, self.blocks.table(sequence.id)[index])

    def _length(self, num_positions: int) -> int:
        """How many positions contexts are padded to: as few as possible on a CPU, all in a CUDA graph."""
        most = self.state.size.blocks * self.blocks.block_size
        return min(padded_length(num_positions), most) if self._by_rows else most

    def _record_event(self) -> torch.cuda.Event | None:
        if self._on_cpu:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _build_networks(tables: InputTables, state: BatchState, cache: KVCache, shape: RunnerShape) -> FrameNetworks:
    if shape.networks == "fused":
        from deployments.talker.fused_networks import FusedNetworks  # needs Triton, which a CPU has not

        return FusedNetworks(tables, state, cache, attention=shape.attention, pdl=tables.device.type == "cuda")
    if (
        shape.by_rows
        and tables.dtype is torch.float32
        and fits(tables.talker.config.talker, tables.talker.config.predictor)
    ):
        return CpuNetworks(tables, state, cache)
    return FrameNetworks(tables, state, cache, by_rows=shape.by_rows)


def _row(sequence: Sequence) -> int:
    assert sequence.row is not None, "only running sequences are run"
    return sequence.row
