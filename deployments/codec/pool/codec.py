"""Loading of a codec replica's decoder, and of its encoder if the checkpoint supports cloning."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from math import inf
from pathlib import Path
from threading import Lock

import torch

from deployments.codec.backends.registry import choose_decoders, load_decoder
from deployments.codec.codec_config import SpeechTokenizerConfig
from deployments.codec.decoder import MIN_SNR_DB, CodecDecoder, WarmUpResult, describe_choice, snr_db, warm_up
from deployments.codec.decoder_state import DecoderState
from deployments.codec.encoder import CodecEncoder
from deployments.codec.pool.ramps import chosen_ramp, longest_call_s
from deployments.config import CodecConfig
from deployments.errors import InvalidRequest, StartError
from deployments.protocol import Codes, Reference
from deployments.recording_cache import RecordingCache
from deployments.serving import metrics
from deployments.serving.reports import report_stage
from deployments.weights.description import encodes
from deployments.weights.store import locate

_PROBE_FRAMES = 4
# A replica that only encodes recordings may use several cores: two take 0.6 times as long as one. All replicas use the
# same number, because sums, and therefore codes, depend on it, and all replicas must produce the same codes.
_INLINE_THREADS = 4
# Limits of the recording cache: codes for a thousand 24-second recordings, and about fifty decoder states
_CODES_BYTES, _STATE_BYTES = 8 << 20, 256 << 20


@dataclass(frozen=True, slots=True)
class Codec:
    """Loaded speech tokenizer with caches of reference recordings."""

    directory: Path
    config: SpeechTokenizerConfig
    load_decoder: Callable[[], CodecDecoder]  # loads it once; later calls return the same decoder
    encoder: CodecEncoder | None
    warm_up_result: WarmUpResult = field(default_factory=WarmUpResult)
    references: RecordingCache[Codes] = field(default_factory=lambda: RecordingCache(max_bytes=_CODES_BYTES))
    states: RecordingCache[DecoderState] = field(  # by key and codes, because two replicas' encoders may differ
        default_factory=lambda: RecordingCache(max_bytes=_STATE_BYTES, size=_state_bytes)
    )

    @property
    def decoder(self) -> CodecDecoder:
        """The decoder. With `inline` placement, the first use loads it, which blocks."""
        return self.load_decoder()

    def read(self, reference: Reference) -> tuple[Codes, DecoderState]:
        """Return codes [frames, num_code_groups] of a recording, and the decoder's state after the codes."""
        codes = self.codes(reference)
        return codes, self.states.get(
            reference.key + codes.tobytes(), lambda: self.decoder.state_after(torch.from_numpy(codes).long())
        )

    def find(self, reference: Reference) -> tuple[Codes, DecoderState] | None:
        """Return the cached result of `read` for a recording without samples, or None."""
        codes = None if reference.prompt is None else reference.prompt.codes
        state = None if codes is None else self.states.find(reference.key + codes.tobytes())
        return None if codes is None or state is None else (codes, state)

    def codes(self, reference: Reference) -> Codes:
        """Return codes [frames, num_code_groups] of a recording. Raises InvalidRequest if the codec has no encoder."""
        if reference.prompt is not None:
            assert reference.prompt.codes is not None, "the ingress sends samples if codes are missing"
            return reference.prompt.codes.copy()  # torch requires writable arrays
        if self.encoder is None:
            raise InvalidRequest("this checkpoint has no speech encoder, so it cannot clone a recording", "ref_audio")
        encoder = self.encoder
        return self.references.get(reference.key, lambda: encoder.encode(reference.samples))

    def forget(self, voices: tuple[bytes, ...]) -> int:
        """Drop the codes and states of `voices`. Returns the number of results dropped. See `RecordingCache.forget`."""
        return self.references.forget(voices) + self.states.forget(voices)


def _state_bytes(state: DecoderState) -> int:
    return sum(tensor.nbytes for tensor in state.tensors)


def load_codec(model: str, config: CodecConfig) -> Codec:
    """Find and load the speech tokenizer of `model`. Raises CheckpointError."""
    is_inline = config.placement == "inline"
    torch.set_num_threads(_INLINE_THREADS if is_inline else 1)
    checkpoint = locate(model, report=lambda line: report_stage(f"codec: {line}"))
    directory = checkpoint / "speech_tokenizer"
    _check_precision(directory, config)
    load = _once(partial(_load_decoder, directory, config))
    encoder = CodecEncoder.load(directory) if encodes(checkpoint) else None
    warm_up_result = WarmUpResult()
    if not is_inline:  # otherwise this replica only encodes recordings, and only for talkers on CPUs
        decoder = load()
        if not decodes_in_processes(config):
            warm_up_result = warm_up(decoder, chosen_ramp(config.workers), longest_call_s(config.workers))
    return Codec(directory, SpeechTokenizerConfig.load(directory), load, encoder, warm_up_result)


def device_of(config: CodecConfig) -> str:
    """Return the device of a codec replica's decoder, "cpu" or a CUDA device."""
    return "cuda" if config.device == "auto" and torch.cuda.is_available() else config.device.replace("auto", "cpu")


def decodes_in_processes(config: CodecConfig) -> bool:
    """Return whether a replica's workers are processes. Worker processes run their own warm-up."""
    return config.workers > 1 and config.placement != "inline" and device_of(config) == "cpu"


def _once(load: Callable[[], CodecDecoder]) -> Callable[[], CodecDecoder]:
    """Return a function that calls `load` once, even if several threads call it together."""
    lock, loaded = Lock(), cache(load)

    def locked() -> CodecDecoder:
        with lock:
            return loaded()

    return locked


def _check_precision(directory: Path, config: CodecConfig) -> None:
    """Raise StartError if the device does not support the configured precision."""
    device = torch.device(device_of(config))
    backend = choose_decoders(SpeechTokenizerConfig.load(directory), device).backend
    if config.precision not in ("auto", "float32", *backend.precisions(device)):
        needed = {"bfloat16": "a CPU with AVX512-BF16 or AMX"}.get(config.precision, "a GPU")
        raise StartError(
            f"codec.precision: {config.precision} needs {needed}, which this machine lacks: set auto or float32"
        )


def _load_decoder(directory: Path, config: CodecConfig) -> CodecDecoder:
    decoder = _choose_precision(load_decoder(directory, device=device_of(config)), config)
    metrics.PRECISION.record(1, pool="codec", precision=decoder.precision)
    if decoder.backend.advice:
        report_stage(f"codec: {decoder.backend.advice}")
    return decoder


def _choose_precision(exact: CodecDecoder, config: CodecConfig) -> CodecDecoder:
    if config.precision != "auto":
        return exact if config.precision == exact.precision else CodecDecoder(exact.backend.at(config.precision))
    failed = ""
    for precision in exact.backend.precisions(exact.device):
        rounded = CodecDecoder(exact.backend.at(precision))
        ratio_db = probe_snr_db(rounded, exact)
        if ratio_db >= MIN_SNR_DB:
            report_stage(f"codec: {describe_choice(precision, ratio_db)}")
            return rounded
        failed += f", {precision} {ratio_db:.1f} dB"
    report_stage(f"codec: {describe_choice(exact.precision, inf, failed)}")
    return exact


def probe_snr_db(decoder: CodecDecoder, exact: CodecDecoder) -> float:
    """Return a decoder's signal-to-error ratio in dB on random codes with a fixed seed.

    The result does not depend on timing, so all replicas choose the same precision.
    """
    config = decoder.config
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(config.codebook_size, (1, _PROBE_FRAMES, config.num_quantizers), generator=generator)
    (audio, _), (exact_audio, _) = (each.decode(codes, [each.initial_state()]) for each in (decoder, exact))
    return snr_db(exact_audio, audio)
