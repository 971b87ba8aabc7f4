"""The talker engine: requests in, frames out, one step at a time. Knows neither processes nor Ray."""

import importlib.util
import logging
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deployments.checkpoint import load_strict, without_values
from deployments.codec.config import SpeechTokenizerConfig
from deployments.codec.slots import load_slots
from deployments.config import TalkerConfig
from deployments.errors import EngineError, InvalidRequest, Overloaded
from deployments.protocol import (
    ALL_FRAMES,
    Codes,
    FinishReason,
    FrameChunk,
    GenerateRequest,
    ModelInfo,
    Reference,
    Sampling,
    SynthesisRequest,
)
from deployments.talker.block_manager import BlockManager
from deployments.talker.bootstrap import Bootstrap
from deployments.talker.compile_ahead import Prepare, compiling_ahead, prepare_nothing
from deployments.talker.frame_step import MIN_NEW_TOKENS, SPOILT
from deployments.talker.input_tables import InputTables
from deployments.talker.kv_cache import KVCache
from deployments.talker.memory import CPU_CACHE_BYTES, DEFAULT_FRACTION, GpuMemory, Wanted
from deployments.talker.model.config import ModelConfig
from deployments.talker.model.speaker_encoder import SpeakerEncoder
from deployments.talker.model.talker import Talker
from deployments.talker.model_runner import Flight, ModelRunner, NetworkKind, RunnerShape
from deployments.talker.prompt import Prompt, PromptBuilder
from deployments.talker.scheduler import Batch, Scheduler
from deployments.talker.sequence import FrameLimit, Sequence
from deployments.talker.start_clock import StartClock
from deployments.talker.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)

# What the host needs from the decision who takes part in a step to the device's start of it.
_LAUNCH_NS = 800_000
# Frames that are sent together, once what a listener has lasts so much longer.
_MAX_HELD = 8
_CALM_S = 0.4
# How often to look for audio while no step is under way.
_AUDIO_POLL_S = 0.0002
# Prefills in a row that raised: then it is not the requests.
_MAX_FAILED_PREFILLS = 3


@dataclass(frozen=True, slots=True)
class Output:
    """New frames of one sequence."""

    sequence_id: int
    chunk: FrameChunk


class Engine:
    """Continuous batching over one checkpoint on one device."""

    def __init__(
        self,
        directory: Path,
        config: TalkerConfig,
        *,
        clock: StartClock | None = None,
        prepare: Prepare = prepare_nothing,
    ) -> None:
        """See `load_engine`, which also makes it ready."""
        torch.set_num_threads(config.threads)
        self.clock = clock = clock or StartClock()
        self.config, self.directory = config, directory
        self.model = ModelConfig.load(directory)
        device = _device(config)
        dtype = _dtype(config, device)
        memory = GpuMemory(device) if device.type == "cuda" else None
        with clock.phase("loading the talker"):
            talker = load_talker(directory, self.model, dtype=dtype, device=device)
            talker.prepare(max_positions=config.max_model_len)
        with clock.phase("projecting text"):
            tables = InputTables(talker)
        speaker_encoder = load_speaker_encoder(directory, self.model, device=device)
        with clock.phase("loading the tokenizer"):
            tokenizer = TextTokenizer(directory, self.model.tokens)
        self.prompts = PromptBuilder(tables, tokenizer, speaker_encoder)
        self._bootstrap = None
        if device.type == "cuda":
            with clock.phase("loading and recording the codec"):
                self._bootstrap = self._load_bootstrap(device, prepare)
            torch.cuda.empty_cache()  # what loading needed for a moment
        size = config.kv_block_size or _block_size(device, config.attention)
        number = self._num_blocks(dtype, size, memory)
        blocks = BlockManager(number, size)
        cache = KVCache(self.model.talker, num_blocks=number, block_size=size, dtype=dtype, device=device)
        networks = _networks(config, device, dtype)
        shape = RunnerShape(config.max_num_seqs, config.max_model_len, config.deterministic, networks, config.attention)
        with clock.phase("packing weights"):
            self.runner = ModelRunner(tables, cache, blocks, shape)
        prepare(self.runner.rehearse)
        self.scheduler = Scheduler(
            blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_waiting=config.max_num_waiting,
            max_lead_s=config.max_lead_s if device.type == "cuda" else math.inf,  # a CPU pads every step
        )
        self._finished: list[Output] = []
        self._flight: Flight | None = None
        self._last_flight: Flight | None = None
        self._batch: Batch | None = None
        self._num_pushed = 0  # sequences at the batch's end whose frames are being decoded already
        self._spoilt: list[int] = []
        self._failed: list[tuple[int, EngineError | Overloaded]] = []
        self._num_failed_prefills = 0  # in a row
        self._no_codes = np.zeros((0, self.model.num_code_groups), dtype=np.int16)
        self._max_held = 1 if device.type == "cpu" else _MAX_HELD
        self._due_ns = 0  # when the next step has to be launched so that the device does not wait
        self.waited_ns = 0  # how long the host has waited for codes
        self._endings: dict[int, Output] = {}  # last chunks that wait for audio of theirs

    def describe(self, name: str) -> ModelInfo:
        """What the ingress needs to know to check requests; `name` is what the model was asked for as."""
        codec = SpeechTokenizerConfig.load(self.directory / "speech_tokenizer")
        return ModelInfo(
            name=name,
            kind=self.model.kind,
            voices=tuple(self.model.speakers),
            languages=tuple(language for language in self.model.languages if not language.endswith("_dialect")),
            supports_instructions=not self.model.drops_instructions,
            sample_rate=codec.sample_rate,
            frame_samples=codec.frame_samples,
            num_code_groups=self.model.num_code_groups,
            max_text_tokens=self.config.max_model_len,
            talker_on_gpu=self.runner.device.type == "cuda",
            spoken_form=self.model.text.spoken_form,
            max_segment_chars=self.model.text.max_segment_chars,
        )

    def warm_up(self) -> None:
        """Capture graphs and run one short utterance, so that the first request meets warm code paths.

        Raises EngineError where even that fails: such an engine must not take requests.
        """
        on_gpu = self.runner.device.type == "cuda"
        if on_gpu:
            with self.clock.phase("recording GPU work"):
                self.runner.capture(self.clock.report)
        with self.clock.phase("speaking a warm-up"):
            self._speak()
        if on_gpu:
            torch.cuda.empty_cache()  # what running once before each recording needed

    def _speak(self) -> None:
        """A short utterance in each way that there is: with audio on a GPU, with a cloned voice where it can."""
        voice = next(iter(self.model.speakers), None)
        options = Sampling(max_new_tokens=3)
        request = SynthesisRequest("warm-up", "Hello.", voice=voice, sampling=options, ignore_eos=True)
        if self.prompts.speaker_encoder is not None:
            num_samples = self.prompts.speaker_encoder.shape.sample_rate
            hiss = np.random.default_rng(0).normal(0, 0.01, num_samples).astype(np.float32)
            request = replace(request, reference=Reference(hiss, x_vector_only=True))
        self.add(-1, GenerateRequest(request, gpu_frames=0 if self._bootstrap is None else 2))
        while not self.is_idle:
            self.step()
            for _, error in self.take_failed():
                raise error
            if self.take_spoilt():
                raise EngineError("the first frames come to NaN or infinity: the weights or the device are broken")
        self.prompts.speakers.take_lookups()

    @property
    def is_idle(self) -> bool:
        """Whether a step would do nothing."""
        waiting = self._finished or self._flight is not None or self._endings
        return self.scheduler.is_idle and not waiting and (self._bootstrap is None or self._bootstrap.is_idle)

    def add(self, sequence_id: int, request: GenerateRequest) -> None:
        """Queue a request; raises InvalidRequest when it can never run, Overloaded when the line is full.

        A request that a listener hears already is never Overloaded.
        """
        if not request.is_heard:
            self.scheduler.check_room()
        prompt = self.prompts.build(request)
        sampling = complete(request.synthesis.sampling, self.model.generation)
        limit = self._frame_limit(request, sampling, prompt.num_rows, prompt.num_text_tokens)
        self._check_following(request.synthesis.following, prompt)
        prefix = [] if request.prefix is None else list(request.prefix)
        sequence = Sequence(sequence_id, request, prompt, sampling, limit, prefix)
        if sequence.num_frames >= limit.frames:
            self._open_bootstrap(sequence)  # its last audio may be missing still
            self._finished.append(Output(sequence_id, self._chunk(sequence, [], limit.reason)))
        else:
            self.scheduler.add(sequence)

    def abort(self, sequence_id: int) -> None:
        """Stop a sequence and free what it holds. One that has ended meanwhile is no error."""
        self.scheduler.abort(sequence_id)
        self._endings.pop(sequence_id, None)
        if self._bootstrap is not None:
            self._bootstrap.close(sequence_id)

    @property
    def patience_s(self) -> float:
        """How long new requests can still be taken in before the device runs out of work."""
        if self._flight is not None:
            return 0.0
        spare_s = max(0.0, (self._due_ns - time.perf_counter_ns()) / 1e9)
        return min(spare_s, _AUDIO_POLL_S) if self._bootstrap is not None else spare_s

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> list[Output]:
        """Admit what fits, make one frame for each running sequence, and return new frames and audio.

        On a GPU a call may return without frames: where audio is ready earlier, or where the previous step leaves so
        much time that who comes meanwhile can still join the next. While the device works `meanwhile` is called, again
        and again; it may add and abort.
        """
        finished, self._finished = self._finished, []
        if self._flight is None and time.perf_counter_ns() >= self._due_ns:
            self._launch()
        return self._with_audio(finished + self._land(meanwhile))

    def take_spoilt(self) -> list[int]:
        """Running sequences whose state has become NaN or infinite: what they would sample is noise."""
        spoilt, self._spoilt = self._spoilt, []
        return spoilt

    def take_failed(self) -> list[tuple[int, EngineError | Overloaded]]:
        """Requests that tripped the engine while it took them in, or found no decoder slot; the others go on."""
        failed, self._failed = self._failed, []
        return failed

    def _launch(self) -> None:
        batch = self.scheduler.schedule()
        if batch is None:
            return
        failed = self._prefill(batch.prefill)
        for sequence in batch.prefill:  # while the device works on their prompts
            if sequence not in failed and not self._opens(sequence):
                failed.append(sequence)
        if failed:
            decode = [sequence for sequence in batch.decode if sequence not in failed]
            batch = Batch([sequence for sequence in batch.prefill if sequence not in failed], decode)
        self._batch, self._num_pushed = batch, 0
        self._flight = self.runner.launch(batch.decode, self._push_young) if batch.decode else None

    def _prefill(self, sequences: list[Sequence]) -> list[Sequence]:
        """Take sequences in; those that raise by themselves too are returned, and have left.

        Raises what the device raised, and what the last of several in a row did.
        """
        try:
            self.runner.prefill(sequences)
        except torch.AcceleratorError:
            raise  # nothing runs on this device any more
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
            self._give_up(sequence, EngineError(f"the engine failed on this request: {error!r}"))
            return False
        self._num_failed_prefills = 0
        return True

    def _push_young(self, frames: Tensor) -> None:
        """Decode first frames, which never are the end of speech, as soon as they exist. `frames` are on the device."""
        if self._bootstrap is None or self._batch is None:
            return
        young = list(takewhile(lambda sequence: sequence.num_frames < MIN_NEW_TOKENS, reversed(self._batch.decode)))
        if young and frames.is_cuda:
            self._num_pushed = len(young)
            self._bootstrap.push([sequence.id for sequence in reversed(young)], frames[-len(young) :].clone())

    def _land(self, meanwhile: Callable[[], None]) -> list[Output]:
        """The frames of the step under way, once they are there; nothing where audio is ready before."""
        flight, batch, start = self._flight, self._batch, time.perf_counter_ns()
        if flight is None or batch is None:
            return []
        while not flight.has_codes:
            if self._bootstrap is not None and self._bootstrap.has_audio:
                return []
            meanwhile()
        frames = flight.land()
        now_ns = time.perf_counter_ns()
        self.waited_ns += now_ns - start
        if self._last_flight is not None:
            self._due_ns = now_ns + self._last_flight.talker_ns() - _LAUNCH_NS
        self._flight, self._last_flight = None, flight
        self._push_others(batch, frames)
        now_s = time.monotonic()
        outputs = [self._append(sequence, frame, now_s) for sequence, frame in zip(batch.decode, frames, strict=True)]
        self.scheduler.retire(batch)
        return [output for output in outputs if output is not None]

    def _push_others(self, batch: Batch, frames: Codes) -> None:
        if self._bootstrap is None:
            return
        others = range(len(frames) - self._num_pushed)
        rows = [row for row in others if frames[row, 0] not in (SPOILT, self.model.codes.eos)]
        self._bootstrap.push([batch.decode[row].id for row in rows], torch.from_numpy(frames[rows]))

    def _append(self, sequence: Sequence, frame: Codes, now_s: float) -> Output | None:
        """What there is to say of a frame, or of the end of speech in place of one."""
        if self.scheduler.running.get(sequence.id) is not sequence:
            return None
        if frame[0] == SPOILT:
            self._spoilt.append(sequence.id)
            return None
        if frame[0] == self.model.codes.eos:
            sequence.finish_reason = FinishReason.STOP
        else:
            sequence.append(frame)
        return None if self._can_wait(sequence, now_s) else Output(sequence.id, self._unsent(sequence))

    def _can_wait(self, sequence: Sequence, now_s: float) -> bool:
        """Whether more frames may be sent with these: every message costs each stage behind the engine its time."""
        if sequence.request.gpu_frames >= ALL_FRAMES:
            return sequence.finish_reason is None  # their audio will carry them
        held = sequence.num_frames - sequence.num_sent
        is_calm = sequence.playback.lead_s(now_s, sequence.num_sent) > _CALM_S
        return sequence.finish_reason is None and held < self._max_held and is_calm

    def _unsent(self, sequence: Sequence, pcm: bytes = b"") -> FrameChunk:
        """All that a sequence's reader does not have yet."""
        frames, sequence.num_sent = sequence.frames[sequence.num_sent :], sequence.num_frames
        return replace(self._chunk(sequence, frames, sequence.finish_reason), pcm=pcm)

    def _load_bootstrap(self, device: torch.device, prepare: Prepare = prepare_nothing) -> Bootstrap:
        """The decoder of first frames, which shares the talker's device."""
        directory = self.directory / "speech_tokenizer"
        # A stream that has ended in the talker may still hold its slot while another one has taken its row.
        slots = load_slots(directory, num_slots=2 * self.config.max_num_seqs, device=device, prepare=prepare)
        codec = SpeechTokenizerConfig.load(directory)
        return Bootstrap(slots, frame_s=codec.frame_samples / codec.sample_rate)

    def _opens(self, sequence: Sequence) -> bool:
        """Whether audio can be made of what the sequence will bring; if not, it has left."""
        try:
            self._open_bootstrap(sequence)
        except Overloaded as error:
            self._give_up(sequence, error)
            return False
        return True

    def _give_up(self, sequence: Sequence, error: EngineError | Overloaded) -> None:
        """End one request with an error of its own."""
        self.abort(sequence.id)
        self._failed.append((sequence.id, error))

    def _open_bootstrap(self, sequence: Sequence) -> None:
        """Get ready to decode; a sequence that was preempted is open already. Raises Overloaded."""
        request = sequence.request
        if request.gpu_frames > 0 and self._bootstrap is None:  # a talker on a CPU is asked for audio in trials only
            self._bootstrap = self._load_bootstrap(self.runner.device)
        if self._bootstrap is not None and not sequence.is_open:
            self._bootstrap.open(sequence.id, request.prefix, heard=request.heard, frames=request.gpu_frames)
            sequence.is_open = True

    def _with_audio(self, outputs: list[Output]) -> list[Output]:
        """`outputs` and the audio that is ready; a last chunk waits until its stream's audio is complete."""
        bootstrap = self._bootstrap
        if bootstrap is None:
            return outputs
        sent = []
        for output in outputs:
            chunk = output.chunk
            if chunk.finish_reason is not None:
                bootstrap.finish(output.sequence_id)
                ending = replace(chunk, codes=self._no_codes)
                self._endings[output.sequence_id] = Output(output.sequence_id, ending)
            if len(chunk.codes):
                sent.append(Output(output.sequence_id, replace(chunk, finish_reason=None)))
        sent += [Output(number, self._audio(number, pcm)) for number, pcm in bootstrap.take()]
        over = [number for number in self._endings if not bootstrap.is_pending(number)]
        return sent + [self._endings.pop(number) for number in over]

    def _audio(self, number: int, pcm: bytes) -> FrameChunk:
        """Audio with the codes that were still to be sent: it never comes before them, also where a sequence waits
        because it was preempted.
        """
        sequence = self.scheduler.find(number)
        return FrameChunk(self._no_codes, 0, None, pcm) if sequence is None else self._unsent(sequence, pcm)

    def _chunk(self, sequence: Sequence, frames: list[np.ndarray], reason: FinishReason | None) -> FrameChunk:
        codes = np.stack(frames) if frames else self._no_codes
        return FrameChunk(codes, sequence.num_text_tokens, reason)

    def _frame_limit(
        self, request: GenerateRequest, sampling: Sampling, num_rows: int, num_text_tokens: int
    ) -> FrameLimit:
        """The first limit a sequence will meet.

        The last of `max_new_tokens` never becomes a frame, as in the official package.
        """
        room = self._max_positions - num_rows
        if room < 1:
            raise self._too_long(num_rows)
        length = FrameLimit(min((sampling.max_new_tokens or 1) - 1, room), FinishReason.LENGTH)
        expected = num_text_tokens * self.config.runaway_frames_per_token
        runaway = FrameLimit(max(expected, self.config.runaway_min_frames), FinishReason.RUNAWAY)
        if request.synthesis.ignore_eos or length.frames <= runaway.frames:
            return length
        return runaway

    @property
    def _max_positions(self) -> int:
        return min(self.config.max_model_len, self.scheduler.blocks.capacity)

    def _too_long(self, num_rows: int) -> InvalidRequest:
        return InvalidRequest(
            f"input and reference make {num_rows} positions, at most {self._max_positions - 1} fit: shorten them",
            "input",
            "context_length_exceeded",
        )

    def _check_following(self, texts: tuple[str, ...], prompt: Prompt) -> None:
        """Raise InvalidRequest where a later segment of the same request would not fit: now it is not heard yet."""
        num_others = prompt.num_rows - prompt.num_text_tokens
        for text in texts:
            most = 2 * len(text.encode("utf-8", "replace"))  # tokens are bytes at least, of the text's normal form
            num_rows = num_others + (most if num_others + most < self._max_positions else self._count(text))
            if num_rows >= self._max_positions:
                raise self._too_long(num_rows)

    def _count(self, text: str) -> int:
        return len(self.prompts.tokenizer.encode(text))

    def _num_blocks(self, dtype: torch.dtype, block_size: int, memory: GpuMemory | None) -> int:
        """As many KV blocks as the memory set aside holds, never more than all rows at full length could use."""
        config = self.config
        block_bytes = KVCache.bytes_per_position(self.model.talker, dtype) * block_size
        longest = -(-config.max_model_len // block_size)
        useful = config.max_num_seqs * longest + 1
        if config.kv_cache_bytes is not None:
            cache_bytes = config.kv_cache_bytes
        elif memory is None:
            cache_bytes = CPU_CACHE_BYTES
        else:
            fraction = config.gpu_memory_fraction or DEFAULT_FRACTION
            cache_bytes = memory.kv_bytes(Wanted(fraction, (longest + 1) * block_bytes, useful * block_bytes))
        return max(2, min(cache_bytes // block_bytes, useful))


def load_engine(directory: Path, config: TalkerConfig, report: Callable[[str], None]) -> Engine:
    """An engine that is ready: loaded, compiled, recorded, warmed up. `report` hears what the start is busy with."""
    clock = StartClock(report)
    with clock.phase("starting the device"):
        device = _device(config)
        torch.zeros(1, device=device)
        fused = _networks(config, device, _dtype(config, device)) == "fused"
    compiling = compiling_ahead(clock, _facts(directory, config)) if fused else nullcontext(prepare_nothing)
    with compiling as prepare:
        engine = Engine(directory, config, clock=clock, prepare=prepare)
    engine.warm_up()
    return engine


def _facts(directory: Path, config: TalkerConfig) -> str:
    """What decides which kernels there are."""
    files = [directory / "config.json", directory / "speech_tokenizer" / "config.json"]
    versions = [torch.__version__, torch.cuda.get_device_name(), config.model_dump_json()]
    return "\n".join([*versions, *(file.read_text(encoding="utf-8") for file in files)])


def complete(asked: Sampling, defaults: Sampling) -> Sampling:
    """`asked` with the checkpoint's defaults where it says nothing."""
    return replace(defaults, **{key: value for key, value in asdict(asked).items() if value is not None})


def load_talker(directory: Path, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> Talker:
    """The talker with its code predictor; raises CheckpointError for a missing, unexpected or mis-shaped tensor."""
    with without_values():
        talker = Talker(config)
    load_strict(talker, directory, prefix="talker.", dtype=dtype, device=device)
    return talker.eval()


def load_speaker_encoder(directory: Path, config: ModelConfig, *, device: torch.device) -> SpeakerEncoder | None:
    """The x-vector network of a base checkpoint, in float32; None for other kinds."""
    if config.speaker_encoder is None:
        return None
    with without_values():
        encoder = SpeakerEncoder(config.speaker_encoder)
    load_strict(encoder, directory, prefix="speaker_encoder.", dtype=torch.float32, device=device)
    return encoder.eval()


def _block_size(device: torch.device, attention: str) -> int:
    if device.type == "cpu":
        return 16
    return 256 if attention == "flash_attn" else 64


def _networks(config: TalkerConfig, device: torch.device, dtype: torch.dtype) -> NetworkKind:
    """Fused kernels where Triton is and tensor cores take the type, else plain PyTorch."""
    if device.type == "cpu":
        return "by_rows"
    fits = dtype.itemsize == 2 and importlib.util.find_spec("triton") is not None
    return "fused" if config.kernels == "auto" and fits else "plain"


def _device(config: TalkerConfig) -> torch.device:
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def _dtype(config: TalkerConfig, device: torch.device) -> torch.dtype:
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype
