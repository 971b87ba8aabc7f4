"""Audio formats: one encoder per response turns s16le mono PCM into the bytes of a stream, as they come."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np

UNKNOWN_LENGTH = 0xFFFFFFFF  # what players take for "until the end"; 0 would be an empty file
OPUS_RATES = (8000, 12000, 16000, 24000, 48000)


class AudioFormat(StrEnum):
    """`response_format` of a request."""

    MP3 = "mp3"
    OPUS = "opus"
    AAC = "aac"
    FLAC = "flac"
    WAV = "wav"
    PCM = "pcm"


class Encoder(Protocol):
    """Samples in, bytes of the container out. Not to be used after `close`."""

    def encode(self, pcm: bytes) -> bytes:
        """What `pcm` (s16le, mono, whole samples) makes available; may be empty."""
        ...

    def close(self) -> bytes:
        """What was held back, and the container's end."""
        ...


class PcmEncoder:
    """No container."""

    def encode(self, pcm: bytes) -> bytes:
        """The samples themselves."""
        return pcm

    def close(self) -> bytes:
        """Nothing is held back."""
        return b""


class WavEncoder:
    """A RIFF header before the first sample; its sizes are exact when `num_bytes` of audio are announced."""

    def __init__(self, sample_rate: int, num_bytes: int | None = None) -> None:
        self._header = wav_header(sample_rate, num_bytes)

    def encode(self, pcm: bytes) -> bytes:
        """The samples, behind the header the first time."""
        return self._take_header() + pcm if pcm else b""

    def close(self) -> bytes:
        """The header, if there was no audio at all."""
        return self._take_header()

    def _take_header(self) -> bytes:
        header, self._header = self._header, b""
        return header


def wav_header(sample_rate: int, num_bytes: int | None = None) -> bytes:
    """44 bytes in front of s16le mono audio; None: a stream of unknown length."""
    riff_size, data_size = (UNKNOWN_LENGTH,) * 2 if num_bytes is None else (36 + num_bytes, num_bytes)
    fmt = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, sample_rate, sample_rate * 2, 2, 16)
    return struct.pack("<4sI4s", b"RIFF", riff_size, b"WAVE") + fmt + struct.pack("<4sI", b"data", data_size)


class _Sink:
    """A file that cannot seek, so that no muxer goes back to rewrite bytes that have been sent."""

    def __init__(self) -> None:
        self._written = bytearray()

    def write(self, data: bytes) -> int:
        self._written += data
        return len(data)

    def take(self) -> bytes:
        taken = bytes(self._written)
        self._written.clear()
        return taken


@dataclass(frozen=True, slots=True)
class Codec:
    """How PyAV makes one compressed format."""

    container: str
    codec: str
    bit_rate: int | None = None
    codec_options: Mapping[str, str] = field(default_factory=dict)
    container_options: Mapping[str, str] = field(default_factory=dict)


CODECS = {
    # Below 128 kbit/s an MP3 decoder waits longer for its first frame. ID3 and Xing headers need the whole file.
    AudioFormat.MP3: Codec(
        "mp3", "libmp3lame", 128_000, {"compression_level": "7"}, {"id3v2_version": "0", "write_xing": "0"}
    ),
    AudioFormat.OPUS: Codec(
        "ogg",
        "libopus",
        48_000,
        {"application": "audio", "vbr": "constrained", "compression_level": "5"},
        {"page_duration": "20000"},  # microseconds
    ),
    AudioFormat.AAC: Codec("adts", "aac", 64_000),
    AudioFormat.FLAC: Codec("flac", "flac", container_options={"metadata_header_padding": "0"}),
}


class CodecEncoder:
    """A compressed format through PyAV."""

    def __init__(self, codec: Codec, sample_rate: int, frame_samples: int) -> None:
        import av
        from av.audio.stream import AudioStream

        self._sample_rate = sample_rate
        self._num_samples = 0
        self._sink = _Sink()
        options = {**codec.container_options, "flush_packets": "1"}
        self._container = av.open(self._sink, mode="w", format=codec.container, options=options, buffer_size=256)
        rate = sample_rate if codec.codec != "libopus" or sample_rate in OPUS_RATES else max(OPUS_RATES)
        # frame_size is for FLAC, which would otherwise collect several codec frames; the others have a fixed one.
        codec_options = {**codec.codec_options, "frame_size": str(frame_samples)}
        stream = self._container.add_stream(codec.codec, rate=rate, options=codec_options, layout="mono")
        assert isinstance(stream, AudioStream)
        self._stream = stream
        if codec.bit_rate is not None:
            self._stream.bit_rate = codec.bit_rate

    def encode(self, pcm: bytes) -> bytes:
        """Compressed frames as far as `pcm` completes them."""
        if not pcm:
            return b""
        from av import AudioFrame

        samples = np.frombuffer(pcm, "<i2")[np.newaxis]
        frame = AudioFrame.from_ndarray(samples, format="s16", layout="mono")
        frame.sample_rate, frame.pts = self._sample_rate, self._num_samples
        self._num_samples += samples.shape[1]
        self._container.mux(self._stream.encode(frame))
        return self._sink.take()

    def close(self) -> bytes:
        """The codec's delay and the container's last page."""
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._sink.take()


def open_encoder(
    audio_format: AudioFormat, sample_rate: int, *, frame_samples: int, num_bytes: int | None = None
) -> Encoder:
    """An encoder for one response; `num_bytes` of PCM, where known, go into the WAV header."""
    if audio_format is AudioFormat.PCM:
        return PcmEncoder()
    if audio_format is AudioFormat.WAV:
        return WavEncoder(sample_rate, num_bytes)
    return CodecEncoder(CODECS[audio_format], sample_rate, frame_samples)
