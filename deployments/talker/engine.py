"""The talker engine: requests in, frames out, one step at a time. Knows neither processes nor Ray."""

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

from deployments.errors import EngineError, Overloaded, TalkerLost, TalkrayError
from deployments.protocol import ALL_FRAMES, Codes, FrameChunk, GenerateRequest, ModelInfo, Reading, Sampling
from deployments.talker.audio import AudioStreams
from deployments.talker.prompt import Prompt, PromptBuilder
from deployments.talker.runner import LaunchedStep, ModelRunner
from deployments.talker.scheduler import Scheduler
from deployments.talker.sequence import LengthLimits, Sequence
from deployments.talker.step import MIN_NEW_TOKENS, NOT_FINITE
from deployments.talker.tokenizer import LiveTokens

logger = logging.getLogger(__name__)

_LAUNCH_NS = 800_000  # from the host's choice of a step's sequences to the start of the step on the device
# So many frames are sent together, where the listener has more than _HOLDING_LEAD_S of audio in hand.
_MAX_HELD = 8
_HOLDING_LEAD_S = 0.41
# How often to look for audio while no step is under way.
_AUDIO_POLL_S = 0.0002
# With at most so many rows the talker's half of a step waits until a first frame is decoded, because a listener waits.
_FEW_ROWS = 8
_MAX_FAILED_PREFILLS = 3  # so many in a row are the fault of the engine, not of the requests


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step brought, by sequence id. A sequence that failed is no longer in the engine."""

    chunks: list[tuple[int, FrameChunk]] = field(default_factory=list)
    failures: list[tuple[int, TalkrayError]] = field(default_factory=list)


@dataclass(slots=True)
class LiveRequest:
    """A request whose text the client is still writing."""

    request: GenerateRequest
    tokens: LiveTokens
    body: list[int] = field(default_factory=list)  # token ids so far
    sequence: Sequence | None = None  # once there is text enough


class Engine:
    """Continuous batching over one checkpoint on one device. `loading.build_engine` puts one together."""

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
        self._ended: list[tuple[int, FrameChunk]] = []  # last chunks of requests that had all their frames already
        self._endings: dict[int, FrameChunk] = {}  # last chunks that wait for their stream's audio
        self._live: dict[int, LiveRequest] = {}
        self._launched: LaunchedStep | None = None
        self.last_step: LaunchedStep | None = None
        self._attending: list[Sequence] = []  # the sequences of the last step, until its attention is read
        self._num_decoded_first = 0  # sequences at the batch's end whose frames went to the decoder early
        self._num_failed_prefills = 0  # in a row
        self._num_not_finite = 0  # sequences since the start
        self._no_codes = np.zeros((0, self.model.num_code_groups), dtype=np.int16)
        self._max_held = 1 if runner.device.type == "cpu" else _MAX_HELD
        self._due_ns = 0  # a step that is launched later leaves the device idle
        self.waited_ns = 0  # the host's waiting time for codes since the start

    @property
    def is_idle(self) -> bool:
        """Whether a step would do nothing."""
        waiting = self._ended or self._launched is not None or self._endings or self._has_deferred
        return self.scheduler.is_idle and not waiting and self.audio.is_idle

    @property
    def _has_deferred(self) -> bool:
        """Whether a sequence of the last step goes on, so that the talker's half of the step is needed."""
        return any(self.scheduler.running.get(sequence.id) is sequence for sequence in self._attending)

    @property
    def patience_s(self) -> float:
        """For how long the host may wait for new requests before the device is idle."""
        if self._launched is not None:
            return 0.0
        return min(max(0.0, (self._due_ns - time.perf_counter_ns()) / 1e9), _AUDIO_POLL_S)

    def add(self, sequence_id: int, request: GenerateRequest) -> None:
        """Queue a request. Raises InvalidRequest where it can never run, Overloaded where the waiting line is full.

        A request of which the client has a part is never refused as Overloaded.
        """
        if not request.synthesis.is_underway:
            self.scheduler.check_room()
        request = self.prompts.with_codes(request)
        if request.synthesis.live is None:
            self._begin(sequence_id, request, self.prompts.build(request))
        else:
            self._live[sequence_id] = LiveRequest(request, LiveTokens(self.prompts.tokenizer))

    def append(self, sequence_id: int, text: str, *, is_last: bool) -> None:
        """Add to a live request's text. Raises as `add` does. A request that has ended meanwhile is no error.

        A sequence begins once there is text enough for its prompt. Each later frame needs one more token.
        """
        live = self._live.get(sequence_id)
        if live is None:
            return
        live.body += (more := live.tokens.feed(text, is_last=is_last))
        if is_last:
            del self._live[sequence_id]
        if live.sequence is not None:
            self._extend(live.sequence, more, is_last=is_last)
        elif is_last or len(live.body) >= self.prompts.least_tokens(live.request):
            prompt = self.prompts.begin(live.request, live.body, has_all_text=is_last)
            live.sequence = self._begin(sequence_id, live.request, prompt, live.tokens)

    def abort(self, sequence_id: int) -> None:
        """Stop a sequence and free what it holds. A sequence that has ended meanwhile is no error."""
        self._live.pop(sequence_id, None)
        self.scheduler.abort(sequence_id)
        self._endings.pop(sequence_id, None)
        self.audio.close(sequence_id)

    def forget(self, voices: tuple[bytes, ...]) -> int:
        """Drop what is kept of these stored voices. Returns how many results were kept."""
        prompts = self.prompts
        return prompts.speakers.forget(voices) + prompts.references.forget(voices) + self.audio.forget(voices)

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> StepOutput:
        """Admit the sequences that fit, make one frame for each running sequence, and return the frames, audio and
        failures.

        On a GPU a call may return without frames: where audio is ready before them, or where new requests still have
        time to join the next step. `meanwhile` is called repeatedly while the device works, and may add and abort.
        Raises where the engine itself is at fault.
        """
        output = StepOutput(self._ended)
        self._ended = []
        self._finish_step()
        self._launch(output)
        self._collect(output, meanwhile)
        output = replace(output, chunks=self._with_audio(output.chunks))
        output.failures.extend(self.audio.take_failures())
        for sequence_id, _ in output.failures:
            self.abort(sequence_id)
        return output

    def check_integrity(self) -> None:
        """Assert that rows, blocks and decoder slots are each held exactly once."""
        self.scheduler.check_integrity()
        self.audio.check_integrity()

    def _begin(
        self, sequence_id: int, request: GenerateRequest, prompt: Prompt, tokens: LiveTokens | None = None
    ) -> Sequence:
        """Queue a sequence. `tokens`: of a live request."""
        starts: list[int] = []
        if request.synthesis.word_times and self.model.text.alignment_head is not None:
            text = request.synthesis.text.lstrip()
            places = self.prompts.tokenizer.encode_places(text)[1]
            starts = [*places, len(text)] if tokens is None else tokens.starts
        sampling = complete(request.synthesis.sampling, self.model.generation)
        limit = self.limits.frame_limit(request, sampling, prompt)
        prefix = [] if request.prefix is None else list(request.prefix)
        sequence = Sequence(
            sequence_id, request, prompt, sampling, limit, prefix, token_starts=starts, frame_s=self.info.frame_s
        )
        sequence.clone_prompt = self.prompts.clone_prompt(request)
        if sequence.num_frames >= limit.frames:
            self._open_audio(sequence)  # the client may not have all audio of its frames
            self._ended.append((sequence_id, FrameChunk(self._no_codes, sequence.num_text_tokens, limit.reason)))
        else:
            self.scheduler.add(sequence)
        return sequence

    def _extend(self, sequence: Sequence, more: list[int], *, is_last: bool) -> None:
        start = len(sequence.prompt.trailing)
        sequence.prompt = self.prompts.extend(sequence.prompt, more, has_all_text=is_last)
        if len(sequence.prompt.trailing) > start:
            self.runner.extend_text(sequence, start)
        sequence.limit = self.limits.frame_limit(sequence.request, sequence.sampling, sequence.prompt)

    def _finish_step(self) -> None:
        """Do the talker's half of the last step, which a CPU may still have to do, and read its attention."""
        goes_on = self._has_deferred
        sequences, self._attending = self._attending, []
        if not goes_on:
            self.runner.drop_deferred()
            return
        self.runner.run_deferred()
        alignment = self.runner.read_alignment()
        if alignment is not None:
            for sequence, weights in zip(sequences, alignment, strict=False):
                sequence.attend(weights)

    def _launch(self, output: StepOutput) -> None:
        """Start the next step, unless one runs or the device has work enough for now."""
        if self._launched is not None or time.perf_counter_ns() < self._due_ns:
            return
        batch = self.scheduler.schedule()
        if batch is None:
            return
        failed = self._prefill(batch.prefill, output)
        for sequence in batch.prefill:  # while the device works on their prompts
            if sequence not in failed and not self._opens(sequence, output):
                failed.append(sequence)
        decode = [sequence for sequence in batch.decode if sequence not in failed] if failed else batch.decode
        self._num_decoded_first = 0
        self._launched = self.runner.launch(decode, partial(self._decode_first_frames, decode)) if decode else None

    def _prefill(self, sequences: list[Sequence], output: StepOutput) -> list[Sequence]:
        """Prefill sequences together, or one by one where that raises. Returns the sequences that failed alone too.

        Raises the device's errors, and the last error after _MAX_FAILED_PREFILLS in a row.
        """
        try:
            self.runner.prefill(sequences)
        except torch.AcceleratorError:
            raise  # the device is lost
        except Exception:
            logger.exception("a prefill of %d sequences failed: each is tried by itself", len(sequences))
            return [sequence for sequence in sequences if not self._prefill_alone(sequence, output)]
        self._num_failed_prefills = 0 if sequences else self._num_failed_prefills
        return []

    def _prefill_alone(self, sequence: Sequence, output: StepOutput) -> bool:
        try:
            self.runner.prefill([sequence])
        except Exception as error:
            self._num_failed_prefills += 1
            if self._num_failed_prefills >= _MAX_FAILED_PREFILLS or isinstance(error, torch.AcceleratorError):
                raise
            output.failures.append((sequence.id, EngineError(f"the engine failed on this request: {error!r}")))
            return False
        self._num_failed_prefills = 0
        return True

    def _opens(self, sequence: Sequence, output: StepOutput) -> bool:
        """Whether the decoder takes the sequence. If not, the sequence has failed."""
        try:
            self._open_audio(sequence)
        except Overloaded as error:
            output.failures.append((sequence.id, error))
            return False
        return True

    def _open_audio(self, sequence: Sequence) -> None:
        """Open the sequence at the decoder, unless it was open before a preemption. Raises Overloaded."""
        request, resume = sequence.request, sequence.request.synthesis.resume
        if not sequence.is_open:
            delivered = None if resume is None else resume.samples // self.info.frame_samples
            self.audio.open(
                sequence.id,
                request.prefix,
                delivered_frames=delivered,
                frames=request.gpu_frames,
                recording=request.reference_codes,
                key=b"" if request.synthesis.reference is None else request.synthesis.reference.key,
            )
            sequence.is_open = True

    def _decode_first_frames(self, sequences: list[Sequence], frames: Tensor) -> None:
        """Decode first frames as soon as they exist: they are never the end of speech. `frames` are on the device."""
        if not frames.is_cuda:
            return
        starting = list(takewhile(lambda sequence: sequence.num_frames < MIN_NEW_TOKENS, reversed(sequences)))
        if starting:
            self._num_decoded_first = len(starting)
            self.audio.add_frames([sequence.id for sequence in reversed(starting)], frames[-len(starting) :].clone())
            if len(sequences) <= _FEW_ROWS and not starting[0].num_frames:
                self.audio.prioritise_last_call()

    def _collect(self, output: StepOutput, meanwhile: Callable[[], None]) -> None:
        """Wait for the frames of the running step and take them. Return earlier where audio is ready."""
        launched, start = self._launched, time.perf_counter_ns()
        if launched is None:
            return
        while not launched.has_codes:
            if self.audio.has_audio:
                return
            meanwhile()
        frames = launched.result()
        now_ns = time.perf_counter_ns()
        self.waited_ns += now_ns - start
        if self.last_step is not None:
            self._due_ns = now_ns + self.last_step.talker_ns() - _LAUNCH_NS
        self._launched, self.last_step = None, launched
        self._decode_other_frames(launched.sequences, frames)
        self._append(launched.sequences, frames, output)
        self.scheduler.retire(launched.sequences)

    def _decode_other_frames(self, sequences: list[Sequence], frames: Codes) -> None:
        """Decode the frames that `_decode_first_frames` left."""
        others = range(len(frames) - self._num_decoded_first)
        rows = [row for row in others if frames[row, 0] not in (NOT_FINITE, self.model.codes.eos)]
        self.audio.add_frames([sequences[row].id for row in rows], torch.from_numpy(frames[rows]))

    def _append(self, sequences: list[Sequence], frames: Codes, output: StepOutput) -> None:
        """Give each sequence its frame, or the end of speech that stands in place of one."""
        now_s, self._attending = time.monotonic(), sequences
        for sequence, frame in zip(sequences, frames, strict=True):
            if self.scheduler.running.get(sequence.id) is not sequence:
                continue  # aborted meanwhile
            if frame[0] == NOT_FINITE:
                output.failures.append((sequence.id, self._not_finite()))
                continue
            if frame[0] == self.model.codes.eos:
                sequence.end()
            else:
                sequence.append(frame)
            if sequence.finish_reason is not None:
                self._live.pop(sequence.id, None)
            if not self._can_wait(sequence, now_s):
                output.chunks.append((sequence.id, self._unsent(sequence)))

    def _not_finite(self) -> TalkerLost:
        """The error of a sequence whose state is no number. Another talker may go on with it.

        Raises at the second such sequence, because the weights or the device are then at fault.
        """
        self._num_not_finite += 1
        if self._num_not_finite > 1:
            raise EngineError("two sequences came to NaN or infinity: the weights or the device are broken")
        return TalkerLost("the stream came to NaN or infinity on this talker")

    def _can_wait(self, sequence: Sequence, now_s: float) -> bool:
        """Whether the frames may wait for more, because each message costs time in every later stage."""
        if sequence.request.gpu_frames >= ALL_FRAMES:
            return sequence.finish_reason is None  # their audio will carry them
        held = sequence.num_frames - sequence.num_sent
        has_slack = sequence.sent_lead_s(now_s) > _HOLDING_LEAD_S
        goes_on = sequence.finish_reason is None and not sequence.awaits_text
        return goes_on and held < self._max_held and has_slack

    def _unsent(self, sequence: Sequence, pcm: bytes = b"") -> FrameChunk:
        """All of a sequence that was not sent yet."""
        first, frames = sequence.num_sent, sequence.frames[sequence.num_sent :]
        readings = (Reading(first, tuple(sequence.readings)),) if sequence.readings else ()
        clone, sequence.clone_prompt = sequence.clone_prompt, None
        sequence.num_sent, sequence.readings = sequence.num_frames, []
        codes = np.stack(frames) if frames else self._no_codes
        return FrameChunk(
            codes, sequence.num_text_tokens, sequence.finish_reason, pcm, readings=readings, clone_prompt=clone
        )

    def _with_audio(self, chunks: list[tuple[int, FrameChunk]]) -> list[tuple[int, FrameChunk]]:
        """`chunks` with the audio that is ready. A last chunk waits until its stream's audio is complete."""
        sent = []
        for sequence_id, chunk in chunks:
            if chunk.finish_reason is None or not self.audio.finish(sequence_id):
                sent.append((sequence_id, chunk))
                continue
            self._endings[sequence_id] = replace(chunk, codes=self._no_codes)
            if len(chunk.codes):
                sent.append((sequence_id, replace(chunk, finish_reason=None)))
        sent += [(sequence_id, self._audio_chunk(sequence_id, pcm)) for sequence_id, pcm in self.audio.take()]
        over = [sequence_id for sequence_id in self._endings if not self.audio.is_pending(sequence_id)]
        return sent + [(sequence_id, self._endings.pop(sequence_id)) for sequence_id in over]

    def _audio_chunk(self, sequence_id: int, pcm: bytes) -> FrameChunk:
        """Audio with the codes that were not sent yet, because audio never comes before its codes."""
        sequence = self.scheduler.find(sequence_id)
        return FrameChunk(self._no_codes, 0, None, pcm) if sequence is None else self._unsent(sequence, pcm)


def complete(asked: Sampling, defaults: Sampling) -> Sampling:
    """`asked`, with `defaults` in place of None."""
    return replace(defaults, **{key: value for key, value in asdict(asked).items() if value is not None})
