"""The recording a client sends to be cloned: decoded within limits, mono, at the model's sample rate."""

import base64
import binascii
from io import BytesIO

import numpy as np
import soxr
from numpy.typing import NDArray

from deployments.errors import InvalidRequest, PayloadTooLarge
from serve_app.api_settings import ApiSettings

# Playlists and other formats that open further files are not among them; no protocol is allowed either.
DEMUXERS = "aac,ac3,aiff,amr,asf,au,caf,flac,matroska,mov,mp3,ogg,w64,wav,webm"
OPEN_OPTIONS = {"format_whitelist": DEMUXERS, "protocol_whitelist": "none"}
MAX_CHANNELS = 8
MAX_SAMPLE_RATE = 192_000


def decode_reference(ref_audio: str, sample_rate: int, *, settings: ApiSettings) -> NDArray[np.float32]:
    """float32 [samples] at `sample_rate`. Raises InvalidRequest, PayloadTooLarge. Takes too long for an event loop."""
    audio, recorded_rate = _decode(_payload(ref_audio, settings.max_reference_bytes), settings.max_reference_seconds)
    if audio.size < settings.min_reference_seconds * recorded_rate:
        raise _bad(f"shorter than {settings.min_reference_seconds:g} seconds")
    if not np.isfinite(audio).all():
        raise _bad("it has samples that are not numbers")
    resampled = soxr.resample(audio, recorded_rate, sample_rate, "HQ")
    return np.ascontiguousarray(resampled, np.float32)


def _bad(reason: str) -> InvalidRequest:
    return InvalidRequest(f"ref_audio cannot be used: {reason}.", "ref_audio")


def _payload(ref_audio: str, max_bytes: int) -> bytes:
    """The file inside a data URL or plain base64."""
    head, comma, encoded = ref_audio.partition(",") if ref_audio[:5].lower() == "data:" else ("", ",", ref_audio)
    if not comma or (head and not head.lower().endswith(";base64")):
        raise _bad("a data URL must read data:audio/...;base64,...")
    encoded = "".join(encoded.split())
    if len(encoded) // 4 * 3 > max_bytes + 2:
        raise PayloadTooLarge(f"ref_audio is larger than {max_bytes} bytes.", "ref_audio")
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _bad("send a data URL or base64; paths and URLs are not opened") from error


def _decode(data: bytes, max_seconds: float) -> tuple[NDArray[np.float32], int]:
    """Mono samples and their rate, of the first audio stream. Stops at `max_seconds`, whatever the file promises."""
    import av

    parts: list[NDArray[np.float32]] = []
    num_samples, rate = 0, 0
    to_float = av.AudioResampler(format="fltp")
    try:
        with av.open(BytesIO(data), mode="r", options=OPEN_OPTIONS) as container:
            for frame in container.decode(audio=0):
                rate = frame.sample_rate
                num_samples += frame.samples
                _check_frame(frame.layout.nb_channels, rate)
                if num_samples > max_seconds * rate:
                    raise _bad(f"longer than {max_seconds:g} seconds")
                parts += [part.to_ndarray().mean(axis=0) for part in to_float.resample(frame)]
    except (av.FFmpegError, ValueError, IndexError) as error:
        raise _bad("it is no audio file of a known format") from error
    return np.concatenate(parts) if parts else np.zeros(0, np.float32), rate


def _check_frame(num_channels: int, rate: int) -> None:
    if num_channels > MAX_CHANNELS or rate > MAX_SAMPLE_RATE:
        raise _bad(f"more than {MAX_CHANNELS} channels or {MAX_SAMPLE_RATE} Hz")
