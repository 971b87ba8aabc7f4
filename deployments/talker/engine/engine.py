"""The talker engine, which converts requests to frames, one step at a time. Independent of processes and Ray."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from deployments.errors import TalkrayError
from deployments.protocol import Codes, FrameChunk, ModelInfo, SynthesisRequest
from deployments.talker.audio.audio_streams import AudioStreams
from deployments.talker.engine.input_processor import InputProcessor, LengthLimits
from deployments.talker.engine.lanes import Lanes
from deployments.talker.engine.output_queue import OutputQueue
from deployments.talker.engine.scheduler import Scheduler
from deployments.talker.engine.step_executor import StepExecutor, StepInFlight
from deployments.talker.runner.model_runner import ModelRunner, QueuedStep
from deployments.talker.state.sequence import Sequence
from deployments.talker.text.prompt import PromptBuilder

_START_NS = 800_000  # time from scheduling on the host to the start of the step on the device
# Interval between checks for audio between two steps
_AUDIO_POLL_S = 0.0002


@dataclass(frozen=True, slots=True)
class StepOutput:
    """A step's results by sequence id. Failed sequences have already been removed from the engine."""

    chunks: tuple[tuple[int, FrameChunk], ...] = ()
    failures: tuple[tuple[int, TalkrayError], ...] = ()


class Engine:
    """Continuous batching for one checkpoint on one device. `startup.build_engine` constructs engines.

    A step makes one frame for each running sequence. A step has two halves: `predict` makes the frames, and `advance`
    feeds the frames to the talker without waiting for the host. On a GPU, the host works in parallel with both:

        talker   | prefill | predict 1 | advance 1     | predict 2 | advance 2      |
        codec    |                     | first frames 1 | other frames 1 | ...
        host     | start 1 | wait      | collect 1: codes leave, ends are found | start 2 at `next_start_ns` | wait

    `StepExecutor.queue` queues both halves, so the device has work while the host collects. A GPU decodes a sequence's
    first frames without waiting for the host. On a CPU, `StepExecutor.queue` returns after the frames are computed, and
    the step returns the frames. The runner defers `advance` to the next step, because no listener waits for it.

    `Lanes` runs sequences that arrive while a step runs on a GPU.
    """

    def __init__(
        self,
        info: ModelInfo,
        prompts: PromptBuilder,
        limits: LengthLimits,
        runner: ModelRunner,
        scheduler: Scheduler,
        audio: AudioStreams,
    ) -> None:
        self.info, self.model_config = info, prompts.config
        self.prompts, self.limits = prompts, limits
        self.runner, self.scheduler, self.audio = runner, scheduler, audio
        self.output_queue = OutputQueue(audio, info, on_gpu=runner.on_gpu)
        self.input_processor = InputProcessor(info, prompts, limits)
        self.step_executor = StepExecutor(
            scheduler, self.input_processor, self.output_queue, audio, eos=prompts.config.codes.eos
        )
        self.lanes = Lanes(runner, scheduler, self.step_executor)
        self._step: StepInFlight | None = None  # the last queued step of the engine, excluding lanes
        self._advance_ns: dict[int, int] = {}  # mean duration of `advance`, by `_size` of the step
        self.num_steps = 0  # number of steps whose frames the host has read
        self.waited_ns = 0  # total time that the host has waited for codes

    def add(self, sequence_id: int, request: SynthesisRequest) -> None:
        """Queue a request. Raises InvalidRequest if it can never run, or Overloaded if the queue is full.

        A request whose listener already has part of the audio is never rejected as Overloaded.
        """
        self.check_room(request)
        sequence = self.input_processor.build_sequence(sequence_id, request)
        if sequence is not None:
            self._enqueue(sequence)

    def check_room(self, request: SynthesisRequest) -> None:
        """Raise Overloaded if the queue is full, so that `add` would reject the request."""
        if request.background or not request.is_continuation:
            self.scheduler.check_room(background=request.background)

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> StepOutput:
        """Admit sequences that fit, make one frame for each running sequence, and return frames, audio and failures.

        On a GPU, a call may return without frames if audio is ready earlier, or if new requests can still join the next
        step. `meanwhile` is called repeatedly while the device is busy, and may add and abort requests. Raises an error
        if the engine itself has failed.
        """
        self.runner.run_pending_advance()
        if self._needs_step and (batch := self.scheduler.schedule()) is not None:
            self.lanes.begin_step()
            failed = self.step_executor.start_sequences(batch.prefill, self.runner)
            if decode := [sequence for sequence in batch.decode if sequence not in failed]:
                self._step = self.step_executor.queue(decode, self.runner, after=self._step)
        if (step := self._wait_for_codes(meanwhile)) is not None:
            self.step_executor.deliver(step, self._collect(step))
            self.scheduler.retire(step.runner_step.sequences)
        chunks = self.output_queue.pop_chunks(self.scheduler.find)
        return StepOutput(tuple(chunks), self._abort_failed())

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing for a step to do."""
        works = self._has_unread_frames or not self.lanes.is_idle or self.runner.has_pending_advance
        return self.scheduler.is_idle and self.output_queue.is_idle and not works

    @property
    def poll_timeout_s(self) -> float:
        """Seconds that the host may wait for new requests without the device becoming idle."""
        if self._step is None or self._has_unread_frames or not self.lanes.is_idle:
            return 0.0
        return min(max(0.0, (self._step.next_start_ns - time.perf_counter_ns()) / 1e9), _AUDIO_POLL_S)

    def append_text(self, sequence_id: int, text: str, *, is_last: bool) -> None:
        """Append to a live request's text. Raises the same errors as `add`. Ignores a request that has ended.

        A sequence starts once there is enough text for its prompt. Each subsequent frame needs one more token.
        """
        begun = self.input_processor.sequence(sequence_id)
        num_ids = 0 if begun is None else len(begun.prompt.trailing)
        sequence = self.input_processor.append_text(sequence_id, text, is_last=is_last)
        if sequence is not None and begun is None:
            self._enqueue(sequence)
        elif sequence is not None and len(sequence.prompt.trailing) > num_ids:
            self.lanes.wait_for_lane(sequence_id)
            self.runner.extend_text(sequence, num_ids)

    def abort(self, sequence_id: int) -> None:
        """Stop a sequence and free its resources. Ignores a sequence that has ended."""
        self.input_processor.close(sequence_id)
        self.lanes.wait_for_lane(sequence_id)
        self.scheduler.abort(sequence_id)
        self.output_queue.close(sequence_id)

    def forget(self, voices: tuple[bytes, ...]) -> int:
        """Drop cached results for these stored voices. Returns the number of results dropped."""
        prompts = self.prompts
        return prompts.speakers.forget(voices) + prompts.references.forget(voices) + self.audio.forget(voices)

    def check_integrity(self) -> None:
        """Assert that each row, block and decoder slot has exactly one owner."""
        self.scheduler.check_integrity()
        self.audio.check_integrity()

    def _enqueue(self, sequence: Sequence) -> None:
        if sequence.num_frames >= sequence.limit.frames:
            self.output_queue.open(sequence)  # the client may not yet have the audio for its last frames
            self.output_queue.end(sequence, sequence.limit.reason)
        else:
            self.scheduler.add(sequence)

    @property
    def _needs_step(self) -> bool:
        """Whether no step is running, and the device has little queued work left."""
        return not self._has_unread_frames and (
            self._step is None or time.perf_counter_ns() >= self._step.next_start_ns
        )

    @property
    def _has_unread_frames(self) -> bool:
        """Whether the last step has frames that the host has not yet read."""
        return self._step is not None and not self._step.is_collected

    def _wait_for_codes(self, meanwhile: Callable[[], None]) -> StepInFlight | None:
        """Wait for the frames of the running step, and run the lanes meanwhile.

        Returns the step once it has frames. Returns None if no step is running, or if audio or lane frames come first.
        """
        start = time.perf_counter_ns()
        while True:
            self.lanes.start_step(beside=self._step)
            lane_has_frames = self.lanes.collect()
            has_codes = self._step is not None and self._has_unread_frames and self._step.runner_step.has_codes
            if lane_has_frames or has_codes or not self._has_unread_frames or self.audio.has_audio:
                break
            meanwhile()  # busy-wait, because waking up from a sleep would take longer
        self.waited_ns += time.perf_counter_ns() - start
        return self._step if has_codes else None

    def _collect(self, step: StepInFlight) -> Codes:
        """Return frames [sequences, groups] of the running step, and compute when to start the next step."""
        frames = step.runner_step.result()
        step.is_collected, self.num_steps = True, self.num_steps + 1
        if step.previous is not None:
            measured_ns, size = step.previous.advance_ns(), _size(step.previous)
            average_ns = self._advance_ns.get(size, measured_ns)
            self._advance_ns[size] = min(measured_ns, (7 * average_ns + measured_ns) // 8)  # lanes prolong `advance`
        step.next_start_ns = time.perf_counter_ns() + self._advance_ns.get(_size(step.runner_step), 0) - _START_NS
        return frames

    def _abort_failed(self) -> tuple[tuple[int, TalkrayError], ...]:
        """Stop the sequences that failed during this step and return their errors."""
        failures = self.step_executor.take_failures()
        for sequence_id, _ in failures:
            self.abort(sequence_id)
        return failures


def _size(step: QueuedStep) -> int:
    """Return a size class. Steps of the same class take about the same time."""
    return len(step.sequences) // 16
