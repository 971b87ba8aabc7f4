"""Runs a batch of sequences on the device: prefill, and the step that makes one frame for each.

On a CPU codes are equal whether a sequence runs by itself, in a batch, or is resumed, and `advance` of a step comes
when its codes have been handed on. On a GPU a batch takes the smallest bucket it fits in, all work is replayed from
CUDA graphs, and the host waits for the codes only: `advance` of a step still runs while the host hands the codes on and
prepares the next step. `BatchMode` has the differences.

Other runners, the *lanes*, make first frames on CUDA streams of their own while a step runs: see `build_runner`.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from deployments.gpu.graphs import Graphs, Staging
from deployments.protocol import Codes, Frame
from deployments.talker.model.input_tables import MAX_PASS_POSITIONS, InputTables
from deployments.talker.networks.frame_networks import FrameNetworks
from deployments.talker.networks.registry import UNFUSED
from deployments.talker.runner.prefill import Pass, PrefillInputs, pack
from deployments.talker.runner.runner_shape import RunnerShape
from deployments.talker.state.batch_state import BatchState, Breadth, FilterOptions, RowWriter, StateSize
from deployments.talker.state.kv_cache import LENGTH_STEP, BlockManager, KVCache
from deployments.talker.state.sequence import Sequence

# How many lanes there are, how many newcomers a step of a lane has, and how many positions their prompts have together.
# With one lane, at 20 requests a second, one newcomer in eight waits for another one.
_LANES, _LANE_ROWS, _LANE_POSITIONS = 2, 8, 256
_LANE_PRIORITY = -2  # before the codec's stream
_KEPT_STEPS = 2  # steps whose results the host can still read


@dataclass(frozen=True, slots=True)
class _DeviceBatch:
    """A batch on the device, which is uploaded again only when its members change."""

    members: tuple[tuple[int, int], ...]  # each sequence's id and row
    rows: Tensor  # [bucket] int64: rows of the state, padded with the scratch row
    breadth: Breadth


class _HostResults:
    """A step's results in the host's memory, which is pinned beside a GPU. Later steps use the memory again."""

    def __init__(self, networks: FrameNetworks, *, pinned: bool) -> None:
        self.codes = torch.zeros_like(networks.codes, device="cpu", pin_memory=pinned)  # [rows, groups] int16
        self.readings = torch.zeros(networks.readings.shape, pin_memory=pinned)  # [rows, 2] float32
        self.owner: QueuedStep | None = None


@dataclass(frozen=True, slots=True, eq=False)
class QueuedStep:
    """A step that may still run. Its results can be read until _KEPT_STEPS later steps are queued."""

    sequences: list[Sequence]
    _results: _HostResults
    _has_readings: bool  # whether the talker has an alignment head
    _codes_event: torch.cuda.Event | None  # the codes are there; None on a CPU, where `queue_step` waits for them
    _advance_event: torch.cuda.Event | None  # `advance` is over

    @property
    def has_codes(self) -> bool:
        """Whether `result` returns at once."""
        return self._codes_event is None or bool(self._codes_event.query())  # type: ignore[no-untyped-call]

    @property
    def is_over(self) -> bool:
        """Whether `advance` has run. On a CPU `run_pending_advance` has it run."""
        return self._advance_event is None or bool(self._advance_event.query())  # type: ignore[no-untyped-call]

    def result(self) -> Codes:
        """Frames [sequences, groups]. A row that starts with the end of speech or NOT_FINITE is no frame.

        `advance` of the step may still run.
        """
        if self._codes_event is not None:
            self._codes_event.synchronize()
        assert self._results.owner is self, "a later step has these buffers"
        frames: Codes = self._results.codes[: len(self.sequences)].numpy().copy()
        return frames

    def readings(self) -> list[list[float]]:
        """[sequences, 2] of `FrameNetworks.readings`, complete once the step is over; empty without such a head."""
        assert self._results.owner is self, "a later step has these buffers"
        return self._results.readings[: len(self.sequences)].tolist() if self._has_readings else []

    def advance_ns(self) -> int:
        """How long `advance` took; 0 while it runs."""
        codes, over = self._codes_event, self._advance_event
        if codes is None or over is None or not over.query():  # type: ignore[no-untyped-call]
            return 0
        return int(codes.elapsed_time(over) * 1e6)


class ModelRunner:
    """Runs batches of a talker's sequences. `build_runner` says what it shares with its lanes."""

    def __init__(
        self,
        networks: FrameNetworks,
        blocks: BlockManager,
        shape: RunnerShape,
        *,
        most_positions: int = MAX_PASS_POSITIONS,
        cuda_stream: torch.cuda.Stream | None = None,
        lanes: Iterable["ModelRunner"] = (),
    ) -> None:
        """Prefill passes have at most `most_positions` positions. Work is queued on `cuda_stream`, if there is one.

        `lanes` run the same rows, at the same time: see `build_runner`.
        """
        self.networks, self.blocks, self.shape, self.cuda_stream = networks, blocks, shape, cuda_stream
        self.lanes = list(lanes)
        self.state, self.device = networks.state, networks.tables.device
        self._writer = RowWriter(self.state)
        self.on_gpu = self.device.type != "cpu"
        self.mode = mode = shape.mode
        self._given = Staging(networks.given.numel(), device=self.device) if mode.retraces else None
        self.buckets, sizes = shape.sizes(most_positions=most_positions)
        self.graphs, scratch_row = Graphs(cuda_stream), self.state.scratch_row
        self._prefills = [PrefillInputs(size, scratch_row=scratch_row, tables=networks.tables) for size in sizes]
        self._rows = torch.zeros(shape.max_num_seqs, dtype=torch.long, device=self.device)
        self._staging = Staging(2 * shape.max_num_seqs, device=self.device)
        self._batch: _DeviceBatch | None = None
        self._pending: tuple[list[Sequence], Callable[[], None]] | None = None  # of a CPU: `advance` of the last step
        self._results = deque(_HostResults(networks, pinned=self.on_gpu) for _ in range(_KEPT_STEPS))

    @torch.inference_mode()
    def prefill(self, sequences: list[Sequence]) -> None:
        """Take sequences in: write their rows of the state, and run their prompts and the frames they have."""
        self.run_pending_advance()
        if sequences:
            self._batch = None
        retraces, limit = self.mode.retraces, self._prefills[-1].num_positions
        sized = [(sequence, (sequence.prompt if retraces else sequence).num_positions) for sequence in sequences]
        with self.on_stream():
            for sequence in sequences:
                num_frames = 0 if retraces else sequence.num_frames
                self._writer.admit(sequence, self.blocks.table(sequence.id), num_frames=num_frames)
            for parts in pack(sized, num_positions=limit, together=limit if self.mode.shares_passes else 0):
                self._run_prefill(parts)
            if retraces:
                self._retrace(sequences)

    @torch.inference_mode()
    def queue_step(self, sequences: list[Sequence], on_codes: Callable[[Tensor], None] | None = None) -> QueuedStep:
        """Queue the step that makes each sequence's next frame; a CPU makes the frames before this returns.

        `on_codes` is called with the frames [sequences, groups] int16 on the device, after their computation is queued
        and before later work is.
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
        """Whether a CPU still has to run `advance` of the last step, because a sequence of it goes on."""
        return self._pending is not None and any(sequence.row is not None for sequence in self._pending[0])

    @torch.inference_mode()
    def run_pending_advance(self) -> None:
        """Have a CPU run `advance` of the last step, if it is needed. A step and a prefill do so first."""
        pending, self._pending = self._pending if self.has_pending_advance else None, None
        if pending is not None:
            pending[1]()

    @torch.inference_mode()
    def extend_text(self, sequence: Sequence, start: int) -> None:
        """Upload the sequence's text from trailing id `start` on. A sequence without a row gets it with its prefill."""
        if sequence.row is not None:
            self._writer.extend_text(sequence, start)

    @torch.inference_mode()
    def repeat_step(self, sequences: list[Sequence]) -> None:
        """A step for benchmarks, whose frames the host does not take."""
        self.run_pending_advance()
        batch = self._as_batch(sequences)
        self._predict(batch)
        self._advance(batch, length=self._length(0))

    def accepts(self, sequence: Sequence) -> bool:
        """Whether the lane runs this newcomer: not with a cloned voice or frames, whose buffer is there only once."""
        has_dense = sequence.prompt.dense is not None or sequence.num_frames > 0
        return not has_dense and sequence.num_positions <= self._prefills[-1].num_positions

    def on_stream(self) -> AbstractContextManager[object]:
        """The device's work that is queued in the block is on the runner's CUDA stream."""
        return torch.cuda.stream(self.cuda_stream)

    def begin_step(self) -> None:
        """Later work of the lanes waits for the work so far, and not for the step that is queued now."""
        for lane in self.lanes:
            if lane.cuda_stream is not None:
                lane.cuda_stream.wait_stream(torch.cuda.current_stream())

    def await_lanes(self) -> None:
        """Work that is queued from now on waits for the work of the lanes so far."""
        for lane in self.lanes:
            if lane.cuda_stream is not None:
                torch.cuda.current_stream().wait_stream(lane.cuda_stream)

    def capture(self, progress: Callable[[int, int], None]) -> None:
        """Capture each shape of a step or a prefill on a GPU, the largest first because all share its memory.

        `progress` is called with the number of shapes that are done, and of all.
        """
        shapes = [(runner.graphs, key, work) for runner in (self, *self.lanes) for key, work in runner._shapes()]
        for number, (graphs, key, work) in enumerate(shapes):
            progress(number, len(shapes))
            graphs.capture(key, work)
        torch.cuda.synchronize()

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Run once, without a capture, everything that `capture` makes graphs of. Lanes launch the same kernels."""
        for _, work in self._shapes():
            work()

    def _as_batch(self, sequences: list[Sequence]) -> _DeviceBatch:
        """The batch on the device, uploaded again if a sequence has joined, left or moved to another row."""
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
        options = [FilterOptions.for_talker(each.sampling) for each in sequences]
        needed = Breadth.of(options + [FilterOptions.for_predictor(each.sampling) for each in sequences])
        if not self.mode.fixed_shapes:
            return needed
        return next(breadth for breadth in self.networks.breadths if breadth.covers(needed))

    def _send_new_blocks(self, sequences: list[Sequence], positions: list[int]) -> None:
        """Upload the number of a sequence's new block, if its next position, of `positions`, is the first in one."""
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
        """How many positions contexts are padded to: all, or as few as possible."""
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

    def _shapes(self) -> Iterator[tuple[Hashable, Callable[[], None]]]:
        """Every shape of a step or a prefill on a GPU, and its work."""
        assert self.mode.fixed_shapes
        most = self._length(0)
        for bucket in reversed(self.buckets):
            rows = self._rows[:bucket]
            rows.fill_(self.state.scratch_row)
            for breadth in reversed(self.networks.breadths):
                yield ("predict", bucket, breadth), partial(self.networks.predict, rows, breadth)
            yield ("advance", bucket), partial(self.networks.advance, rows, length=most)
            if self.mode.retraces:
                yield ("feed_given", bucket), partial(self.networks.feed_given, rows)
        for inputs in reversed(self._prefills):
            inputs.fill([])
            for length in {0, most if inputs.num_positions == MAX_PASS_POSITIONS else 0}:
                yield (
                    ("prefill", inputs.num_positions, length),
                    partial(self.networks.prefill, inputs.tensors, length=length),
                )


def build_runner(tables: InputTables, cache: KVCache, blocks: BlockManager, shape: RunnerShape) -> ModelRunner:
    """The runner of one talker, with its lanes.

    Lanes share its weights, keys, values and rows. What a step writes besides them is in `FusedNetworks` and
    `ModelRunner`, of which each lane has its own, because two steps may run at once.
    """
    config = tables.talker.config
    size = StateSize(shape.max_num_seqs, shape.max_model_len, blocks.block_size)
    state = BatchState(config, size, dtype=tables.dtype, device=tables.device)
    if shape.networks != "fused":
        unfused = UNFUSED[shape.networks](tables, state, cache, num_rows=shape.max_num_seqs)
        return ModelRunner(unfused, blocks, shape)
    from deployments.gpu.launch import launches_early  # they need Triton, which a CPU has not
    from deployments.talker.networks.fused_networks import FusedNetworks, FusedWeights

    weights = FusedWeights.pack_in_place(
        tables.talker, positions=size.max_model_len, attention=shape.attention, pdl=launches_early(tables.device)
    )

    def networks(num_rows: int, num_positions: int) -> FrameNetworks:
        return FusedNetworks(tables, state, cache, weights, num_rows=num_rows, num_positions=num_positions)

    def lane() -> ModelRunner:
        rows = min(_LANE_ROWS, shape.max_num_seqs)
        stream = None
        if tables.device.type != "cpu":
            stream = torch.cuda.Stream(tables.device, priority=_LANE_PRIORITY)  # type: ignore[no-untyped-call]
        own_shape = replace(shape, max_num_seqs=rows)
        return ModelRunner(
            networks(rows, _LANE_POSITIONS), blocks, own_shape, most_positions=_LANE_POSITIONS, cuda_stream=stream
        )

    num_lanes = 0 if shape.deterministic else _LANES  # whose buckets are not those of a step
    of_steps = networks(shape.max_num_seqs, MAX_PASS_POSITIONS)
    return ModelRunner(of_steps, blocks, shape, lanes=[lane() for _ in range(num_lanes)])


def _row(sequence: Sequence) -> int:
    assert sequence.row is not None, "only running sequences are run"
    return sequence.row
