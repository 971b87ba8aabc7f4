"""The talker engine: requests in, frames out, one step at a time. Knows neither processes nor Ray."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from deployments.errors import EngineError, Overloaded, TalkerLost, TalkrayError
from deployments.protocol import Codes, FrameChunk, GenerateRequest, ModelInfo
from deployments.talker.audio.audio_streams import AudioStreams
from deployments.talker.engine.engine_load import EngineLoad
from deployments.talker.engine.intake import Intake, LengthLimits
from deployments.talker.engine.outgoing import Outgoing
from deployments.talker.engine.scheduler import Scheduler
from deployments.talker.networks.frame_networks import MIN_NEW_TOKENS, NOT_FINITE
from deployments.talker.runner.model_runner import ModelRunner, QueuedStep
from deployments.talker.state.sequence import Sequence
from deployments.talker.text.prompt import PromptBuilder

logger = logging.getLogger(__name__)

_START_NS = 800_000  # from the host's choice of a step's sequences to the start of the step on the device
# How often to look for audio while no step is under way.
_AUDIO_POLL_S = 0.0002
# With at most so many rows `advance` of a step waits until a first frame is decoded, because a listener waits.
_FEW_ROWS = 8
# Beside a step with more listeners than this, newcomers wait for the next step: the lane would make the step longer.
_MOST_BESIDE_LANE = 96
_MAX_FAILED_PREFILLS = 3  # so many in a row are the fault of the engine, not of the requests


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step brought, by sequence id. A sequence that failed is no longer in the engine."""

    chunks: tuple[tuple[int, FrameChunk], ...] = ()
    failures: tuple[tuple[int, TalkrayError], ...] = ()


@dataclass(slots=True)
class StepInFlight:
    """The step that was started last, or that of a lane."""

    queued: QueuedStep
    runner: ModelRunner
    # These stand first in the batch. The codec gets their frames from the host, those of the others on the device.
    decoded_late: list[Sequence]
    previous: QueuedStep | None = None  # the step before it, whose `advance` is over once this one has codes
    is_collected: bool = False  # the host has its frames, and the talker reads them
    next_start_ns: int = 0  # when to start the next step: earlier fewer requests join it, later the device is idle


class Engine:
    """Continuous batching over one checkpoint on one device. `startup.build_engine` puts one together.

    A step makes one frame for each running sequence. It has two halves: `predict` makes the frames, and `advance` has
    the talker read them, which needs no answer from the host. On a GPU the host works beside both:

        talker   | prefill | predict 1 | advance 1     | predict 2 | advance 2      |
        codec    |                     | first frames 1 | other frames 1 | ...
        host     | start 1 | wait      | collect 1: codes leave, ends are found | start 2 at `next_start_ns` | wait

    `_queue_step` queues both halves, so the device has work while the host collects. A GPU decodes a sequence's first
    frames without asking the host. On a CPU `_queue_step` returns when the frames exist, the step returns them, and the
    runner puts `advance` off until the next step: no listener waits for it.

    A GPU has lanes too. A newcomer that comes while a step runs does not wait for it:

        lane     | prefill | predict | advance |             on a CUDA stream of high priority
        codec              |         | its first frame |
        talker   | predict 1  | advance 1    | predict 2 | advance 2 | predict 3, with the newcomer | ...

    `_start_lane_step` takes it from the line. `_collect_lane` reads its frame, and lets it join the next step once the
    lane has run `advance`.
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
        self.info, self.model = info, prompts.config
        self.prompts, self.limits = prompts, limits
        self.runner, self.scheduler, self.audio = runner, scheduler, audio
        self.outgoing = Outgoing(audio, info, on_gpu=runner.device.type != "cpu")
        self.intake = Intake(info, prompts, limits)
        self._step: StepInFlight | None = None
        self._lane_steps: list[StepInFlight] = []  # each until its sequences have joined the others
        self._advance_ns: dict[int, int] = {}  # how long `advance` takes, by `_size` of the step
        self._failures: list[tuple[int, TalkrayError]] = []  # of the step under way
        self._num_failed_prefills = 0  # in a row
        self._num_not_finite = 0  # sequences since the start
        self.num_steps = 0  # since the start, of which the host has read the frames
        self.waited_ns = 0  # the host's waiting time for codes since the start

    def add(self, sequence_id: int, request: GenerateRequest) -> None:
        """Queue a request. Raises InvalidRequest if it can never run, and Overloaded if the waiting line is full.

        A request is never refused as Overloaded if its listener has a part of the audio.
        """
        synthesis = request.synthesis
        if synthesis.background or not synthesis.is_underway:
            self.scheduler.check_room(background=synthesis.background)
        sequence = self.intake.prepare(sequence_id, request)
        if sequence is not None:
            self._enqueue(sequence)

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> StepOutput:
        """Admit the sequences that fit, make one frame for each running sequence, and return the frames, audio and
        failures.

        On a GPU a call may return without frames: if audio is ready before them, or if new requests still have time to
        join the next step. `meanwhile` is called repeatedly while the device works, and may add and abort. Raises if
        the engine itself is at fault.
        """
        self.runner.run_pending_advance()
        if self._needs_step and (batch := self.scheduler.schedule()) is not None:
            self.runner.begin_step()
            failed = self._admit(batch.prefill, self.runner)
            if decode := [sequence for sequence in batch.decode if sequence not in failed]:
                self._step = self._queue_step(decode, self.runner, self._step)
        if (step := self._await_codes(meanwhile)) is not None:
            frames = self._read_frames(step)
            self._decode_late(step, frames)
            self._follow_text(step.previous)
            self._append_frames(step.queued.sequences, frames)
            self.scheduler.retire(step.queued.sequences)
        chunks = self.outgoing.take(self.scheduler.find)
        return StepOutput(tuple(chunks), self._abort_failed())

    @property
    def is_idle(self) -> bool:
        """Whether a step would do nothing."""
        works = self._is_running or bool(self._lane_steps) or self.runner.has_pending_advance
        return self.scheduler.is_idle and self.outgoing.is_idle and not works

    @property
    def poll_timeout_s(self) -> float:
        """For how long the host may wait for new requests before the device is idle."""
        if self._step is None or self._is_running or self._lane_steps:
            return 0.0
        return min(max(0.0, (self._step.next_start_ns - time.perf_counter_ns()) / 1e9), _AUDIO_POLL_S)

    def append_text(self, sequence_id: int, text: str, *, is_last: bool) -> None:
        """Add to a live request's text. Raises as `add` does. A request that has ended meanwhile is no error.

        A sequence begins once there is text enough for its prompt. Each later frame needs one more token.
        """
        begun = self.intake.sequence(sequence_id)
        num_ids = 0 if begun is None else len(begun.prompt.trailing)
        sequence = self.intake.append_text(sequence_id, text, is_last=is_last)
        if sequence is not None and begun is None:
            self._enqueue(sequence)
        elif sequence is not None and len(sequence.prompt.trailing) > num_ids:
            self._await_lane_of(sequence_id)
            self.runner.extend_text(sequence, num_ids)

    def abort(self, sequence_id: int) -> None:
        """Stop a sequence and free what it holds. A sequence that has ended meanwhile is no error."""
        self.intake.close(sequence_id)
        self._await_lane_of(sequence_id)
        self.scheduler.abort(sequence_id)
        self.outgoing.close(sequence_id)

    def forget(self, voices: tuple[bytes, ...]) -> int:
        """Drop what is kept of these stored voices. Returns how many results were kept."""
        prompts = self.prompts
        return prompts.speakers.forget(voices) + prompts.references.forget(voices) + self.audio.forget(voices)

    def take_load(self) -> EngineLoad:
        """The load now. Lookups count from the last call on."""
        return EngineLoad(
            num_running=self.scheduler.num_running,
            num_waiting=len(self.scheduler.waiting),
            kv_used_ratio=self.scheduler.kv_used_ratio,
            speakers=self.prompts.speakers.take_lookups(),
            references=self.prompts.references.take_lookups(),
            num_background=self.scheduler.num_background,
            repaired=self.audio.repaired,
        )

    def check_integrity(self) -> None:
        """Assert that rows, blocks and decoder slots are each held exactly once."""
        self.scheduler.check_integrity()
        self.audio.check_integrity()

    def _enqueue(self, sequence: Sequence) -> None:
        if sequence.num_frames >= sequence.limit.frames:
            self.outgoing.open(sequence)  # the client may not have all audio of its frames
            self.outgoing.end(sequence, sequence.limit.reason)
        else:
            self.scheduler.add(sequence)

    @property
    def _needs_step(self) -> bool:
        """Whether no step runs, and the device has little work left."""
        return not self._is_running and (self._step is None or time.perf_counter_ns() >= self._step.next_start_ns)

    @property
    def _is_running(self) -> bool:
        """Whether the device makes frames of the last step which the host has not read."""
        return self._step is not None and not self._step.is_collected

    def _admit(self, sequences: list[Sequence], runner: ModelRunner) -> list[Sequence]:
        """Prefill sequences that have a row now, and open them at the decoder. Returns those that failed."""
        failed = self._prefill(sequences, runner)
        for sequence in (each for each in sequences if each not in failed):  # the device works on their prompts
            try:
                self.outgoing.open(sequence)
            except Overloaded as error:
                self._failures.append((sequence.id, error))
                failed.append(sequence)
        return failed

    def _prefill(self, sequences: list[Sequence], runner: ModelRunner) -> list[Sequence]:
        """Prefill sequences together, or one by one if that raises. Returns the sequences that failed alone too.

        Raises the device's errors, and the last error after _MAX_FAILED_PREFILLS in a row.
        """
        try:
            runner.prefill(sequences)
        except torch.AcceleratorError:
            raise  # the device is lost
        except Exception:
            logger.exception("a prefill of %d sequences failed: each is tried by itself", len(sequences))
            return [sequence for sequence in sequences if not self._prefill_alone(sequence, runner)]
        self._num_failed_prefills = 0 if sequences else self._num_failed_prefills
        return []

    def _prefill_alone(self, sequence: Sequence, runner: ModelRunner) -> bool:
        try:
            runner.prefill([sequence])
        except Exception as error:
            self._num_failed_prefills += 1
            if self._num_failed_prefills >= _MAX_FAILED_PREFILLS or isinstance(error, torch.AcceleratorError):
                raise
            self._failures.append((sequence.id, EngineError(f"the engine failed on this request: {error!r}")))
            return False
        self._num_failed_prefills = 0
        return True

    def _queue_step(self, sequences: list[Sequence], runner: ModelRunner, after: StepInFlight | None) -> StepInFlight:
        """Queue both halves of a step, `after` the one before it; none was before a lane's.

        A GPU decodes frames below MIN_NEW_TOKENS at once, because a listener waits, and speech cannot end there.
        """
        on_gpu = runner.device.type != "cpu"
        decoded_early, decoded_late = list[Sequence](), list[Sequence]()
        for sequence in sequences:
            is_early = on_gpu and sequence.num_frames < MIN_NEW_TOKENS and not sequence.is_background
            (decoded_early if is_early else decoded_late).append(sequence)
        queued = runner.queue_step(decoded_late + decoded_early, partial(self._decode_early, decoded_early))
        return StepInFlight(queued, runner, decoded_late, previous=None if after is None else after.queued)

    def _decode_early(self, decoded_early: list[Sequence], frames: Tensor) -> None:
        """Decode frames as soon as they exist: the last ones of `frames` [rows, groups], which are on the device."""
        if decoded_early:
            self.audio.add_frames([sequence.id for sequence in decoded_early], frames[-len(decoded_early) :].clone())
            if len(frames) <= _FEW_ROWS and not decoded_early[-1].num_frames:
                self.audio.prioritise_newest_call()

    def _await_codes(self, meanwhile: Callable[[], None]) -> StepInFlight | None:
        """Wait for the frames of the running step, and meanwhile serve the lanes. Returns the step whose frames exist,
        None if no step runs, or if audio or frames of a lane are ready before them.
        """
        start = time.perf_counter_ns()
        while True:
            self._start_lane_step()
            lane_has_frames = any(self._collect_lane(step) for step in [*self._lane_steps])
            has_codes = self._step is not None and self._is_running and self._step.queued.has_codes
            if lane_has_frames or has_codes or not self._is_running or self.audio.has_audio:
                break
            meanwhile()  # this keeps a core busy: waking up from a sleep would take longer
        self.waited_ns += time.perf_counter_ns() - start
        return self._step if has_codes else None

    def _read_frames(self, step: StepInFlight) -> Codes:
        """Frames [sequences, groups] of the running step. From now on it is known when to start the next one."""
        frames = step.queued.result()
        step.is_collected, self.num_steps = True, self.num_steps + 1
        if step.previous is not None:
            measured_ns, size = step.previous.advance_ns(), _size(step.previous)
            average_ns = self._advance_ns.get(size, measured_ns)
            self._advance_ns[size] = min(measured_ns, (7 * average_ns + measured_ns) // 8)  # beside a lane it is longer
        step.next_start_ns = time.perf_counter_ns() + self._advance_ns.get(_size(step.queued), 0) - _START_NS
        return frames

    def _decode_late(self, step: StepInFlight, frames: Codes) -> None:
        """Have the codec make samples of the frames that `_decode_early` left."""
        no_frame = (NOT_FINITE, self.model.codes.eos)
        rows = [row for row in range(len(step.decoded_late)) if frames[row, 0] not in no_frame]
        self.audio.add_frames([step.decoded_late[row].id for row in rows], torch.from_numpy(frames[rows]))

    def _follow_text(self, step: QueuedStep | None) -> None:
        """Find out where in their texts `advance` of `step` read: there the next frames are spoken."""
        readings = [] if step is None else zip(step.sequences, step.readings(), strict=False)
        for sequence, (mass, moment) in readings:
            if self.scheduler.holds(sequence):
                sequence.progress.read(mass, moment, sequence.prompt)

    def _append_frames(self, sequences: list[Sequence], frames: Codes) -> None:
        """Give each sequence its frame, or the end of speech that stands in place of one."""
        now_s = time.monotonic()
        for sequence, frame in zip(sequences, frames, strict=True):
            if not self.scheduler.holds(sequence):
                continue  # aborted meanwhile
            if frame[0] == NOT_FINITE:
                self._failures.append((sequence.id, self._count_not_finite()))
                continue
            if frame[0] == self.model.codes.eos:
                sequence.end()
            else:
                sequence.append(frame)
            if sequence.finish_reason is not None:
                self.intake.close(sequence.id)
                self.intake.measure_pace(sequence)
            self.outgoing.add(sequence, now_s)

    def _count_not_finite(self) -> TalkerLost:
        """Count a sequence whose state is no number. Returns its error: another talker may go on with it.

        Raises EngineError at the second such sequence, because the weights or the device are then at fault.
        """
        self._num_not_finite += 1
        if self._num_not_finite > 1:
            raise EngineError("two sequences came to NaN or infinity: the weights or the device are broken")
        return TalkerLost("the stream came to NaN or infinity on this talker")

    def _abort_failed(self) -> tuple[tuple[int, TalkrayError], ...]:
        """Stop the sequences that failed in this step. Returns their errors."""
        failures, self._failures = (*self._failures, *self.audio.take_failures()), []
        for sequence_id, _ in failures:
            self.abort(sequence_id)
        return failures

    def _start_lane_step(self) -> None:
        """Make first frames of newcomers beside the step that runs, which they would have to wait for."""
        step = self._step
        if not self.runner.lanes or step is None or not self.scheduler.waiting:
            return
        busy = [lane_step.runner for lane_step in self._lane_steps]
        lane = next((lane for lane in self.runner.lanes if lane not in busy), None)
        if lane is None:
            return
        if sum(not sequence.is_background for sequence in step.queued.sequences) > _MOST_BESIDE_LANE:
            return
        newcomers = self.scheduler.start_beside(lane.accepts, most=lane.buckets[-1])
        if not newcomers:
            return
        failed = self._admit(newcomers, lane)
        ready = [sequence for sequence in newcomers if sequence not in failed]
        if ready:
            self._lane_steps.append(self._queue_step(ready, lane, None))

    def _collect_lane(self, step: StepInFlight) -> bool:
        """Read a lane's frames; its sequences join the others after `advance`. Returns whether there were frames."""
        if not step.queued.has_codes:
            return False
        if not step.is_collected:
            step.is_collected = True
            frames = step.queued.result()
            self._decode_late(step, frames)
            self._append_frames(step.queued.sequences, frames)
            if any(sequence.finish_reason is not None for sequence in step.queued.sequences):
                self.runner.await_lanes()  # it still reads and writes the rows that are free now
            self.scheduler.retire(step.queued.sequences)
            return True
        step.runner.run_pending_advance()
        if step.queued.is_over:
            self._lane_steps.remove(step)
            self._follow_text(step.queued)
            self.scheduler.join(step.queued.sequences)
        return False

    def _await_lane_of(self, sequence_id: int) -> None:
        """If a lane has this sequence: steps that are queued from now on wait for the lane."""
        if sequence_id in self.scheduler.in_lane:
            self.runner.await_lanes()


def _size(step: QueuedStep) -> int:
    """Steps of one size take about as long."""
    return len(step.sequences) // 16
