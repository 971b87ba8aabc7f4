"""A step from its prompts to its frames, as the engine and its lanes make it."""

import logging
import time
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from deployments.errors import EngineError, Overloaded, TalkerLost, TalkrayError
from deployments.protocol import Codes
from deployments.talker.audio.audio_streams import AudioStreams
from deployments.talker.engine.intake import Intake
from deployments.talker.engine.outgoing import Outgoing
from deployments.talker.engine.scheduler import Scheduler
from deployments.talker.networks.frame_networks import MIN_NEW_TOKENS, NOT_FINITE
from deployments.talker.runner.model_runner import ModelRunner, QueuedStep
from deployments.talker.state.sequence import Sequence

logger = logging.getLogger(__name__)

# While a step has at most this many rows, `advance` waits until a first frame is decoded, because a listener waits.
_FEW_ROWS = 8
_MAX_FAILED_PREFILLS = 3  # after this many failures in a row the engine is at fault, not the requests


@dataclass(slots=True)
class StepInFlight:
    """A step that was queued on a runner: the engine's last one, or one of a lane.

    It wraps the runner's `QueuedStep`, which has the results, and adds what the engine notes until they are handed on.
    """

    queued: QueuedStep
    runner: ModelRunner
    # The first sequences of the batch. The host gives their frames to the codec; those of the rest stay on the device.
    decoded_late: list[Sequence]
    previous: QueuedStep | None = None  # the step before it, whose `advance` is over once this one has codes
    is_collected: bool = False  # the host has its frames, and the talker reads them
    next_start_ns: int = 0  # when to start the next step: earlier fewer requests join it, later the device is idle


class StepMaker:
    """The common part of engine and lane steps: prefill sequences, queue their step, hand its frames on."""

    def __init__(
        self, scheduler: Scheduler, intake: Intake, outgoing: Outgoing, audio: AudioStreams, *, eos: int
    ) -> None:
        """`eos` in place of codebook 0 ends speech."""
        self._scheduler, self._intake, self._outgoing, self._audio = scheduler, intake, outgoing, audio
        self._eos = eos
        self._failures: list[tuple[int, TalkrayError]] = []  # since `take_failures`
        self._num_failed_prefills = 0  # in a row
        self._num_not_finite = 0  # sequences since the start

    def admit(self, sequences: list[Sequence], runner: ModelRunner) -> list[Sequence]:
        """Prefill sequences that have a row now, and open them at the decoder. Returns those that failed."""
        failed = self._prefill(sequences, runner)
        for sequence in (each for each in sequences if each not in failed):  # the device works on their prompts
            try:
                self._outgoing.open(sequence)
            except Overloaded as error:
                self._failures.append((sequence.id, error))
                failed.append(sequence)
        return failed

    def queue(self, sequences: list[Sequence], runner: ModelRunner, after: StepInFlight | None) -> StepInFlight:
        """Queue both halves of a step. `after`: the engine's step before it; a lane's step has none.

        A GPU decodes frames below MIN_NEW_TOKENS at once, because a listener waits, and speech cannot end there.
        """
        decoded_early, decoded_late = list[Sequence](), list[Sequence]()
        for sequence in sequences:
            is_early = runner.on_gpu and sequence.num_frames < MIN_NEW_TOKENS and not sequence.is_background
            (decoded_early if is_early else decoded_late).append(sequence)
        queued = runner.queue_step(decoded_late + decoded_early, partial(self._decode_early, decoded_early))
        return StepInFlight(queued, runner, decoded_late, previous=None if after is None else after.queued)

    def deliver(self, step: StepInFlight, frames: Codes) -> None:
        """Give frames [sequences, groups] of a step to the codec, as far as it lacks them, and to their sequences."""
        self._decode_late(step, frames)
        if step.previous is not None:
            self.follow_text(step.previous)
        self._append_frames(step.queued.sequences, frames)

    def follow_text(self, step: QueuedStep) -> None:
        """Find out where `advance` of `step` read in the texts: the next frames speak these places."""
        for sequence, (mass, moment) in zip(step.sequences, step.readings(), strict=False):
            if self._scheduler.holds(sequence):
                sequence.progress.read(mass, moment, sequence.prompt)

    def take_failures(self) -> tuple[tuple[int, TalkrayError], ...]:
        """Errors of sequences, by id, since the last call."""
        failures, self._failures = (*self._failures, *self._audio.take_failures()), []
        return failures

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

    def _decode_early(self, decoded_early: list[Sequence], frames: Tensor) -> None:
        """Decode frames as soon as they exist: the last ones of `frames` [rows, groups], which are on the device."""
        if decoded_early:
            self._audio.add_frames([sequence.id for sequence in decoded_early], frames[-len(decoded_early) :].clone())
            if len(frames) <= _FEW_ROWS and not decoded_early[-1].num_frames:
                self._audio.prioritise_newest_call()

    def _decode_late(self, step: StepInFlight, frames: Codes) -> None:
        """Have the codec make samples of the frames that `_decode_early` left."""
        no_frame = (NOT_FINITE, self._eos)
        rows = [row for row in range(len(step.decoded_late)) if frames[row, 0] not in no_frame]
        self._audio.add_frames([step.decoded_late[row].id for row in rows], torch.from_numpy(frames[rows]))

    def _append_frames(self, sequences: list[Sequence], frames: Codes) -> None:
        """Give each sequence its frame, or the end of speech instead of one."""
        now_s = time.monotonic()
        for sequence, frame in zip(sequences, frames, strict=True):
            if not self._scheduler.holds(sequence):
                continue  # aborted meanwhile
            if frame[0] == NOT_FINITE:
                self._failures.append((sequence.id, self._count_not_finite()))
                continue
            if frame[0] == self._eos:
                sequence.end()
            else:
                sequence.append(frame)
            if sequence.finish_reason is not None:
                self._intake.close(sequence.id)
                self._intake.measure_pace(sequence)
            self._outgoing.add(sequence, now_s)

    def _count_not_finite(self) -> TalkerLost:
        """Count a sequence whose hidden state is NaN or infinite. Returns its error: another talker may continue it.

        Raises EngineError at the second such sequence, because the weights or the device are then at fault.
        """
        self._num_not_finite += 1
        if self._num_not_finite > 1:
            raise EngineError("two sequences came to NaN or infinity: the weights or the device are broken")
        return TalkerLost("the stream came to NaN or infinity on this talker")
