"""Run Talkray's engine and codec on one utterance at a time, with the official package's random numbers."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deployments.codec.backends.registry import load_decoder
from deployments.config import TalkerConfig
from deployments.protocol import Codes, Reference, Sampling, SynthesisRequest
from deployments.talker.engine.input_processor import with_defaults
from deployments.talker.engine.startup import build_engine
from deployments.talker.model.model_config import ModelConfig
from deployments.talker.sampling.torch_sampler import NoiseKey
from deployments.weights.checkpoint import read_tensors
from talkray_tools.choices import Divergence, divergences, run
from talkray_tools.random_checkpoint import Options, write_checkpoint
from talkray_tools.random_codec import Stress
from talkray_tools.released import SHAPES
from tools.experiments.parity.cases import SEED, Extent, ParityCase, reference_audio

GOLDEN_DIRECTORY = Path(__file__).parents[3] / "tests" / "data"
NAMES = {shape.config["tts_model_type"]: name for name, shape in SHAPES.items() if name.startswith("tiny-")}


def write_tiny(directory: Path, kind: str, *, seed: int = 0, tokenizer: Path | None = None) -> Path:
    """Write a tiny checkpoint with its own small vocabulary, or with the tokenizer files in `tokenizer`."""
    shape = SHAPES[NAMES[kind]]
    shape = shape if tokenizer is None else shape.with_official_text()
    write_checkpoint(directory, shape, Options(seed=seed, dtype=torch.float32, tokenizer=tokenizer))
    return directory


def write_base(directory: Path, hidden_size: int, *, seed: int) -> Path:
    """Write a Base checkpoint with the width of a released checkpoint and otherwise tiny shapes."""
    size = {1024: "0b6", 2048: "1b7"}[hidden_size]
    widths = {"talker_config": {"hidden_size": hidden_size}, "speaker_encoder_config": {"enc_dim": hidden_size}}
    shape = SHAPES[NAMES["base"]].changed({"tts_model_size": size, **widths})
    write_checkpoint(directory, shape, Options(seed=seed, dtype=torch.float32))
    return directory


def write_stressed(directory: Path, kind: str, stress: Stress, *, seed: int) -> Path:
    """Write a tiny bfloat16 checkpoint that is numerically as demanding as trained checkpoints."""
    options = Options(seed=seed, dtype=torch.bfloat16, codec_dtype=torch.bfloat16, stress=stress)
    write_checkpoint(directory, SHAPES[NAMES[kind]], options)
    return directory


def golden_file(kind: str) -> Path:
    return GOLDEN_DIRECTORY / f"official_tiny_{kind}.npz"


def talker_digest(checkpoint: Path) -> str:
    """Return a digest of all weights that determine codes. Equal on every machine that generates the checkpoint."""
    digest = hashlib.sha256()
    for name, tensor in sorted(read_tensors(checkpoint).items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    for name in ("vocab.json", "merges.txt"):
        digest.update((checkpoint / name).read_bytes())
    return digest.hexdigest()


def codec_profile(checkpoint: Path) -> NDArray[np.float64]:
    """Return the RMS of each codec tensor. Float sums scale the tensors, so the last digits vary."""
    tensors = sorted(read_tensors(checkpoint / "speech_tokenizer").items())
    return np.array([float(tensor.double().pow(2).mean().sqrt()) for _, tensor in tensors])


class OfficialNoise:
    """Noise that equals the draws of `torch.multinomial` after `torch.manual_seed(seed)`, code by code.

    Codebooks with greedy decoding do not draw.
    """

    def __init__(self, seed: int, model: ModelConfig, sampling: Sampling, *, drawn: int = 0) -> None:
        """Start after `drawn` frames."""
        self._generator = torch.Generator().manual_seed(seed)
        self._model, self._sampling = model, sampling
        for _ in range(drawn):
            for codebook in range(model.num_code_groups):
                self._next(codebook)

    def __call__(self, noise_key: NoiseKey, codes: Tensor) -> Tensor:
        noise = self._next(noise_key.codebook)
        return noise.expand(len(codes), -1).gather(-1, codes)

    def _next(self, codebook: int) -> Tensor:
        vocab = self._model.code_vocab_size if codebook else self._model.vocab_size
        if self._sampling.subtalker_dosample if codebook else self._sampling.do_sample:
            return torch.empty(1, vocab).exponential_(generator=self._generator)
        return torch.ones(1, vocab)


class Ours:
    """Checkpoint loaded for one sequence at a time, in float32 on the CPU."""

    def __init__(self, checkpoint: Path) -> None:
        config = TalkerConfig(device="cpu", max_num_seqs=1, max_model_len=1024)
        self.engine = build_engine(checkpoint, config)
        self.codec = load_decoder(checkpoint / "speech_tokenizer", device="cpu", precision="float32")

    def codes(
        self, case: ParityCase, options: Mapping[str, Any], reference_codes: Codes | None, *, extent: Extent
    ) -> Codes:
        """Return the codes [frames, groups] of a case decoded with `options`."""
        sampling = Sampling(max_new_tokens=extent.max_new_tokens, **options)
        full = with_defaults(sampling, self.engine.model_config.generation)
        self.engine.runner.networks.noise = OfficialNoise(SEED, self.engine.model_config, full)
        request = replace(_synthesis(case, sampling), reference_codes=reference_codes if case.ref_text else None)
        return run(self.engine, request)

    def divergences(
        self,
        case: ParityCase,
        options: Mapping[str, Any],
        expected: Codes,
        reference_codes: Codes | None = None,
        *,
        extent: Extent,
    ) -> list[Divergence]:
        """Return where codes differ from `expected` [frames, groups]. Generation continues from the expected codes."""
        sampling = Sampling(max_new_tokens=extent.max_new_tokens, **options)
        full = with_defaults(sampling, self.engine.model_config.generation)

        def begin(known: int) -> None:
            self.engine.runner.networks.noise = OfficialNoise(SEED, self.engine.model_config, full, drawn=known)

        request = replace(_synthesis(case, sampling), reference_codes=reference_codes if case.ref_text else None)
        return divergences(self.engine, request, expected, most=extent.max_new_tokens - 1, begin=begin)

    def wav(self, case: ParityCase, codes: Codes, reference_codes: Codes | None) -> NDArray[np.float32]:
        """Decode `codes` frame by frame to [samples]. In-context cloning first decodes the reference's frames."""
        state = self.codec.initial_state()
        if case.ref_text:
            assert reference_codes is not None
            _, (state,) = self.codec.decode(_batch_of_one(reference_codes), [state])
        pieces = []
        for frame in np.split(codes, len(codes)):
            audio, (state,) = self.codec.decode(_batch_of_one(frame), [state])
            pieces.append(audio[0].numpy())
        return np.concatenate(pieces)

    def speaker(self) -> NDArray[np.float32]:
        encoder = self.engine.prompts.speaker_encoder
        assert encoder is not None
        vector: NDArray[np.float32] = encoder.embed(torch.from_numpy(reference_audio())).numpy()
        return vector


def _batch_of_one(codes: Codes) -> Tensor:
    return torch.from_numpy(codes.astype(np.int64))[None]


def _synthesis(case: ParityCase, sampling: Sampling) -> SynthesisRequest:
    request = SynthesisRequest(
        "parity",
        case.text,
        voice=case.speaker.lower() if case.speaker else None,
        language=case.language.lower(),
        instructions=case.instruct,
        sampling=sampling,
        non_streaming_mode=case.non_streaming_mode,
    )
    if case.kind != "base":
        return request
    return replace(request, reference=Reference(reference_audio(), case.ref_text, x_vector_only=case.ref_text is None))
