"""First frames of requests that come while a step runs."""

from deployments.talker.engine.scheduler import Scheduler
from deployments.talker.engine.steps import StepInFlight, Steps
from deployments.talker.runner.model_runner import ModelRunner

# Beside a step with more listeners than this, newcomers wait for the next step: the lane would make the step longer.
_MOST_BESIDE_LANE = 96


class Lanes:
    """Has a GPU make newcomers' first frames beside the step that runs, so that they need not wait for its end.

    A lane is a `ModelRunner` with a CUDA stream of high priority: see `build_runner`. It makes one frame for each of
    its newcomers, which then join the engine's next step. A CPU has no lanes.

        lane     | prefill | predict | advance |
        codec              |         | its first frame |
        talker   | predict 1  | advance 1    | predict 2 | advance 2 | predict 3, with the newcomer | ...
    """

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, steps: Steps) -> None:
        """The lanes of `runner`."""
        self._runner, self._scheduler, self._steps = runner, scheduler, steps
        self._in_flight: list[StepInFlight] = []  # each until its sequences have joined the engine's step

    @property
    def is_idle(self) -> bool:
        return not self._in_flight

    def start_step(self, beside: StepInFlight | None) -> None:
        """Let a free lane take newcomers from the waiting line, if it is worth it beside the engine's step."""
        if not self._runner.lanes or beside is None or not self._scheduler.waiting:
            return
        busy = [step.runner for step in self._in_flight]
        lane = next((lane for lane in self._runner.lanes if lane not in busy), None)
        if lane is None:
            return
        if sum(not sequence.is_background for sequence in beside.queued.sequences) > _MOST_BESIDE_LANE:
            return
        newcomers = self._scheduler.start_beside(lane.accepts, most=lane.buckets[-1])
        if not newcomers:
            return
        failed = self._steps.admit(newcomers, lane)
        ready = [sequence for sequence in newcomers if sequence not in failed]
        if ready:
            self._in_flight.append(self._steps.queue(ready, lane, after=None))

    def collect(self) -> bool:
        """Hand on the frames of the first lane that has some, and let sequences join that a lane is done with.

        Returns whether there were frames.
        """
        return any(self._collect(step) for step in [*self._in_flight])

    def await_sequence(self, sequence_id: int) -> None:
        """If a lane has this sequence: steps that are queued from now on wait for the lane."""
        if sequence_id in self._scheduler.in_lane:
            self._runner.await_lanes()

    def _collect(self, step: StepInFlight) -> bool:
        """Hand a lane's frames on, or have its sequences join once `advance` is over. Returns whether it had frames."""
        if not step.queued.has_codes:
            return False
        if not step.is_collected:
            step.is_collected = True
            self._steps.hand_on(step, step.queued.result())
            if any(sequence.finish_reason is not None for sequence in step.queued.sequences):
                self._runner.await_lanes()  # it still reads and writes the rows that are free now
            self._scheduler.retire(step.queued.sequences)
            return True
        step.runner.run_pending_advance()
        if step.queued.is_over:
            self._in_flight.remove(step)
            self._steps.follow_text(step.queued)
            self._scheduler.join(step.queued.sequences)
        return False
