"""First frames of requests that come while a step runs."""

from dataclasses import replace

import torch

from deployments.talker.engine.scheduler import Scheduler
from deployments.talker.engine.step_maker import StepInFlight, StepMaker
from deployments.talker.runner.model_runner import ModelRunner
from deployments.talker.state.sequence import Sequence

# How many lanes there are, how many newcomers a step of a lane has, and how many positions their prompts have together.
# With one lane, at 20 requests a second, one newcomer in eight waits for another one.
_LANES, _LANE_ROWS, _LANE_POSITIONS = 2, 8, 256
_LANE_PRIORITY = -2  # before the codec's stream
# Beside a step with more listeners than this, newcomers wait for the next step: the lane would make the step longer.
_MOST_BESIDE_LANE = 96


class Lanes:
    """Has a GPU make newcomers' first frames in parallel with the running step, so that they need not wait for its end.

    A lane makes one frame for each of its newcomers, which then join the engine's next step. A CPU has no lanes.

        lane     | prefill | predict | advance |
        codec              |         | its first frame |
        talker   | predict 1  | advance 1    | predict 2 | advance 2 | predict 3, with the newcomer | ...
    """

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, step_maker: StepMaker) -> None:
        self.runners = build_lanes(runner)
        self._scheduler, self._step_maker = scheduler, step_maker
        self._in_flight: list[StepInFlight] = []  # each until its sequences have joined the engine's step
        # A lane may take only rows and blocks that no step uses, because the last step may still run. These were free
        # when that step was chosen, and no lane has taken them since.
        self._unused_rows = self._unused_blocks = 0

    @property
    def is_idle(self) -> bool:
        return not self._in_flight

    def begin_step(self) -> None:
        """The engine has chosen its next step. Later work of lanes waits for the device's work so far, not for it."""
        self._unused_rows, self._unused_blocks = self._scheduler.num_free_rows, self._scheduler.blocks.num_free
        for lane in self.runners:
            if lane.cuda_stream is not None:
                lane.cuda_stream.wait_stream(torch.cuda.current_stream())

    def start_step(self, beside: StepInFlight | None) -> None:
        """Let a free lane take newcomers from the waiting line, if it is worth it next to the engine's step."""
        if not self.runners or beside is None or not self._scheduler.waiting:
            return
        busy = [step.runner for step in self._in_flight]
        lane = next((lane for lane in self.runners if lane not in busy), None)
        if lane is None:
            return
        if sum(not sequence.is_background for sequence in beside.queued.sequences) > _MOST_BESIDE_LANE:
            return
        newcomers = self._take_newcomers(lane)
        if not newcomers:
            return
        failed = self._step_maker.admit(newcomers, lane)
        ready = [sequence for sequence in newcomers if sequence not in failed]
        if ready:
            self._in_flight.append(self._step_maker.queue(ready, lane, after=None))

    def collect(self) -> bool:
        """Hand on the frames of the first lane that has some, and let the sequences of finished lanes join.

        Returns whether there were frames.
        """
        return any(self._collect(step) for step in [*self._in_flight])

    def await_sequence(self, sequence_id: int) -> None:
        """If a lane has this sequence: steps that are queued from now on wait for the lane."""
        if any(sequence.id == sequence_id for sequence in self._scheduler.in_lanes):
            self._await_all()

    def _await_all(self) -> None:
        """The device's work that is queued from now on waits for the work of the lanes so far."""
        for lane in self.runners:
            if lane.cuda_stream is not None:
                torch.cuda.current_stream().wait_stream(lane.cuda_stream)

    def _take_newcomers(self, lane: ModelRunner) -> list[Sequence]:
        """Sequences from the line's head that get a row now, while the lane accepts them and there is unused room."""
        taken: list[Sequence] = []
        for sequence in [sequence for sequence in self._scheduler.waiting if not sequence.awaits_text]:
            needed = self._scheduler.blocks.blocks_for(sequence.num_positions + 1)
            has_room = self._unused_rows > 0 and needed <= self._unused_blocks
            if len(taken) == lane.buckets[-1] or not has_room or not _accepts(lane, sequence):
                break  # no other sequence overtakes it
            self._scheduler.give_to_lane(sequence)
            self._unused_rows -= 1
            self._unused_blocks -= needed
            taken.append(sequence)
        return taken

    def _collect(self, step: StepInFlight) -> bool:
        """Hand a lane's frames on, or have its sequences join once `advance` is over. Returns whether it had frames."""
        if not step.queued.has_codes:
            return False
        if not step.is_collected:
            step.is_collected = True
            self._step_maker.deliver(step, step.queued.result())
            if any(sequence.finish_reason is not None for sequence in step.queued.sequences):
                self._await_all()  # a lane still reads and writes the rows that are free now
            self._scheduler.retire(step.queued.sequences)
            return True
        step.runner.run_pending_advance()
        if step.queued.is_over:
            self._in_flight.remove(step)
            self._step_maker.follow_text(step.queued)
            self._scheduler.join(step.queued.sequences)
        return False


def _accepts(lane: ModelRunner, sequence: Sequence) -> bool:
    """Whether a lane runs this newcomer: not with a cloned voice or frames, whose buffer is there only once."""
    has_dense = sequence.prompt.dense is not None or sequence.num_frames > 0
    return not has_dense and sequence.num_positions <= lane.most_positions


def build_lanes(runner: ModelRunner) -> list[ModelRunner]:
    """Runners on CUDA streams of high priority, which share the weights, keys, values and rows of `runner`.

    Other buffers of a step are in `FrameNetworks` and `ModelRunner`, of which each lane has its own, because two steps
    may run at once. Only `fused` networks have lanes, and no deterministic ones: a lane has other buckets.
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
