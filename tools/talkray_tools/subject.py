"""Load a checkpoint as a server on this machine would, and generate speech with it."""

import argparse
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from deployments.codec.decoder import to_pcm16
from deployments.codec.pool.codec import Codec, load_codec
from deployments.config import CodecConfig, TalkerConfig
from deployments.protocol import ALL_FRAMES, Codes, FinishReason, ModelKind, Pcm, Reference, Sampling, SynthesisRequest
from deployments.speech_detection import runaway_frames
from deployments.talker.engine.engine import Engine
from deployments.talker.engine.startup import StartClock, load_engine, throttled

logger = logging.getLogger(__name__)

_DESCRIPTION = "A calm, friendly voice."


@dataclass(frozen=True, slots=True)
class Speech:
    """One utterance, including any leading silence."""

    codes: Codes
    pcm: Pcm
    reason: FinishReason | None
    num_text_tokens: int
    first_audio_s: float  # from the request to the first audio
    took_s: float


class Subject:
    """Checkpoint under test, loaded as a server on this machine would load it."""

    def __init__(self, directory: Path, reference: Reference | None, options: argparse.Namespace) -> None:
        config = TalkerConfig(
            device=options.device, threads=options.threads, max_num_seqs=4, deterministic=options.deterministic
        )
        self.reference = reference
        self.engine: Engine = load_engine(directory, config, StartClock(_paced(logger.info)))
        self.on_gpu = self.engine.info.talker_on_gpu
        self.codec: Codec = load_codec(str(directory), CodecConfig(placement="inline"))  # needs no warm-up
        torch.set_num_threads(options.threads)
        self.size = self.engine.info.frame_samples
        self.sample_rate = self.engine.info.sample_rate

    @property
    def precision(self) -> str:
        """The codec decoder's precision on this machine."""
        return self.engine.info.codec_precision if self.on_gpu else self.codec.decoder.precision

    def request(self, text: str, sampling: Sampling, *, seed: int = 0) -> SynthesisRequest:
        """Build a request to speak a text in a voice that suits this kind of checkpoint."""
        model = self.engine.model_config
        language = "english" if "english" in model.languages else "auto"
        synthesis = SynthesisRequest(
            "verify", text, language=language, sampling=sampling, seed=seed, leading_silence=True
        )
        if model.kind is ModelKind.CUSTOM_VOICE:
            return replace(synthesis, voice=next(iter(model.speakers)))
        if model.kind is ModelKind.VOICE_DESIGN:
            return replace(synthesis, instructions=_DESCRIPTION)
        assert self.reference is not None, "a base checkpoint was given one"
        codes = None if self.reference.x_vector_only else self.codec.codes(self.reference)
        return replace(synthesis, reference=self.reference, reference_codes=codes)

    def speak(self, *requests: SynthesisRequest, most: int | None = None) -> list[Speech]:
        """Run the requests as one batch, each with at most `most` frames (default: the limit for its text)."""
        started_s, made = time.perf_counter(), [_Stream() for _ in requests]
        progress = throttled(f"speaking, {len(requests)} at once: frame", logger.info)
        for number, request in enumerate(requests):
            self.engine.add(number, replace(request, gpu_frames=ALL_FRAMES if self.on_gpu else 0))
        while not self.engine.is_idle:
            output = self.engine.step()
            for _, error in output.failures:
                raise error
            for number, chunk in output.chunks:
                stream = made[number]
                if len(chunk.codes) and not self.on_gpu and not stream.codes:
                    self.decode(chunk.codes[:1], None)  # the first audio of a stream
                stream.codes += list(chunk.codes)
                stream.pcm += chunk.pcm
                stream.reason = chunk.finish_reason
                stream.num_text_tokens = max(stream.num_text_tokens, chunk.num_text_tokens)
                stream.took_s = time.perf_counter() - started_s
                if stream.first_audio_s is None and (chunk.pcm or not self.on_gpu):
                    stream.first_audio_s = stream.took_s
            tokens = max(stream.num_text_tokens for stream in made)
            progress(
                max(len(stream.codes) for stream in made), most or runaway_frames(tokens, self.engine.info.frame_s)
            )
        return [self._speech(*pair) for pair in zip(made, requests, strict=True)]

    def _speech(self, stream: "_Stream", request: SynthesisRequest) -> Speech:
        codes = np.stack(stream.codes) if stream.codes else np.zeros((0, self.engine.info.num_code_groups), np.int16)
        made = np.frombuffer(bytes(stream.pcm), np.int16)
        pcm = made if self.on_gpu else self.decode(codes, request.reference_codes)
        first_s = stream.took_s if stream.first_audio_s is None else stream.first_audio_s
        return Speech(codes, pcm, stream.reason, stream.num_text_tokens, first_s, stream.took_s)

    def decode(self, codes: Codes, before: Codes | None) -> Pcm:
        """Return the [samples] of a complete utterance as the codec pool decodes it: after the recording `before`."""
        if not len(codes):
            return np.zeros(0, np.int16)
        decoder = self.codec.decoder
        state = decoder.initial_state() if before is None else decoder.state_after(torch.from_numpy(before).long())
        audio, _ = decoder.decode(torch.from_numpy(codes.astype(np.int64))[None], [state])
        return to_pcm16(audio[0])


@dataclass(slots=True)
class _Stream:
    codes: list[Codes] = field(default_factory=list)
    pcm: bytearray = field(default_factory=bytearray)
    reason: FinishReason | None = None
    num_text_tokens: int = 0
    first_audio_s: float | None = None
    took_s: float = 0.0


def _paced(report: Callable[[str], None]) -> Callable[[str], None]:
    """Wrap `report` to log each phase of startup, but each counting phase only once."""
    said: set[str] = set()

    def tell(stage: str) -> None:
        what = stage.rstrip("0123456789/ ")
        if what not in said:
            said.add(what)
            report(stage)

    return tell
