"""Execution of prefills, and of steps that make one frame for each sequence in a batch.

On a CPU, a sequence has the same codes whether alone, in a batch, or resumed. The runner defers `advance` until the
engine has delivered the step's codes. On a GPU, a batch uses the smallest bucket that fits, and all work is replayed
from CUDA graphs. The host waits only for the codes. A step's `advance` is still running while the host delivers the
codes and prepares the next step. `BatchMode` describes the differences.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from deployments.gpu.graphs import Graphs, Staging, buckets
from deployments.protocol import Codes, Frame
from deployments.talker.model.input_tables import MAX_PASS_POSITIONS, InputTables
from deployments.talker.networks.frame_networks import FrameNetworks, NetworkKind
from deployments.talker.networks.registry import networks_class
from deployments.talker.runner.prefill import Pass, PrefillInputs, pack
from deployments.talker.state.batch_state import BatchState, Breadth, DrawingOptions, RowWriter, StateSize
from deployments.talker.state.kv_cache import LENGTH_STEP, BlockManager, KVCache
from deployments.talker.state.sequence import Sequence

_KEPT_STEPS = 2  # number of steps whose results remain readable by the host
# Powers of two, with finer steps above 32. There is no bucket of 4, because the kernels are faster with 8 rows.
BATCHES = (1, 2, 8, 16, 32, 48, 64, 96, 128, 192, 256)
_PREFILL_POSITIONS = (16, 32, 64, 128, 256, MAX_PASS_POSITIONS)


@dataclass(frozen=True, slots=True)
class BatchMode:
    """Rules for combining sequences into batches. `RunnerShape.mode` selects one of the modes below."""

    one_size: bool = False  # each step has max_num_seqs rows
    fixed_shapes: bool = False  # passes have fixed sizes and contexts have maximum length, as CUDA graphs require
    shares_passes: bool = False  # prompts of several sequences run in one pass
    teacher_forces: bool = False  # a resumed sequence's frames run step by step, because a prefill rounds differently


BUCKETS = BatchMode(fixed_shapes=True, shares_passes=True)
_MODES: dict[NetworkKind, BatchMode] = {
    "cpu": BatchMode(),  # its products round a row the same way regardless of the number of rows
    "exact": BatchMode(one_size=True),  # rounding of PyTorch's products depends on the number of rows
    "plain": BUCKETS,
    "fused": BUCKETS,
}
# Replaces BUCKETS if `deterministic` is set, which makes codes independent of concurrent sequences.
DETERMINISTIC = BatchMode(one_size=True, fixed_shapes=True, teacher_forces=True)


@dataclass(frozen=True, slots=True)
class RunnerShape:
    """Parameters that determine the shapes of a runner's batches and the kernels used for them."""

    max_num_seqs: int
    max_model_len: int
    networks: NetworkKind
    deterministic: bool = False  # has no effect for `cpu` and `exact`, which are always deterministic
    attention: str = "auto"  # attention kernel of `fused`, see `choose_attention`

    @property
    def mode(self) -> BatchMode:
        mode = _MODES[self.networks]
        return DETERMINISTIC if self.deterministic and mode is BUCKETS else mode

    def sizes(self, *, most_positions: int) -> tuple[list[int], list[int]]:
        """Return the possible row counts for steps, and position counts for prefill passes up to `most_positions`."""
        mode, most = self.mode, self.max_num_seqs
        positions = [size for size in _PREFILL_POSITIONS if size <= most_positions]
        if mode.fixed_shapes:
            return [most] if mode.one_size else buckets(most, BATCHES), positions
        return ([most], [most]) if mode.one_size else (list(range(1, most + 1)), positions[-1:])


@dataclass(frozen=True, slots=True)
class _DeviceBatch:
    """A batch on the device, uploaded again only when its members change."""

    members: tuple[tuple[int, int], ...]  # each sequence's id and row
    rows: Tensor  # [bucket] int64, rows of the state; padded with the scratch row
    breadth: Breadth


class _HostResults:
    """A step's results in host memory, which is pinned if there is a GPU. Later steps reuse the memory."""

    def __init__(self, networks: FrameNetworks, *, pinned: bool) -> None:
        self.codes = torch.zeros_like(networks.codes, device="cpu", pin_memory=pinned)  # [rows, groups] int16
        self.readings = torch.zeros(networks.readings.shape, pin_memory=pinned)  # [rows, 2] float32
        self.owner: QueuedStep | None = None


@dataclass(frozen=True, slots=True, eq=False)
class QueuedStep:
    """A step that may still be running. Its results are readable until _KEPT_STEPS later steps are queued."""

    sequences: list[Sequence]
    _results: _HostResults
    _has_readings: bool  # whether the talker has an alignment head
    _codes_event: torch.cuda.Event | None  # recorded after the codes; None on a CPU, where `queue_step` is synchronous
    _advance_event: torch.cuda.Event | None  # recorded after `advance`

    @property
    def has_codes(self) -> bool:
        """Whether `result` returns immediately."""
        return self._codes_event is None or bool(self._codes_event.query())  # type: ignore[no-untyped-call]

    @property
    def is_over(self) -> bool:
        """Whether `advance` has finished. On a CPU, `run_pending_advance` runs it."""
        return self._advance_event is None or bool(self._advance_event.query())  # type: ignore[no-untyped-call]

    def result(self) -> Codes:
        """Wait for the codes and return frames [sequences, groups].

        A row that begins with the end of speech or NOT_FINITE is not a frame. The step's `advance` may still be active.
        """
        if self._codes_event is not None:
            self._codes_event.synchronize()
        assert self._results.owner is self, "a later step has reused these buffers"
        frames: Codes = self._results.codes[: len(self.sequences)].numpy().copy()
        return frames

    def readings(self) -> list[list[float]]:
        """Return `FrameNetworks.readings` [sequences, 2], complete after `advance`; empty without an alignment head."""
        assert self._results.owner is self, "a later step has reused these buffers"
        return self._results.readings[: len(self.sequences)].tolist() if self._has_readings else []

    def advance_ns(self) -> int:
        """Return the duration of `advance`; 0 while it is running."""
        codes, over = self._codes_event, self._advance_event
        if codes is None or over is None or not over.query():  # type: ignore[no-untyped-call]
            return 0
        return int(codes.elapsed_time(over) * 1e6)


class ModelRunner:
    """Executes a talker's batches."""

    def __init__(
        self,
        networks: FrameNetworks,
        blocks: BlockManager,
        shape: RunnerShape,
        *,
        most_positions: int = MAX_PASS_POSITIONS,
        cuda_stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Create a runner with prefill passes of at most `most_positions` positions. Work runs on `cuda_stream`."""
        self.networks, self.blocks, self.shape, self.cuda_stream = networks, blocks, shape, cuda_stream
        self.state, self.device = networks.state, networks.tables.device
        self._writer = RowWriter(self.state)
        self.on_gpu = self.device.type != "cpu"
        self.mode = mode = shape.mode
        self._given = Staging(networks.forced_codes.numel(), device=self.device) if mode.teacher_forces else None
        self.buckets, sizes = shape.sizes(most_positions=most_positions)
        self.most_positions = sizes[-1]
        self.graphs, scratch_row = Graphs(cuda_stream), self.state.scratch_row
        self._prefills = [PrefillInputs(size, scratch_row=scratch_row, tables=networks.tables) for size in sizes]
        self._rows = torch.zeros(shape.max_num_seqs, dtype=torch.long, device=self.device)
        self._staging = Staging(2 * shape.max_num_seqs, device=self.device)
        self._batch: _DeviceBatch | None = None
        self._pending: tuple[list[Sequence], Callable[[], None]] | None = None  # deferred `advance` on a CPU
        self._results = deque(_HostResults(networks, pinned=self.on_gpu) for _ in range(_KEPT_STEPS))

    @torch.inference_mode()
    def prefill(self, sequences: list[Sequence]) -> None:
        """Admit sequences: write their state rows, and run their prompts and existing frames."""
        self.run_pending_advance()
        if sequences:
            self._batch = None
        teacher_forces, limit = self.mode.teacher_forces, self.most_positions
        sized = [(sequence, (sequence.prompt if teacher_forces else sequence).num_positions) for sequence in sequences]
        with self.on_stream():
            for sequence in sequences:
                num_frames = 0 if teacher_forces else sequence.num_frames
                self._writer.write_row(sequence, self.blocks.table(sequence.id), num_frames=num_frames)
            for parts in pack(sized, num_positions=limit, together=limit if self.mode.shares_passes else 0):
                self._run_prefill(parts)
            if teacher_forces:
                self._teacher_force(sequences)

    @torch.inference_mode()
    def queue_step(self, sequences: list[Sequence], on_codes: Callable[[Tensor], None] | None = None) -> QueuedStep:
        """Queue the step that makes the next frame of each sequence. On a CPU, the frames exist when this returns.

        `on_codes` is called with the frames [sequences, groups] int16 on the device, after their computation has been
        queued and before any later work is queued.
        """
        self.run_pending_advance()
        with self.on_stream():
            batch = self._as_batch(sequences)
            positions = [sequence.num_positions for sequence in sequences]
            self._send_new_blocks(sequences, positions)
            self._predict(batch)
            self._results.rotate()
            frames, results = self.networks.codes[: len(sequences)], self._results[0]
            results.codes[: len(sequences)].copy_(frames, non_blocking=True)
            codes_event = self._event_now()
            if on_codes is not None:
                on_codes(frames)
            has_readings = self.networks.config.text.alignment_head is not None
            readings = results.readings[: len(sequences)] if has_readings else None
            advance = partial(self._advance, batch, length=self._length(max(positions) + 1), readings=readings)
            if self.on_gpu:
                advance()
            else:
                self._pending = sequences, advance
            results.owner = QueuedStep(sequences, results, has_readings, codes_event, self._event_now())
            return results.owner

    @property
    def has_pending_advance(self) -> bool:
        """Whether the last step's `advance` is pending on a CPU, because one of its sequences continues."""
        return self._pending is not None and any(sequence.row is not None for sequence in self._pending[0])

    @torch.inference_mode()
    def run_pending_advance(self) -> None:
        """Run the pending `advance`, if any, on a CPU. Steps and prefills do this first."""
        pending, self._pending = self._pending if self.has_pending_advance else None, None
        if pending is not None:
            pending[1]()

    @torch.inference_mode()
    def extend_text(self, sequence: Sequence, start: int) -> None:
        """Upload the sequence's text from trailing id `start` on. If it has no row yet, the prefill will upload it."""
        if sequence.row is not None:
            self._writer.extend_text(sequence, start)

    @torch.inference_mode()
    def repeat_step(self, sequences: list[Sequence]) -> None:
        """Run a step for benchmarks without copying its frames to the host."""
        self.run_pending_advance()
        batch = self._as_batch(sequences)
        self._predict(batch)
        self._advance(batch, length=self._length(0))

    def on_stream(self) -> AbstractContextManager[object]:
        """Return a context that queues device work on the runner's CUDA stream."""
        return torch.cuda.stream(self.cuda_stream)

    @torch.inference_mode()
    def run_all_shapes(self) -> None:
        """Run everything that `capture` captures once, without capturing it."""
        for _, work in self.shapes():
            work()

    def _as_batch(self, sequences: list[Sequence]) -> _DeviceBatch:
        """Return the batch on the device. Uploads it if a sequence has joined, left or moved to another row."""
        members = tuple((sequence.id, _row(sequence)) for sequence in sequences)
        if self._batch is None or self._batch.members != members:
            bucket = next(size for size in self.buckets if size >= len(sequences))
            staged = self._staging.next_row()
            rows = staged.values.view(np.int64)
            rows[: len(members)] = [row for _, row in members]
            rows[len(members) : bucket] = self.state.scratch_row
            self._rows[:bucket].copy_(staged.tensor.view(torch.long)[:bucket], non_blocking=True)
            self._batch = _DeviceBatch(members, self._rows[:bucket], self._breadth(sequences))
        return self._batch

    def _breadth(self, sequences: list[Sequence]) -> Breadth:
        if len(self.networks.breadths) == 1:
            return self.networks.breadths[0]
        options = [DrawingOptions.for_talker(each.sampling) for each in sequences]
        needed = Breadth.of(options + [DrawingOptions.for_predictor(each.sampling) for each in sequences])
        if not self.mode.fixed_shapes:
            return needed
        return next(breadth for breadth in self.networks.breadths if breadth.covers(needed))

    def _send_new_blocks(self, sequences: list[Sequence], positions: list[int]) -> None:
        """Upload a block number for each sequence whose next position, in `positions`, is the first in a block."""
        for sequence, position in zip(sequences, positions, strict=True):
            if position % self.blocks.block_size == 0:
                index = position // self.blocks.block_size
                self._writer.add_block(_row(sequence), index, self.blocks.table(sequence.id)[index])

    def _predict(self, batch: _DeviceBatch) -> None:
        work = partial(self.networks.predict, batch.rows, batch.breadth)
        self.graphs.run(("predict", len(batch.rows), batch.breadth), work)

    def _advance(self, batch: _DeviceBatch, *, length: int, readings: Tensor | None = None) -> None:
        self.graphs.run(("advance", len(batch.rows)), partial(self.networks.advance, batch.rows, length=length))
        if readings is not None:
            readings.copy_(self.networks.readings[: len(readings)], non_blocking=True)

    def _length(self, num_positions: int) -> int:
        """Return the padded context length: the maximum for fixed shapes, otherwise the smallest possible one."""
        most = self.state.size.blocks * self.blocks.block_size
        return most if self.mode.fixed_shapes else min(-(-num_positions // LENGTH_STEP) * LENGTH_STEP, most)

    def _event_now(self) -> torch.cuda.Event | None:
        if not self.on_gpu:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _run_prefill(self, parts: Pass) -> None:
        continued = parts[0].start > 0
        sizes = self._prefills[-1:] if continued else self._prefills
        inputs = next(each for each in sizes if each.fits(parts))
        inputs.fill(parts)
        length = self._length(parts[-1].stop) if continued or not self.mode.fixed_shapes else 0
        key: Hashable = ("prefill", inputs.num_positions, length)
        self.graphs.run(key, lambda: self.networks.prefill(inputs.tensors, length=length))

    def _teacher_force(self, sequences: list[Sequence]) -> None:
        """Process the frames that sequences already have, one step at a time.

        A prefill would sum in a different order from the steps that made the frames, and therefore round differently.
        """
        for number in range(max((sequence.num_frames for sequence in sequences), default=0)):
            going = [sequence for sequence in sequences if number < sequence.num_frames]
            batch = self._as_batch(going)
            self._send_frames([sequence.frames[number] for sequence in going])
            self.graphs.run(("feed_forced", len(batch.rows)), partial(self.networks.feed_forced, batch.rows))
            self._advance(batch, length=self._length(0))

    def _send_frames(self, frames: list[Frame]) -> None:
        assert self._given is not None
        forced_codes = self.networks.forced_codes
        staged = self._given.next_row()
        staged.values.reshape(forced_codes.shape)[: len(frames)] = frames
        forced_codes.copy_(staged.tensor.view(forced_codes.shape), non_blocking=True)

    def shapes(self) -> Iterator[tuple[Hashable, Callable[[], None]]]:
        """Yield each shape of a step or prefill on a GPU, along with the work to run."""
        assert self.mode.fixed_shapes
        most = self._length(0)
        for bucket in reversed(self.buckets):
            rows = self._rows[:bucket]
            rows.fill_(self.state.scratch_row)
            for breadth in reversed(self.networks.breadths):
                yield ("predict", bucket, breadth), partial(self.networks.predict, rows, breadth)
            yield ("advance", bucket), partial(self.networks.advance, rows, length=most)
            if self.mode.teacher_forces:
                yield ("feed_forced", bucket), partial(self.networks.feed_forced, rows)
        for inputs in reversed(self._prefills):
            inputs.fill([])
            for length in {0, most if inputs.num_positions == MAX_PASS_POSITIONS else 0}:
                yield (
                    ("prefill", inputs.num_positions, length),
                    partial(self.networks.prefill, inputs.tensors, length=length),
                )


def build_runner(tables: InputTables, cache: KVCache, blocks: BlockManager, shape: RunnerShape) -> ModelRunner:
    """Create the runner for one talker."""
    size = StateSize(shape.max_num_seqs, shape.max_model_len, blocks.block_size)
    state = BatchState(tables.talker.config, size, dtype=tables.dtype, device=tables.device)
    networks = networks_class(shape.networks)(tables, state, cache, attention=shape.attention)
    return ModelRunner(networks, blocks, shape)


def capture(runners: list[ModelRunner], progress: Callable[[int, int], None]) -> None:
    """Capture each shape of steps and prefills on a GPU, largest first, because a runner's graphs share memory.

    `progress` is called with the number of captured shapes and the total number of shapes.
    """
    shapes = [(runner.graphs, key, work) for runner in runners for key, work in runner.shapes()]
    for number, (graphs, key, work) in enumerate(shapes):
        progress(number, len(shapes))
        graphs.capture(key, work)
    torch.cuda.synchronize()


def _row(sequence: Sequence) -> int:
    assert sequence.row is not None, "only sequences with a row can run"
    return sequence.row
