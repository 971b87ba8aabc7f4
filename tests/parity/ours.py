"""Talkray's engine and codec, one utterance at a time, with the random numbers of the official package."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deployments.codec.decoder import CodecDecoder
from deployments.config import TalkerConfig
from deployments.protocol import Codes, GenerateRequest, Progress, Reference, Sampling, SynthesisRequest
from deployments.talker.engine import Engine, complete
from deployments.talker.loading import build_engine
from deployments.talker.model.config import ModelConfig
from deployments.talker.sampling import BatchFilter, Draw, NoiseSource
from tests.parity.cases import SEED, Case, Extent, reference_audio


class OfficialNoise:
    """Draws what `torch.multinomial` draws after `torch.manual_seed(seed)`: noise for a whole vocabulary, code by code.

    A codebook that is decoded greedily draws nothing.
    """

    def __init__(self, seed: int, model: ModelConfig, sampling: Sampling, *, drawn: int = 0) -> None:
        """`drawn`: frames that were drawn already."""
        self._generator = torch.Generator().manual_seed(seed)
        self._model, self._sampling = model, sampling
        for _ in range(drawn):
            for codebook in range(model.num_code_groups):
                self._next(codebook)

    def __call__(self, draw: Draw, codes: Tensor) -> Tensor:
        noise = self._next(draw.codebook)
        return noise.expand(len(codes), -1).gather(-1, codes)

    def _next(self, codebook: int) -> Tensor:
        vocab = self._model.code_vocab_size if codebook else self._model.vocab_size
        if self._sampling.subtalker_dosample if codebook else self._sampling.do_sample:
            return torch.empty(1, vocab).exponential_(generator=self._generator)
        return torch.ones(1, vocab)


@dataclass(frozen=True, slots=True)
class Divergence:
    """A code that the official package chose otherwise, though all before it were equal."""

    frame: int
    codebook: int
    margin: float  # as in Choice


@dataclass(frozen=True, slots=True)
class Choice:
    """What one code was chosen by."""

    logits: Tensor  # [vocab], over the temperature
    noise: Tensor  # [vocab], 1 for greedy choices; infinite for codes that were no candidates
    least: float  # logit that a candidate must have

    def margin(self, ours: int, theirs: int) -> float:
        """How little would have to change for the other code: by score, or at the filter of either."""
        scores = self.logits - self.noise.log()
        by_score = float(scores[ours] - scores[theirs])
        at_filter = [abs(float(self.logits[code]) - self.least) for code in (ours, theirs)]
        return min(at_filter if by_score < 0 else [by_score, *at_filter])


class Choices:
    """Of one utterance, in their order."""

    def __init__(self, noise: OfficialNoise) -> None:
        self._noise = noise
        self.made: list[Choice] = []

    @contextmanager
    def kept(self) -> Iterator[None]:
        """While this lasts, every choice is written down."""
        original = BatchFilter.sample

        def sample(options: BatchFilter, logits: Tensor, draw: Draw, noise: NoiseSource) -> Tensor:
            everywhere = torch.full_like(logits, torch.inf)

            def keep(which: Draw, codes: Tensor) -> Tensor:
                values = self._noise(which, codes)
                everywhere.scatter_(-1, codes, values)
                return values

            chosen = original(options, logits, draw, keep)
            if options.greedy:
                self.made.append(Choice(logits[0], torch.ones_like(logits[0]), -torch.inf))
            else:
                logits = logits / options.temperature
                kept = int(options.top_k) or logits.shape[-1]
                self.made.append(Choice(logits[0], everywhere[0], float(logits[0].topk(kept).values[-1])))
            return chosen

        with patch.object(BatchFilter, "sample", sample):
            yield


class Ours:
    """A checkpoint loaded for one sequence at a time, in float32 on the CPU."""

    def __init__(self, checkpoint: Path) -> None:
        config = TalkerConfig(device="cpu", dtype="float32", max_num_seqs=1, max_model_len=1024)
        self.engine = build_engine(checkpoint, config)
        self.codec = CodecDecoder.load(checkpoint / "speech_tokenizer", device="cpu", dtype=torch.float32)

    def codes(self, case: Case, options: Mapping[str, Any], reference_codes: Codes | None, *, extent: Extent) -> Codes:
        """[frames, groups] of a case decoded with `options`."""
        sampling = Sampling(max_new_tokens=extent.max_new_tokens, **options)
        full = complete(sampling, self.engine.model.generation)
        self.engine.runner.step.noise = OfficialNoise(SEED, self.engine.model, full)
        request = GenerateRequest(_synthesis(case, sampling), reference_codes if case.ref_text else None)
        return run(self.engine, request)

    def divergences(
        self, case: Case, options: Mapping[str, Any], expected: Codes, *, extent: Extent
    ) -> list[Divergence]:
        """Where codes differ from the expected ones [frames, groups]. Behind each, generation goes on from those."""
        found: list[Divergence] = []
        sampling, eos = Sampling(max_new_tokens=extent.max_new_tokens, **options), self.engine.model.codes.eos
        full = complete(sampling, self.engine.model.generation)
        known, limit = 0, extent.max_new_tokens - 1
        while known < min(limit, len(expected) + 1):
            choices = Choices(OfficialNoise(SEED, self.engine.model, full, drawn=known))
            resume = Progress(expected[:known], 0) if known else None
            with choices.kept():
                codes = run(self.engine, GenerateRequest(replace(_synthesis(case, sampling), resume=resume)))
            divergence = _first(codes, expected[known:], choices.made, eos=eos, full=known + len(codes) == limit)
            if divergence is None:
                break
            found.append(replace(divergence, frame=known + divergence.frame))
            known += divergence.frame + 1
        return found

    def wav(self, case: Case, codes: Codes, reference_codes: Codes | None) -> NDArray[np.float32]:
        """[samples] of `codes`, decoded frame by frame, behind the reference's frames in in-context cloning."""
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
        """The reference recording's speaker vector."""
        encoder = self.engine.prompts.speaker_encoder
        assert encoder is not None
        vector: NDArray[np.float32] = encoder.embed(torch.from_numpy(reference_audio())).numpy()
        return vector


def _first(codes: Codes, expected: Codes, choices: list[Choice], *, eos: int, full: bool) -> Divergence | None:
    """The first difference; `full`: codes end because no more were asked for."""
    common, groups = min(len(codes), len(expected)), expected.shape[1]
    differing = np.argwhere(codes[:common] != expected[:common])
    if len(differing):
        frame, codebook = (int(index) for index in differing[0])
        ours, theirs = int(codes[frame, codebook]), int(expected[frame, codebook])
    elif len(codes) == len(expected) and (full or len(choices) > common * groups):
        return None
    else:
        frame, codebook = common, 0
        ours = int(codes[common, 0]) if common < len(codes) else eos
        theirs = int(expected[common, 0]) if common < len(expected) else eos
    return Divergence(frame, codebook, choices[frame * groups + codebook].margin(ours, theirs))


def _batch_of_one(codes: Codes) -> Tensor:
    return torch.from_numpy(codes.astype(np.int64))[None]


def run(engine: Engine, request: GenerateRequest) -> Codes:
    """All frames [frames, groups] of one request."""
    engine.add(0, request)
    frames = []
    while not engine.is_idle:
        frames += [chunk.codes for _, chunk in engine.step().chunks]
    return np.concatenate(frames)


def _synthesis(case: Case, sampling: Sampling) -> SynthesisRequest:
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
