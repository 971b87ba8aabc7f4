"""Loads the decoder of a codec replica, and its encoder if the checkpoint clones."""

from dataclasses import dataclass, field
from math import inf
from pathlib import Path

import torch

from deployments.codec.backends.registry import load_decoder
from deployments.codec.codec_config import SpeechTokenizerConfig
from deployments.codec.decoder import MIN_SNR_DB, CodecDecoder, WarmUpResult, describe_choice, snr_db, warm_up
from deployments.codec.decoder_state import DecoderState
from deployments.codec.encoder import CodecEncoder
from deployments.codec.plan import chosen_ramp, longest_call_s
from deployments.config import CodecConfig
from deployments.errors import InvalidRequest, StartError
from deployments.protocol import Codes, Reference
from deployments.recording_cache import ByRecording
from deployments.serving import metrics
from deployments.serving.reports import report_stage
from deployments.weights.description import encodes
from deployments.weights.store import locate

_PROBE_FRAMES = 4
# A replica that decodes nothing may use several cores for a recording: two make its codes in 0.6 of the time. All
# replicas use as many, because sums, and so codes, depend on it, and another replica must make the same codes.
_INLINE_THREADS = 4
# Limits of the cache of recordings: codes of a thousand recordings of 24 seconds, states of about fifty.
_CODES_BYTES, _STATE_BYTES = 8 << 20, 256 << 20


@dataclass(frozen=True, slots=True)
class Codec:
    """A loaded speech tokenizer."""

    directory: Path
    decoder: CodecDecoder
    encoder: CodecEncoder | None
    sample_rate: int
    tried: WarmUpResult = field(default_factory=WarmUpResult)
    references: ByRecording[Codes] = field(default_factory=lambda: ByRecording(max_bytes=_CODES_BYTES))
    states: ByRecording[DecoderState] = field(  # by key and codes: encoders of two replicas may differ
        default_factory=lambda: ByRecording(max_bytes=_STATE_BYTES, size=_state_bytes)
    )

    @property
    def frame_s(self) -> float:
        return self.decoder.frame_samples / self.sample_rate

    def read(self, reference: Reference) -> tuple[Codes, DecoderState]:
        """Codes [frames, num_code_groups] of a recording, and the decoder's state after them."""
        codes = self.codes(reference)
        return codes, self.states.get(
            reference.key + codes.tobytes(), lambda: self.decoder.state_after(torch.from_numpy(codes).long())
        )

    def find(self, reference: Reference) -> tuple[Codes, DecoderState] | None:
        """The cached result of `read` for a recording that comes without samples; None if there is none."""
        codes = None if reference.prompt is None else reference.prompt.codes
        state = None if codes is None else self.states.find(reference.key + codes.tobytes())
        return None if codes is None or state is None else (codes, state)

    def codes(self, reference: Reference) -> Codes:
        """Codes [frames, num_code_groups] of a recording. Raises InvalidRequest."""
        if reference.prompt is not None:
            assert reference.prompt.codes is not None, "the ingress sends samples where codes are missing"
            return reference.prompt.codes.copy()  # torch takes no arrays that it may not write to
        if self.encoder is None:
            raise InvalidRequest("this checkpoint has no speech encoder, so it cannot clone a recording", "ref_audio")
        encoder = self.encoder
        return self.references.get(reference.key, lambda: encoder.encode(reference.samples))

    def forget(self, voices: tuple[bytes, ...]) -> int:
        """Drop codes and states of these voices, see `ByRecording.forget`. Returns how many there were."""
        return self.references.forget(voices) + self.states.forget(voices)


def _state_bytes(state: DecoderState) -> int:
    return sum(tensor.nbytes for tensor in state.tensors)


def load_codec(model: str, config: CodecConfig) -> Codec:
    """Find and load the speech tokenizer of `model`; raises CheckpointError."""
    torch.set_num_threads(_INLINE_THREADS if config.placement == "inline" else 1)
    checkpoint = locate(model, report=lambda line: report_stage(f"codec: {line}"))
    directory = checkpoint / "speech_tokenizer"
    device = "cuda" if config.device == "auto" and torch.cuda.is_available() else config.device.replace("auto", "cpu")
    decoder = _load_decoder(directory, config, device)
    metrics.PRECISION.record(1, pool="codec", precision=decoder.precision)
    if decoder.backend.advice:
        report_stage(f"codec: {decoder.backend.advice}")
    encoder = CodecEncoder.load(directory) if encodes(checkpoint) else None
    # With `inline` nothing is decoded here, so no start waits for a warm-up.
    warms = config.placement != "inline" and not decodes_in_processes(config, decoder)
    tried = warm_up(decoder, chosen_ramp(config.workers), longest_call_s(config.workers)) if warms else WarmUpResult()
    return Codec(directory, decoder, encoder, SpeechTokenizerConfig.load(directory).sample_rate, tried)


def decodes_in_processes(config: CodecConfig, decoder: CodecDecoder) -> bool:
    """Whether a replica's workers are processes, which warm up by themselves."""
    return config.workers > 1 and config.placement != "inline" and decoder.device.type == "cpu"


def _load_decoder(directory: Path, config: CodecConfig, device: str) -> CodecDecoder:
    exact, failed = load_decoder(directory, device=device), ""
    available = exact.backend.precisions(exact.device)
    if config.precision not in ("auto", exact.precision, *available):
        needed = {"bfloat16": "a CPU with AVX512-BF16 or AMX"}.get(config.precision, "a GPU")
        raise StartError(
            f"codec.precision: {config.precision} needs {needed}, which this machine lacks: set auto or float32"
        )
    if config.precision != "auto":
        return exact if config.precision == exact.precision else CodecDecoder(exact.backend.at(config.precision))
    for precision in available:
        rounded = CodecDecoder(exact.backend.at(precision))
        noise_db = noise(rounded, exact)
        if noise_db >= MIN_SNR_DB:
            report_stage(f"codec: {describe_choice(precision, noise_db)}")
            return rounded
        failed += f", {precision} {noise_db:.1f} dB"
    report_stage(f"codec: {describe_choice(exact.precision, inf, failed)}")
    return exact


def noise(decoder: CodecDecoder, exact: CodecDecoder) -> float:
    """Signal over error of a decoder, in dB, on codes drawn at random. Independent of time, so that all replicas decode
    alike.
    """
    config = decoder.config
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(config.codebook_size, (1, _PROBE_FRAMES, config.num_quantizers), generator=generator)
    (audio, _), (exact_audio, _) = (each.decode(codes, [each.initial_state()]) for each in (decoder, exact))
    return snr_db(exact_audio, audio)
