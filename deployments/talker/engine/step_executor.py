"""Execution of a step, from prompts to frames, for the engine and for lanes."""

import logging
import time
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from deployments.errors import EngineError, Overloaded, TalkerLost, TalkrayError
from deployments.protocol import Codes
from deployments.talker.audio.audio_streams import AudioStreams
from deployments.talker.engine.input_processor import InputProcessor
from deployments.talker.engine.output_queue import OutputQueue
from deployments.talker.engine.scheduler import Scheduler
from deployments.talker.networks.frame_networks import MIN_NEW_TOKENS, NOT_FINITE
from deployments.talker.runner.model_runner import ModelRunner, QueuedStep
from deployments.talker.state.sequence import Sequence

logger = logging.getLogger(__name__)

# In steps with at most this many rows, `advance` waits until a first frame has been decoded, because a listener waits.
_FEW_ROWS = 8
_MAX_FAILED_PREFILLS = 3  # after this many consecutive failures, the engine is assumed to be broken


@dataclass(slots=True)
class StepInFlight:
    """A step queued on a runner, by the engine or by a lane.

    Contains the runner's `QueuedStep` with the results, and the engine's notes for delivering them.
    """

    runner_step: QueuedStep
    runner: ModelRunner
    # The batch's first sequences, whose frames the host passes to the codec. The others' frames stay on the device.
    decoded_late: list[Sequence]
    previous: QueuedStep | None = None  # the previous step, whose `advance` ends before this step has codes
    is_collected: bool = False  # whether the host has read the frames
    next_start_ns: int = 0  # earlier: fewer requests join the step; later: the device is idle


class StepExecutor:
    """Work that the engine and lanes share: prefill sequences, queue a step, and deliver its frames."""

    def __init__(
        self,
        scheduler: Scheduler,
        input_processor: InputProcessor,
        output_queue: OutputQueue,
        audio: AudioStreams,
        *,
        eos: int,
    ) -> None:
        """Create the executor. If codebook 0 is `eos`, the speech ends."""
        self._scheduler, self._audio = scheduler, audio
        self._input_processor, self._output_queue = input_processor, output_queue
        self._eos = eos
        self._failures: list[tuple[int, TalkrayError]] = []  # failures since `take_failures` was last called
        self._num_failed_prefills = 0  # consecutive failures
        self._num_not_finite = 0  # number of such sequences since startup

    def start_sequences(self, sequences: list[Sequence], runner: ModelRunner) -> list[Sequence]:
        """Prefill sequences that now have a row, and open them in the decoder. Returns the sequences that failed."""
        failed = self._prefill(sequences, runner)
        for sequence in (each for each in sequences if each not in failed):  # while their prompts run on the device
            try:
                self._output_queue.open(sequence)
            except Overloaded as error:
                self._failures.append((sequence.id, error))
                failed.append(sequence)
        return failed

    def queue(self, sequences: list[Sequence], runner: ModelRunner, after: StepInFlight | None) -> StepInFlight:
        """Queue both halves of a step. `after` is the engine's previous step; None for a lane.

        A GPU decodes frames before MIN_NEW_TOKENS immediately, as a listener is waiting and speech cannot end there.
        """
        decoded_early, decoded_late = list[Sequence](), list[Sequence]()
        for sequence in sequences:
            is_early = runner.on_gpu and sequence.num_frames < MIN_NEW_TOKENS and not sequence.is_background
            (decoded_early if is_early else decoded_late).append(sequence)
        runner_step = runner.queue_step(decoded_late + decoded_early, partial(self._decode_early, decoded_early))
        return StepInFlight(runner_step, runner, decoded_late, previous=None if after is None else after.runner_step)

    def deliver(self, step: StepInFlight, frames: Codes) -> None:
        """Pass a step's frames [sequences, groups] to their sequences, and to the codec if it does not have them."""
        self._decode_late(step, frames)
        if step.previous is not None:
            self.follow_text(step.previous)
        self._append_frames(step.runner_step.sequences, frames)

    def follow_text(self, step: QueuedStep) -> None:
        """Update the text progress, which places the next frames, with the readings from the `advance` of `step`."""
        for sequence, (mass, moment) in zip(step.sequences, step.readings(), strict=False):
            if self._scheduler.has_row(sequence):
                sequence.progress.read(mass, moment, sequence.prompt)

    def take_failures(self) -> tuple[tuple[int, TalkrayError], ...]:
        """Return sequences' errors since the last call, by id."""
        failures, self._failures = (*self._failures, *self._audio.take_failures()), []
        return failures

    def _prefill(self, sequences: list[Sequence], runner: ModelRunner) -> list[Sequence]:
        """Prefill sequences together, or one at a time if that fails. Returns the sequences that failed on their own.

        Raises errors of the device, and the last error after _MAX_FAILED_PREFILLS consecutive failures.
        """
        try:
            runner.prefill(sequences)
        except torch.AcceleratorError:
            raise  # the device has been lost
        except Exception:
            logger.exception("a prefill of %d sequences failed: retrying each sequence separately", len(sequences))
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
        """Decode frames without the host: the last rows of `frames` [rows, groups], which are on the device."""
        if decoded_early:
            self._audio.add_frames([sequence.id for sequence in decoded_early], frames[-len(decoded_early) :].clone())
            if len(frames) <= _FEW_ROWS and not decoded_early[-1].num_frames:
                self._audio.prioritise_newest_call()

    def _decode_late(self, step: StepInFlight, frames: Codes) -> None:
        """Pass the codec the frames that `_decode_early` has not decoded."""
        no_frame = (NOT_FINITE, self._eos)
        rows = [row for row in range(len(step.decoded_late)) if frames[row, 0] not in no_frame]
        self._audio.add_frames([step.decoded_late[row].id for row in rows], torch.from_numpy(frames[rows]))

    def _append_frames(self, sequences: list[Sequence], frames: Codes) -> None:
        """Append to each sequence its frame or the end of speech."""
        now_s = time.monotonic()
        for sequence, frame in zip(sequences, frames, strict=True):
            if not self._scheduler.has_row(sequence):
                continue  # it was aborted during the step
            if frame[0] == NOT_FINITE:
                self._failures.append((sequence.id, self._count_not_finite()))
                continue
            if frame[0] == self._eos:
                sequence.end()
            else:
                sequence.append(frame)
            if sequence.finish_reason is not None:
                self._input_processor.close(sequence.id)
                self._input_processor.measure_pace(sequence)
            self._output_queue.add(sequence, now_s)

    def _count_not_finite(self) -> TalkerLost:
        """Count a sequence that reached NaN or infinity, and return its error. Another talker may continue it.

        Raises EngineError for the second such sequence, because the weights or the device must then be broken.
        """
        self._num_not_finite += 1
        if self._num_not_finite > 1:
            raise EngineError("two sequences reached NaN or infinity: the weights or the device are broken")
        return TalkerLost("the stream reached NaN or infinity on this talker")
