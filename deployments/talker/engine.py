"""The talker engine: requests in, frames out, one step at a time. Knows neither processes nor Ray."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from deployments.checkpoint import load_strict
from deployments.codec.config import SpeechTokenizerConfig
from deployments.config import TalkerConfig
from deployments.errors import InvalidRequest
from deployments.protocol import FinishReason, FrameChunk, GenerateRequest, ModelInfo, Sampling, SynthesisRequest
from deployments.talker.block_manager import BlockManager
from deployments.talker.kv_cache import KVCache
from deployments.talker.model.config import ModelConfig
from deployments.talker.model.speaker_encoder import SpeakerEncoder
from deployments.talker.model.talker import Talker
from deployments.talker.model_runner import ModelRunner
from deployments.talker.prompt import PromptBuilder
from deployments.talker.scheduler import Batch, Scheduler
from deployments.talker.sequence import FrameLimit, Sequence
from deployments.talker.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class Output:
    """New frames of one sequence."""

    sequence_id: int
    chunk: FrameChunk


class Engine:
    """Continuous batching over one checkpoint on one device."""

    def __init__(self, directory: Path, config: TalkerConfig) -> None:
        torch.set_num_threads(config.threads)
        self.config, self.directory = config, directory
        self.model = ModelConfig.load(directory)
        device = _device(config)
        dtype = _dtype(config, device)
        talker = load_talker(directory, self.model, dtype=dtype, device=device)
        talker.prepare(max_positions=config.max_model_len)
        speaker_encoder = load_speaker_encoder(directory, self.model, device=device)
        self.prompts = PromptBuilder(talker, TextTokenizer(directory, self.model.tokens), speaker_encoder)
        blocks = BlockManager(self._num_blocks(dtype), config.kv_block_size)
        num_slots = blocks.num_blocks * config.kv_block_size
        cache = KVCache(self.model.talker, num_slots=num_slots, dtype=dtype, device=device)
        self.runner = ModelRunner(talker, cache, blocks, max_num_seqs=config.max_num_seqs)
        self.scheduler = Scheduler(blocks, max_num_seqs=config.max_num_seqs, max_num_waiting=config.max_num_waiting)
        self._finished: list[Output] = []

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
            spoken_form=self.model.text.spoken_form,
            max_segment_chars=self.model.text.max_segment_chars,
        )

    def warm_up(self) -> None:
        """Capture graphs and run one short utterance, so that the first request meets warm code paths."""
        self.runner.capture()
        voice = next(iter(self.model.speakers), None)
        options = Sampling(max_new_tokens=3)
        request = SynthesisRequest("warm-up", "Hello.", voice=voice, sampling=options, ignore_eos=True)
        self.add(-1, GenerateRequest(request))
        while not self.is_idle:
            self.step()

    @property
    def is_idle(self) -> bool:
        """Whether a step would do nothing."""
        return self.scheduler.is_idle and not self._finished

    def add(self, sequence_id: int, request: GenerateRequest) -> None:
        """Queue a request; raises InvalidRequest when it can never run, Overloaded when the line is full.

        A request that a listener hears already is never Overloaded.
        """
        if not request.is_heard:
            self.scheduler.check_room()
        prompt = self.prompts.build(request)
        sampling = complete(request.synthesis.sampling, self.model.generation)
        limit = self._frame_limit(request, sampling, len(prompt.rows), prompt.num_text_tokens)
        prefix = [] if request.prefix is None else list(request.prefix)
        sequence = Sequence(sequence_id, request, prompt, sampling, limit, prefix)
        if sequence.num_frames >= limit.frames:
            self._finished.append(Output(sequence_id, self._chunk(sequence, [], limit.reason)))
        else:
            self.scheduler.add(sequence)

    def abort(self, sequence_id: int) -> None:
        """Stop a sequence and free what it holds. One that has ended meanwhile is no error."""
        self.scheduler.abort(sequence_id)

    def step(self) -> list[Output]:
        """Admit what fits, make one frame for each running sequence, and return the new frames."""
        finished, self._finished = self._finished, []
        batch = self.scheduler.schedule()
        if batch is None:
            return finished
        outputs = self._run(batch)
        self.scheduler.retire(batch)
        return finished + outputs

    def _run(self, batch: Batch) -> list[Output]:
        outputs = self._prefill(batch.prefill)
        going = [sequence for sequence in batch.decode if sequence.finish_reason is None]
        return outputs + self._decode(going) if going else outputs

    def _prefill(self, sequences: list[Sequence]) -> list[Output]:
        """Outputs of the sequences that turn out to be over: all their frames were made before they were resumed."""
        outputs = []
        for sequence, over in zip(sequences, self.runner.prefill(sequences), strict=True):
            if over:
                sequence.finish_reason = FinishReason.STOP
                outputs.append(Output(sequence.id, self._chunk(sequence, [], FinishReason.STOP)))
        return outputs

    def _decode(self, sequences: list[Sequence]) -> list[Output]:
        step = self.runner.decode(sequences)
        outputs = []
        for sequence, frame, ended in zip(sequences, step.frames, step.ended, strict=True):
            sequence.append(frame, ended=bool(ended))
            outputs.append(Output(sequence.id, self._chunk(sequence, [frame], sequence.finish_reason)))
        return outputs

    def _chunk(self, sequence: Sequence, frames: list[np.ndarray], reason: FinishReason | None) -> FrameChunk:
        codes = np.stack(frames) if frames else np.zeros((0, self.model.num_code_groups), dtype=np.int16)
        return FrameChunk(codes, sequence.num_text_tokens, reason)

    def _frame_limit(
        self, request: GenerateRequest, sampling: Sampling, num_rows: int, num_text_tokens: int
    ) -> FrameLimit:
        """The first limit a sequence will meet.

        The last of `max_new_tokens` never becomes a frame, as in the official package.
        """
        room = min(self.config.max_model_len, self.scheduler.blocks.capacity) - num_rows
        if room < 1:
            raise InvalidRequest(
                f"input and reference make {num_rows} positions, at most {num_rows + room - 1} fit: shorten them",
                "input",
                "context_length_exceeded",
            )
        length = FrameLimit(min((sampling.max_new_tokens or 1) - 1, room), FinishReason.LENGTH)
        expected = num_text_tokens * self.config.runaway_frames_per_token
        runaway = FrameLimit(max(expected, self.config.runaway_min_frames), FinishReason.RUNAWAY)
        if request.synthesis.ignore_eos or length.frames <= runaway.frames:
            return length
        return runaway

    def _num_blocks(self, dtype: torch.dtype) -> int:
        """As many KV blocks as the memory set aside holds, never more than all rows at full length could use."""
        block_bytes = KVCache.bytes_per_position(self.model.talker, dtype) * self.config.kv_block_size
        useful = self.config.max_num_seqs * -(-self.config.max_model_len // self.config.kv_block_size) + 1
        return max(2, min(self.config.kv_cache_bytes // block_bytes, useful))


def complete(asked: Sampling, defaults: Sampling) -> Sampling:
    """`asked` with the checkpoint's defaults where it says nothing."""
    return replace(defaults, **{key: value for key, value in asdict(asked).items() if value is not None})


def load_talker(directory: Path, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> Talker:
    """The talker with its code predictor; raises CheckpointError for a missing, unexpected or mis-shaped tensor."""
    with torch.device("meta"):
        talker = Talker(config)
    load_strict(talker, directory, prefix="talker.", dtype=dtype, device=device)
    return talker.eval()


def load_speaker_encoder(directory: Path, config: ModelConfig, *, device: torch.device) -> SpeakerEncoder | None:
    """The x-vector network of a base checkpoint, in float32; None for other kinds."""
    if config.speaker_encoder is None:
        return None
    with torch.device("meta"):
        encoder = SpeakerEncoder(config.speaker_encoder)
    load_strict(encoder, directory, prefix="speaker_encoder.", dtype=torch.float32, device=device)
    return encoder.eval()


def _device(config: TalkerConfig) -> torch.device:
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def _dtype(config: TalkerConfig, device: torch.device) -> torch.dtype:
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype
