"""First frames, made in parallel, for requests that arrive while a step is running."""

from dataclasses import replace

import torch

from deployments.talker.engine.scheduler import Scheduler
from deployments.talker.engine.step_executor import StepExecutor, StepInFlight
from deployments.talker.runner.model_runner import ModelRunner
from deployments.talker.state.sequence import Sequence

# Number of lanes, rows per lane, and total positions of the prompts in a lane. With one lane and 20 requests per
# second, one in eight new sequences would have to wait for another.
_LANES, _LANE_ROWS, _LANE_POSITIONS = 2, 8, 256
_LANE_PRIORITY = -2  # higher than the priority of the codec's stream
# With more listeners in a step, new sequences wait for the next step, because a lane would prolong the running step.
_MOST_BESIDE_LANE = 96


class Lanes:
    """Makes the first frames of new sequences on a GPU, in parallel with the running step.

    A lane makes one frame for each of its sequences, which then join the engine's next step. A CPU has no lanes.

        lane     | prefill | predict | advance |
        codec              |         | its first frame |
        talker   | predict 1  | advance 1    | predict 2 | advance 2 | predict 3, with the newcomer | ...
    """

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, step_executor: StepExecutor) -> None:
        self.runners = build_lanes(runner)
        self._scheduler, self._step_executor = scheduler, step_executor
        self._in_flight: list[StepInFlight] = []  # lane steps whose sequences have not yet joined the engine's step
        # A lane may only take rows and blocks that no step uses, because the last step may still be running. This is
        # the number of rows that were free when the last step was scheduled, minus those that lanes have taken since.
        self._unused_rows = 0

    @property
    def is_idle(self) -> bool:
        return not self._in_flight

    def begin_step(self) -> None:
        """Start a new engine step. Later lane work waits for work already on the device, but not for the new step."""
        self._unused_rows = self._scheduler.num_free_rows
        self._scheduler.blocks.begin_step()
        for lane in self.runners:
            if lane.cuda_stream is not None:
                lane.cuda_stream.wait_stream(torch.cuda.current_stream())

    def start_step(self, beside: StepInFlight | None) -> None:
        """Start a lane step for waiting sequences if a lane is free and the engine's step has few listeners."""
        if not self.runners or beside is None or not self._scheduler.waiting:
            return
        busy = [step.runner for step in self._in_flight]
        lane = next((lane for lane in self.runners if lane not in busy), None)
        if lane is None:
            return
        if sum(not sequence.is_background for sequence in beside.runner_step.sequences) > _MOST_BESIDE_LANE:
            return
        newcomers = self._take_newcomers(lane)
        if not newcomers:
            return
        failed = self._step_executor.start_sequences(newcomers, lane)
        ready = [sequence for sequence in newcomers if sequence not in failed]
        if ready:
            self._in_flight.append(self._step_executor.queue(ready, lane, after=None))

    def collect(self) -> bool:
        """Deliver the frames of the first lane that has any, and let sequences from finished lanes join the engine.

        Returns whether there were frames.
        """
        return any(self._collect(step) for step in [*self._in_flight])

    def wait_for_lane(self, sequence_id: int) -> None:
        """If a lane is running this sequence, make later engine steps wait for that lane."""
        if any(sequence.id == sequence_id for sequence in self._scheduler.in_lanes):
            self._wait_for_lanes()

    def _wait_for_lanes(self) -> None:
        """Make later work on the engine's stream wait for all existing lane work."""
        for lane in self.runners:
            if lane.cuda_stream is not None:
                torch.cuda.current_stream().wait_stream(lane.cuda_stream)

    def _take_newcomers(self, lane: ModelRunner) -> list[Sequence]:
        """Give rows to waiting sequences, in order, and return them. Stops at the first one the lane cannot run."""
        taken: list[Sequence] = []
        blocks = self._scheduler.blocks
        for sequence in [sequence for sequence in self._scheduler.waiting if not sequence.awaits_text]:
            has_room = self._unused_rows > 0 and blocks.blocks_for(sequence.num_positions + 1) <= blocks.num_unused
            if len(taken) == lane.buckets[-1] or not has_room or not _accepts(lane, sequence):
                break  # to preserve the order of sequences
            self._scheduler.give_to_lane(sequence)
            self._unused_rows -= 1
            taken.append(sequence)
        return taken

    def _collect(self, step: StepInFlight) -> bool:
        """Deliver a lane's frames, or join its sequences after `advance`. Returns whether frames were delivered."""
        if not step.runner_step.has_codes:
            return False
        if not step.is_collected:
            step.is_collected = True
            self._step_executor.deliver(step, step.runner_step.result())
            if any(sequence.finish_reason is not None for sequence in step.runner_step.sequences):
                self._wait_for_lanes()  # the lane may still read and write the rows that are being freed
            self._scheduler.retire(step.runner_step.sequences)
            return True
        step.runner.run_pending_advance()
        if step.runner_step.is_over:
            self._in_flight.remove(step)
            self._step_executor.follow_text(step.runner_step)
            self._scheduler.join(step.runner_step.sequences)
        return False


def _accepts(lane: ModelRunner, sequence: Sequence) -> bool:
    """Return whether a lane can run this sequence. Cloned voices and existing frames need a buffer that lanes lack."""
    has_dense = sequence.prompt.dense is not None or sequence.num_frames > 0
    return not has_dense and sequence.num_positions <= lane.most_positions


def build_lanes(runner: ModelRunner) -> list[ModelRunner]:
    """Build runners on high-priority CUDA streams that share the weights, KV cache and rows of `runner`.

    Each lane has its own step buffers in `FrameNetworks` and `ModelRunner`, because two steps may run concurrently.
    Only `fused` networks have lanes, and only if `deterministic` is not set, because lanes use different buckets.
    """
    shape = runner.shape
    if shape.networks != "fused" or shape.deterministic:
        return []
    own_shape = replace(shape, max_num_seqs=min(_LANE_ROWS, shape.max_num_seqs))

    def lane() -> ModelRunner:
        stream = None
        if runner.on_gpu:
            stream = torch.cuda.Stream(runner.device, priority=_LANE_PRIORITY)  # type: ignore[no-untyped-call]
        networks = runner.networks.another(num_rows=own_shape.max_num_seqs, num_positions=_LANE_POSITIONS)
        return ModelRunner(networks, runner.blocks, own_shape, most_positions=_LANE_POSITIONS, cuda_stream=stream)

    return [lane() for _ in range(_LANES)]
