"""Construction of an engine: load weights, compile kernels, size the KV cache, capture CUDA graphs, and warm up."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

import numpy as np
import torch

from deployments.codec.backends.registry import choose_decoders
from deployments.codec.codec_config import SpeechTokenizerConfig
from deployments.codec.slots import Precompile
from deployments.config import TalkerConfig
from deployments.errors import EngineError
from deployments.protocol import Reference, Sampling, SynthesisRequest
from deployments.talker.audio.audio_streams import AudioStreams
from deployments.talker.engine.device import EngineDevice, cache_bounds
from deployments.talker.engine.engine import Engine
from deployments.talker.engine.input_processor import LengthLimits
from deployments.talker.engine.scheduler import Scheduler
from deployments.talker.model.input_tables import InputTables
from deployments.talker.model.model_config import ModelConfig
from deployments.talker.model.talker import Talker
from deployments.talker.networks.registry import choose_networks
from deployments.talker.runner.model_runner import RunnerShape, build_runner, capture
from deployments.talker.state.kv_cache import GIB, BlockManager, GpuMemory, KVCache
from deployments.talker.text.prompt import PromptBuilder
from deployments.talker.text.tokenizer import TextTokenizer
from deployments.weights.checkpoint import load_strict, without_values
from deployments.weights.description import describe_directory
from deployments.weights.store import Report

if TYPE_CHECKING:
    from deployments.talker.model.speaker_encoder import SpeakerEncoder
    from deployments.talker.runner.recording_encoder import RecordingEncoder

# Only needed by models that clone.
_CODEC_ENCODER = "deployments.codec.encoder:CodecEncoder"
_RECORDING_ENCODER = "deployments.talker.runner.recording_encoder:RecordingEncoder"
_SPEAKER_ENCODER = "deployments.talker.model.speaker_encoder:SpeakerEncoder"
# Only needed by networks compiled with Triton.
_COMPILING_AHEAD = "deployments.gpu.compile_ahead:compiling_ahead"
_CPU_CACHE_BYTES = GIB  # default KV cache size on a CPU
_WORTH_SAYING_S = 0.05
_REPORT_S = 1.0


class StartClock:
    """Timer for startup phases. Calls `report` at the beginning of each phase."""

    def __init__(self, report: Report = lambda stage: None) -> None:
        self.report = report
        self.seconds: dict[str, float] = {}
        self._nested_s = 0.0  # duration of the phases nested in the current one

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Return a context that adds its duration, excluding nested phases, to phase `name`."""
        self.report(name)
        start_s, outer_s, self._nested_s = time.perf_counter(), self._nested_s, 0.0
        try:
            yield
        finally:
            whole_s = time.perf_counter() - start_s
            self.seconds[name] = self.seconds.get(name, 0.0) + whole_s - self._nested_s
            self._nested_s = outer_s + whole_s

    def summary(self) -> str:
        """Return one line that lists all phases lasting at least _WORTH_SAYING_S."""
        parts = [f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items() if seconds >= _WORTH_SAYING_S]
        return f"{sum(self.seconds.values()):.1f} s in all: " + ", ".join(parts)


def throttled(stage: str, report: Report) -> Callable[[int, int], None]:
    """Return a callback that reports progress such as "compiling kernels 12/345" at most once a second."""
    last_s = -_REPORT_S

    def progress(done: int, total: int) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if now_s - last_s >= _REPORT_S:
            last_s = now_s
            report(f"{stage} {done}/{total}")

    return progress


def precompile_nothing(work: Callable[[], None]) -> None:
    """Do nothing. Each kernel is instead compiled when it is first launched."""


def load_engine(directory: Path, config: TalkerConfig, clock: StartClock, *, makes_audio: bool = True) -> Engine:
    """Load, compile, capture and warm up an engine. Engines on the same GPU start one at a time."""
    chosen = EngineDevice(config)
    with chosen.startup_lock(clock.report):
        with clock.phase("starting the device"):
            where = chosen.begin()
        if where is not None:
            clock.report(f"on {where}")
        engine = build_engine(directory, config, clock=clock, compiles_ahead=True, makes_audio=makes_audio, on=chosen)
        warm_up(engine, clock, makes_audio=makes_audio)
        return engine


def build_engine(
    directory: Path,
    config: TalkerConfig,
    *,
    clock: StartClock | None = None,
    compiles_ahead: bool = False,
    makes_audio: bool = True,
    on: EngineDevice | None = None,
) -> Engine:
    """Build an engine whose first requests capture graphs and, unless it `compiles_ahead`, compile kernels."""
    torch.set_num_threads(config.threads)
    clock, chosen = clock or StartClock(), on or EngineDevice(config)
    model_config, codec = ModelConfig.load(directory), SpeechTokenizerConfig.load(directory / "speech_tokenizer")
    info = describe_directory(directory, directory.name, config, on_gpu=chosen.on_gpu)
    if config.max_model_len > (most := model_config.max_position_embeddings):
        raise EngineError(f"talker.max_model_len is {config.max_model_len}, but {directory} has {most} positions")
    kind = choose_networks(config.kernels, model_config, dtype=chosen.dtype, device=chosen.device)
    ahead: AbstractContextManager[Precompile] = nullcontext(precompile_nothing)
    if compiles_ahead and kind == "fused":
        facts = _facts(directory, config, makes_audio=makes_audio)
        progress = throttled("compiling kernels", clock.report)
        ahead = resolve_name(_COMPILING_AHEAD)(facts, clock.phase, progress)
    device, dtype, size = chosen.device, chosen.dtype, chosen.block_size
    with ahead as precompile:
        memory = chosen.memory()
        with clock.phase("loading the talker"):
            talker = load_talker(directory, model_config, dtype=dtype, device=device)
            talker.prepare(max_positions=config.max_model_len)
        with clock.phase("projecting text"):
            tables = InputTables(talker)
        speaker_encoder = load_speaker_encoder(directory, model_config, device=device)
        recordings = None
        if speaker_encoder is not None and chosen.on_gpu:  # on a CPU, the codec pool encodes recordings instead
            with clock.phase("capturing the encoders"):
                by_vector = model_config.text.clones_by_vector
                recordings = _recording_encoder(directory, speaker_encoder, device, by_vector=by_vector)
        with clock.phase("loading the tokenizer"):
            tokenizer = TextTokenizer(directory, model_config.tokens)
            follows = info.supports_instructions
            prompts = PromptBuilder(tables, tokenizer, speaker_encoder, recordings, follows_instructions=follows)
        # A stream keeps its slot until its audio is complete, even if another stream already has its row.
        num_slots = 2 * config.max_num_seqs
        audio = _load_audio(directory, num_slots, device, clock, precompile, makes_audio=makes_audio)
        blocks = BlockManager(_num_blocks(config, model_config, dtype, size, memory), size)
        cache = KVCache(model_config.talker, num_blocks=blocks.num_blocks, block_size=size, dtype=dtype, device=device)
        shape = RunnerShape(config.max_num_seqs, config.max_model_len, kind, config.deterministic, config.attention)
        with clock.phase("packing weights"):
            runner = build_runner(tables, cache, blocks, shape)
        precompile(runner.run_all_shapes)
    scheduler = Scheduler(
        blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_waiting=config.max_num_waiting,
        max_lead_s=chosen.max_lead_s,
    )
    info = replace(info, codec_precision=audio.precision)
    most = min(config.max_model_len, blocks.capacity)
    limits = LengthLimits(prompts.tokenizer, max_positions=most, frame_s=codec.frame_s)
    return Engine(info, prompts, limits, runner, scheduler, audio)


def warm_up(engine: Engine, clock: StartClock | None = None, *, makes_audio: bool = True) -> None:
    """Capture graphs and synthesize a short utterance, so that the first request does not run cold code.

    Raises EngineError if the utterance fails, because the engine must then reject requests.
    """
    clock = clock or StartClock()
    on_gpu = engine.runner.on_gpu
    if on_gpu:
        with clock.phase("capturing GPU work"):
            capture([engine.runner, *engine.lanes.runners], throttled("capturing GPU work", clock.report))
    with clock.phase("speaking a warm-up"):
        _run_warm_up_request(engine, on_gpu=on_gpu, gpu_frames=2 if on_gpu and makes_audio else 0)
    torch.cuda.empty_cache()  # releases memory used by the warm-up runs before each capture


def _run_warm_up_request(engine: Engine, *, on_gpu: bool, gpu_frames: int) -> None:
    """Synthesize a short utterance, with audio on a GPU, and with a cloned voice if the model clones."""
    voice = next(iter(engine.model_config.speakers), None)
    options = Sampling(max_new_tokens=3)
    request = SynthesisRequest(
        "warm-up", "Hello.", voice=voice, sampling=options, ignore_eos=True, gpu_frames=gpu_frames
    )
    if engine.prompts.speaker_encoder is not None:
        num_samples = engine.prompts.speaker_encoder.shape.sample_rate
        hiss = np.random.default_rng(0).normal(0, 0.01, num_samples).astype(np.float32)
        by_vector = engine.prompts.recordings is None or engine.model_config.text.clones_by_vector
        request = replace(request, reference=Reference(hiss, "Hiss.", x_vector_only=by_vector))
    engine.add(-1, request)
    while not engine.is_idle:
        for _, error in engine.step().failures:
            raise EngineError(f"the engine failed during its warm-up: {error}") from error
    engine.prompts.speakers.take_lookups()
    engine.prompts.references.take_lookups()


def load_talker(directory: Path, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> Talker:
    """Load the talker and its code predictor. Raises CheckpointError for missing, unexpected or misshaped tensors."""
    with without_values():
        talker = Talker(config)
    load_strict(talker, directory, prefix="talker.", dtype=dtype, device=device)
    return talker.eval()


def load_speaker_encoder(directory: Path, config: ModelConfig, *, device: torch.device) -> "SpeakerEncoder | None":
    """Load a base checkpoint's x-vector network in float32; None for other kinds."""
    if config.speaker_encoder is None:
        return None
    with without_values():
        encoder: SpeakerEncoder = resolve_name(_SPEAKER_ENCODER)(config.speaker_encoder)
    load_strict(encoder, directory, prefix="speaker_encoder.", dtype=torch.float32, device=device)
    return encoder.eval()


def _recording_encoder(
    directory: Path, speaker_encoder: "SpeakerEncoder", device: torch.device, *, by_vector: bool
) -> "RecordingEncoder":
    codec = None if by_vector else resolve_name(_CODEC_ENCODER).load(directory / "speech_tokenizer", device=device)
    recordings: RecordingEncoder = resolve_name(_RECORDING_ENCODER)(speaker_encoder, codec, device)
    recordings.capture()
    return recordings


def _load_audio(
    directory: Path,
    num_slots: int,
    device: torch.device,
    clock: StartClock,
    precompile: Precompile,
    *,
    makes_audio: bool,
) -> AudioStreams:
    """Load the decoder on the talker's device.

    On a CPU, or if audio is decoded elsewhere, the decoder is loaded when a stream first requests audio.
    """
    folder = directory / "speech_tokenizer"
    codec = SpeechTokenizerConfig.load(folder)
    chosen = choose_decoders(codec, device)
    load = partial(
        chosen.slots.load, folder, chosen.backend, num_slots=num_slots, device=device, precompile=precompile,
        report=clock.report,
    )  # fmt: skip
    if device.type == "cpu" or not makes_audio:
        torch.cuda.empty_cache()  # releases the talker's text embedding, which its table has replaced
        return AudioStreams(load, num_slots=num_slots, frame_s=codec.frame_s)
    with clock.phase("loading and capturing the codec"):
        slots = load()
    torch.cuda.empty_cache()  # releases temporary memory used during loading
    return AudioStreams(lambda: slots, num_slots=num_slots, frame_s=codec.frame_s, precision=slots.precision)


def _num_blocks(
    config: TalkerConfig, model_config: ModelConfig, dtype: torch.dtype, block_size: int, memory: GpuMemory | None
) -> int:
    """Return the number of KV blocks that fit in the reserved memory, but no more than all rows could use."""
    block_bytes = KVCache.bytes_per_position(model_config.talker, dtype) * block_size
    useful = config.max_num_seqs * -(-config.max_model_len // block_size) + 1
    if config.kv_cache_bytes is not None:
        cache_bytes = config.kv_cache_bytes
    elif memory is None:
        cache_bytes = _CPU_CACHE_BYTES
    else:
        cache_bytes = memory.kv_bytes(cache_bounds(config, block_bytes, block_size))
    return max(2, min(cache_bytes // block_bytes, useful))


def _facts(directory: Path, config: TalkerConfig, *, makes_audio: bool) -> str:
    files = [directory / "config.json", directory / "speech_tokenizer" / "config.json"]
    versions = [torch.__version__, torch.cuda.get_device_name(), config.model_dump_json(), f"{makes_audio=}"]
    return "\n".join([*versions, *(file.read_text(encoding="utf-8") for file in files)])
