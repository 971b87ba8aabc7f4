"""Recordings that clients send for cloning, decoded under resource limits to mono at the model's sample rate."""

import asyncio
import binascii
import hashlib
import string
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import BytesIO
from typing import Any, get_args

import numpy as np
import soxr
from numpy.typing import NDArray

from deployments.errors import InvalidRequest, PayloadTooLarge
from deployments.protocol import ModelInfo, Reference
from deployments.recording_cache import Lookups, RecordingCache
from deployments.serving import metrics
from serve_app.audio.clone_prompts import PROMPTS, Decode, Preparation, with_prompt

PREPARATIONS: tuple[Preparation, ...] = get_args(Preparation)

# Excludes playlists and other formats that open more files. Protocols are also disabled.
DEMUXERS = "aac,ac3,aiff,amr,asf,au,caf,flac,matroska,mov,mp3,ogg,w64,wav,webm"
# Excludes image decoders, because opening a file probes all its streams, and a cover image may claim any size.
DECODERS = (
    "aac,ac3,adpcm_ima_qt,adpcm_ima_wav,adpcm_ms,alac,amrnb,amrwb,flac,libopus,libvorbis,mp3,mp3float,opus,pcm_alaw,"
    "pcm_f32be,pcm_f32le,pcm_f64be,pcm_f64le,pcm_mulaw,pcm_s16be,pcm_s16le,pcm_s24be,pcm_s24le,pcm_s32be,pcm_s32le,"
    "pcm_s8,pcm_u8,vorbis,wmav1,wmav2"
)
OPEN_OPTIONS = {
    "format_whitelist": DEMUXERS,
    "codec_whitelist": DECODERS,
    "protocol_whitelist": "none",
    "max_streams": "8",
}
MAX_BYTES = 10 << 20  # of the file, before base64 encoding
MIN_SECONDS, MAX_SECONDS = 0.5, 30.0
_MOST = 1e6  # maximum sample; the spectrum of much larger samples overflows float32 and turns the voice into NaN
TIMEOUT_S = 10.0  # for decoding
MAX_CHANNELS = 8
_PLAIN_WAV = ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE")
MIN_SAMPLE_RATE, MAX_SAMPLE_RATE = 4000, 192_000

# Separate from the threads that encode audio for other clients, so uploads cannot block them.
_DECODING = ThreadPoolExecutor(2, "reference-audio")
# Decoded recordings, keyed by content, because clients may send a recording with every request. Holds 11 minutes.
_DECODED: RecordingCache[NDArray[np.float32]] = RecordingCache(max_bytes=64 << 20)


async def prepare_reference(
    ref_audio: str, text: str | None, info: ModelInfo, *, x_vector_only: bool, prepare: Decode | None = None
) -> Reference:
    """Prepare a recording for replicas: its prompt if known, otherwise its samples. `prepare` replaces `decode_file`.
    Raises the errors of `decode_reference`.

    Decoding runs off the event loop with limited concurrency, and only once for identical recordings.
    """
    loop = asyncio.get_running_loop()
    reference = await loop.run_in_executor(_DECODING, _read, ref_audio, text, info, x_vector_only, prepare)
    known = reference.prompt is not None
    metrics.record_recording_lookups("prompt", Lookups(hits=int(known), misses=int(not known)))
    return reference


def _read(ref_audio: str, text: str | None, info: ModelInfo, x_vector_only: bool, prepare: Decode | None) -> Reference:
    sent = hashlib.sha256(f"{info.name} {info.sample_rate} {'prepared ' if prepare else ''}".encode())
    sent.update(ref_audio.encode(errors="surrogatepass"))
    reference = with_prompt(Reference(None, text, x_vector_only=x_vector_only, key=sent.digest()))
    if reference.prompt is not None:
        return reference
    audio = _DECODED.get(reference.key, lambda: decode_reference(ref_audio, info.sample_rate, prepare or decode_file))
    return replace(reference, audio=audio)


def read_flac(key: bytes, load: Callable[[], bytes], sample_rate: int) -> NDArray[np.float32]:
    """Return the samples of a stored mono recording, in the format of `decode_reference`. Blocks."""
    import soundfile

    def read() -> NDArray[np.float32]:
        audio, rate = soundfile.read(BytesIO(load()), dtype="float32")
        return _resampled(audio, rate, sample_rate)

    return _DECODED.get(key, read)


def forget(voices: Iterable[bytes]) -> int:
    """Drop all samples and prompts for these voices, and return how many were dropped."""
    return _DECODED.forget(voices) + PROMPTS.forget(voices)


def _resampled(audio: NDArray[np.float32], rate: int, sample_rate: int) -> NDArray[np.float32]:
    if rate == sample_rate:
        return audio
    return np.ascontiguousarray(soxr.resample(audio, rate, sample_rate, "HQ"), np.float32)


def decode_file(data: bytes, field: str) -> tuple[NDArray[np.float32], int]:
    """Decode mono float32 [samples] at the file's own rate, and return this rate too. Raises InvalidRequest about
    `field`.
    """
    audio, rate = _read_wav(data, field) or _decode(data, field)
    if audio.size < MIN_SECONDS * rate:
        raise _unusable(field, f"the recording is shorter than {MIN_SECONDS:g} seconds")
    if not (np.abs(audio) <= _MOST).all():  # NaN fails this too
        raise _unusable(field, "the samples exceed full scale (1.0) or are not finite")
    return audio, rate


def decode_reference(ref_audio: str, sample_rate: int, decode: Decode = decode_file) -> NDArray[np.float32]:
    """Decode to float32 [samples] at `sample_rate`. Blocks too long to run on an event loop. Raises InvalidRequest,
    PayloadTooLarge.
    """
    return _resampled(*decode(_payload(ref_audio), "ref_audio"), sample_rate)


def _unusable(field: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{field} cannot be used: {reason}.", field)


def _payload(ref_audio: str) -> bytes:
    """Decode the file in a data URL or in plain base64."""
    head, comma, encoded = ref_audio.partition(",") if ref_audio[:5].lower() == "data:" else ("", ",", ref_audio)
    if not comma or (head and not head.lower().endswith(";base64")):
        raise _unusable("ref_audio", "a data URL must have the form data:audio/...;base64,...")
    if not encoded.isascii() or any(space in encoded for space in string.whitespace):
        encoded = "".join(encoded.split())
    if len(encoded) // 4 * 3 > MAX_BYTES + 2:
        raise PayloadTooLarge(f"ref_audio is larger than {MAX_BYTES} bytes.", "ref_audio")
    try:
        return binascii.a2b_base64(encoded, strict_mode=True)
    except (binascii.Error, ValueError) as error:
        raise _unusable("ref_audio", "send a data URL or base64; other URLs and paths are not read") from error


def _read_wav(data: bytes, field: str) -> tuple[NDArray[np.float32], int] | None:
    """Return the result of `_decode` in a tenth of the time, or None if the file is not an uncompressed WAV."""
    import soundfile

    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return None
    try:
        with soundfile.SoundFile(BytesIO(data)) as file:
            if file.subtype not in _PLAIN_WAV:
                return None
            _check_frame(field, file.channels, file.samplerate, 0)
            most = int(MAX_SECONDS * file.samplerate)
            samples = file.read(most + 1, dtype="float32", always_2d=True)  # regardless of the length in the header
    except soundfile.LibsndfileError:
        return None
    if len(samples) > most:
        raise _unusable(field, f"the recording is longer than {MAX_SECONDS:g} seconds")
    return (_mono(samples.T), file.samplerate) if len(samples) else None


def _decode(data: bytes, field: str) -> tuple[NDArray[np.float32], int]:
    """Decode the first audio stream to mono samples, and return their rate. Enforces the limits regardless of the
    headers.
    """
    import av

    deadline_s = time.monotonic() + TIMEOUT_S
    parts: list[NDArray[np.float32]] = []
    num_samples, rate = 0, 0
    to_float = av.AudioResampler(format="flt")  # packed: PyAV 18.1 reads beyond the pointers of eight planes
    try:
        with av.open(BytesIO(data), mode="r", options=OPEN_OPTIONS) as container:
            for frame in container.decode(audio=0):
                _check_frame(field, frame.layout.nb_channels, frame.sample_rate, rate)
                rate = frame.sample_rate
                num_samples += frame.samples
                if num_samples > MAX_SECONDS * rate:
                    raise _unusable(field, f"the recording is longer than {MAX_SECONDS:g} seconds")
                if time.monotonic() > deadline_s:
                    raise _unusable(field, f"decoding takes longer than {TIMEOUT_S:g} seconds")
                channels = frame.layout.nb_channels
                parts += [_mono(part.to_ndarray().reshape(-1, channels).T) for part in to_float.resample(frame)]
    except (av.FFmpegError, ValueError, IndexError) as error:
        raise _unusable(field, "the file is not in a supported audio format") from error
    if not parts:
        raise _unusable(field, "the file contains no audio")
    return np.concatenate(parts), rate


def _mono(channels: NDArray[Any]) -> NDArray[np.float32]:
    """Average float32 [channels, samples]. Infinities of both signs give NaN, which is rejected later."""
    with np.errstate(invalid="ignore", over="ignore"):
        mean: NDArray[np.float32] = channels[0] if len(channels) == 1 else channels.mean(axis=0)
    return mean


def _check_frame(field: str, num_channels: int, rate: int, rate_before: int) -> None:
    if num_channels > MAX_CHANNELS or not MIN_SAMPLE_RATE <= rate <= MAX_SAMPLE_RATE:
        raise _unusable(field, f"use at most {MAX_CHANNELS} channels and {MIN_SAMPLE_RATE} to {MAX_SAMPLE_RATE} Hz")
    if rate_before not in (0, rate):
        raise _unusable(field, "the sample rate changes within the file")
