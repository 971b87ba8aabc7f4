"""The talker engine: requests in, frames out, one step at a time. Knows neither processes nor Ray."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from itertools import takewhile

import torch
from torch import Tensor

from deployments.errors import EngineError, Overloaded, TalkerLost, TalkrayError
from deployments.protocol import Codes, FrameChunk, GenerateRequest, ModelInfo
from deployments.talker.audio_streams import AudioStreams
from deployments.talker.channel import EngineLoad
from deployments.talker.intake import Intake
from deployments.talker.networks import MIN_NEW_TOKENS, NOT_FINITE
from deployments.talker.outgoing import Outgoing
from deployments.talker.prompt import PromptBuilder
from deployments.talker.runner import LaunchedStep, ModelRunner
from deployments.talker.scheduler import Scheduler
from deployments.talker.sequence import LengthLimits, Sequence

logger = logging.getLogger(__name__)

_LAUNCH_NS = 800_000  # from the host's choice of a step's sequences to the start of the step on the device
# How often to look for audio while no step is under way.
_AUDIO_POLL_S = 0.0002
# With at most so many rows `advance` of a step waits until a first frame is decoded, because a listener waits.
_FEW_ROWS = 8
_MAX_FAILED_PREFILLS = 3  # so many in a row are the fault of the engine, not of the requests


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step brought, by sequence id. A sequence that failed is no longer in the engine."""

    chunks: tuple[tuple[int, FrameChunk], ...] = ()
    failures: tuple[tuple[int, TalkrayError], ...] = ()


class StepStage(Enum):
    """How far the last step has come."""

    CODES = auto()  # the device makes its frames, and the host has not taken them
    ADVANCE = auto()  # the host has its frames, and the talker reads them
    OVER = auto()


@dataclass(slots=True)
class StepInFlight:
    """The step that was launched last."""

    launched: LaunchedStep
    previous: LaunchedStep | None  # the step before it, whose `advance` is over once this one has codes
    num_starting: int  # the last so many sequences of the batch: the decoder has their frames before the host has them
    stage: StepStage = StepStage.CODES
    next_launch_ns: int = 0  # when to launch the next step: earlier fewer requests join it, later the device is idle


class Engine:
    """Continuous batching over one checkpoint on one device. `loading.build_engine` puts one together.

    A step makes one frame for each running sequence. It has two halves: `predict` makes the frames, and `advance` has
    the talker read them, which needs no answer from the host. On a GPU the host works beside both:

        talker   | prefill | predict 1 | advance 1     | predict 2 | advance 2      |
        codec    |                     | first frames 1 | other frames 1 | ...
        host     | launch 1 | wait     | collect 1: codes leave, ends are found | launch 2 at `next_launch_ns` | wait

    `_launch_step` queues both halves, so the device has work while the host collects. `_starting` names the sequences
    that cannot end yet: a GPU decodes their frames without asking the host. On a CPU `_launch_step` returns when the
    frames exist, `_collect_step` hands them on, and `_finish_step` runs `advance` at the next call: no listener waits
    for it.

    The host's buffers of a step are used again. `LaunchedStep.result` has to be read before the next launch. `readings`
    are complete once the next step has its codes, and have to be read before the launch after that.
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
        self._failures: list[tuple[int, TalkrayError]] = []  # of the step under way
        self._num_failed_prefills = 0  # in a row
        self._num_not_finite = 0  # sequences since the start
        self.num_steps = 0  # since the start, of which the host has taken the frames
        self.waited_ns = 0  # the host's waiting time for codes since the start

    @property
    def is_idle(self) -> bool:
        """Whether a step would do nothing."""
        step = self._step
        works = step is not None and (
            step.stage is StepStage.CODES or (step.stage is StepStage.ADVANCE and self._goes_on(step))
        )
        return self.scheduler.is_idle and self.outgoing.is_idle and not works

    @property
    def poll_timeout_s(self) -> float:
        """For how long the host may wait for new requests before the device is idle."""
        if self._step is None or self._step.stage is StepStage.CODES:
            return 0.0
        return min(max(0.0, (self._step.next_launch_ns - time.perf_counter_ns()) / 1e9), _AUDIO_POLL_S)

    def add(self, sequence_id: int, request: GenerateRequest) -> None:
        """Queue a request. Raises InvalidRequest if it can never run, and Overloaded if the waiting line is full.

        A request is never refused as Overloaded if its listener has a part of the audio.
        """
        synthesis = request.synthesis
        if synthesis.background or not synthesis.is_underway:
            self.scheduler.check_room(background=synthesis.background)
        sequence = self.intake.add(sequence_id, request)
        if sequence is not None:
            self._queue(sequence)

    def append_text(self, sequence_id: int, text: str, *, is_last: bool) -> None:
        """Add to a live request's text. Raises as `add` does. A request that has ended meanwhile is no error.

        A sequence begins once there is text enough for its prompt. Each later frame needs one more token.
        """
        known = self.intake.sequence(sequence_id)
        num_known = 0 if known is None else len(known.prompt.trailing)
        sequence = self.intake.append_text(sequence_id, text, is_last=is_last)
        if sequence is not None and known is None:
            self._queue(sequence)
        elif sequence is not None and len(sequence.prompt.trailing) > num_known:
            self.runner.extend_text(sequence, num_known)

    def abort(self, sequence_id: int) -> None:
        """Stop a sequence and free what it holds. A sequence that has ended meanwhile is no error."""
        self.intake.close(sequence_id)
        self.scheduler.abort(sequence_id)
        self.outgoing.close(sequence_id)

    def forget(self, voices: tuple[bytes, ...]) -> int:
        """Drop what is kept of these stored voices. Returns how many results were kept."""
        prompts = self.prompts
        return prompts.speakers.forget(voices) + prompts.references.forget(voices) + self.audio.forget(voices)

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> StepOutput:
        """Admit the sequences that fit, make one frame for each running sequence, and return the frames, audio and
        failures.

        On a GPU a call may return without frames: if audio is ready before them, or if new requests still have time to
        join the next step. `meanwhile` is called repeatedly while the device works, and may add and abort. Raises if
        the engine itself is at fault.
        """
        self._finish_step()
        self._launch_step()
        self._collect_step(meanwhile)
        chunks = self.outgoing.take(self.scheduler.find)
        failures, self._failures = (*self._failures, *self.audio.take_failures()), []
        for sequence_id, _ in failures:
            self.abort(sequence_id)
        return StepOutput(tuple(chunks), failures)

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

    def _queue(self, sequence: Sequence) -> None:
        if sequence.num_frames >= sequence.limit.frames:
            self.outgoing.open(sequence)  # the client may not have all audio of its frames
            self.outgoing.end(sequence, sequence.limit.reason)
        else:
            self.scheduler.add(sequence)

    def _finish_step(self) -> None:
        """Run `advance` of the last step, which a CPU may still have to do."""
        step = self._step
        if step is None or step.stage is not StepStage.ADVANCE:
            return
        step.stage = StepStage.OVER
        if not self._goes_on(step):
            self.runner.drop_pending_advance()
            return
        self.runner.run_pending_advance()

    def _goes_on(self, step: StepInFlight) -> bool:
        """Whether a sequence of the step goes on, so that `advance` of the step is needed."""
        return any(self.scheduler.running.get(sequence.id) is sequence for sequence in step.launched.sequences)

    def _launch_step(self) -> None:
        """Start the next step, unless one runs or the device has work enough for now."""
        last = self._step
        if last is not None and (last.stage is StepStage.CODES or time.perf_counter_ns() < last.next_launch_ns):
            return
        batch = self.scheduler.schedule()
        if batch is None:
            return
        failed = self._prefill(batch.prefill)
        for sequence in batch.prefill:  # while the device works on their prompts
            if sequence not in failed and not self._try_open(sequence):
                failed.append(sequence)
        decode = [sequence for sequence in batch.decode if sequence not in failed] if failed else batch.decode
        if decode:
            starting = self._starting(decode)
            launched = self.runner.launch(decode, partial(self._add_first_frames, starting))
            self._step = StepInFlight(launched, None if last is None else last.launched, len(starting))

    def _prefill(self, sequences: list[Sequence]) -> list[Sequence]:
        """Prefill sequences together, or one by one if that raises. Returns the sequences that failed alone too.

        Raises the device's errors, and the last error after _MAX_FAILED_PREFILLS in a row.
        """
        try:
            self.runner.prefill(sequences)
        except torch.AcceleratorError:
            raise  # the device is lost
        except Exception:
            logger.exception("a prefill of %d sequences failed: each is tried by itself", len(sequences))
            return [sequence for sequence in sequences if not self._prefill_alone(sequence)]
        self._num_failed_prefills = 0 if sequences else self._num_failed_prefills
        return []

    def _prefill_alone(self, sequence: Sequence) -> bool:
        try:
            self.runner.prefill([sequence])
        except Exception as error:
            self._num_failed_prefills += 1
            if self._num_failed_prefills >= _MAX_FAILED_PREFILLS or isinstance(error, torch.AcceleratorError):
                raise
            self._failures.append((sequence.id, EngineError(f"the engine failed on this request: {error!r}")))
            return False
        self._num_failed_prefills = 0
        return True

    def _try_open(self, sequence: Sequence) -> bool:
        """Open the sequence at the decoder. Returns whether the decoder takes it; if not, the sequence has failed."""
        try:
            self.outgoing.open(sequence)
        except Overloaded as error:
            self._failures.append((sequence.id, error))
            return False
        return True

    def _starting(self, sequences: list[Sequence]) -> list[Sequence]:
        """The sequences at a batch's end whose frames a GPU decodes at once, because speech never ends with these.

        `Pacing` puts new ones there. One that stood elsewhere would be decoded with the others, a little later.
        """
        if self.runner.device.type == "cpu":
            return []
        return list(takewhile(lambda sequence: sequence.num_frames < MIN_NEW_TOKENS, reversed(sequences)))[::-1]

    def _add_first_frames(self, starting: list[Sequence], frames: Tensor) -> None:
        """Decode the frames of `starting` as soon as they exist. `frames` [sequences, groups] are on the device."""
        if starting:
            self.audio.add_frames([sequence.id for sequence in starting], frames[-len(starting) :].clone())
            if len(frames) <= _FEW_ROWS and not starting[-1].num_frames:
                self.audio.prioritise_newest_call()

    def _collect_step(self, meanwhile: Callable[[], None]) -> None:
        """Wait for the frames of the running step and take them. Return earlier if audio is ready."""
        step, start = self._step, time.perf_counter_ns()
        if step is None or step.stage is not StepStage.CODES:
            return
        while not step.launched.has_codes:  # this keeps a core busy: waking up from a sleep would take longer
            if self.audio.has_audio:
                return
            meanwhile()
        frames = step.launched.result()
        now_ns = time.perf_counter_ns()
        self.waited_ns += now_ns - start
        if step.previous is not None:
            step.next_launch_ns = now_ns + step.previous.advance_ns() - _LAUNCH_NS
        step.stage, self.num_steps = StepStage.ADVANCE, self.num_steps + 1
        self._add_other_frames(step, frames)
        if step.previous is not None:
            self._follow_text(step.previous)
        self._append_frames(step.launched.sequences, frames)
        self.scheduler.retire(step.launched.sequences)

    def _add_other_frames(self, step: StepInFlight, frames: Codes) -> None:
        """Have the codec make samples of the frames that `_add_first_frames` left."""
        others = range(len(frames) - step.num_starting)
        rows = [row for row in others if frames[row, 0] not in (NOT_FINITE, self.model.codes.eos)]
        self.audio.add_frames([step.launched.sequences[row].id for row in rows], torch.from_numpy(frames[rows]))

    def _follow_text(self, step: LaunchedStep) -> None:
        """Find out where in their texts `advance` of `step` read: there the next frames are spoken."""
        for sequence, (mass, moment) in zip(step.sequences, step.readings(), strict=False):
            if self.scheduler.running.get(sequence.id) is sequence:
                sequence.progress.read(mass, moment, sequence.prompt)

    def _append_frames(self, sequences: list[Sequence], frames: Codes) -> None:
        """Give each sequence its frame, or the end of speech that stands in place of one."""
        now_s = time.monotonic()
        for sequence, frame in zip(sequences, frames, strict=True):
            if self.scheduler.running.get(sequence.id) is not sequence:
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
