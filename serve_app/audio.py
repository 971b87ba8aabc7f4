"""Audio of a response: speed and format turn s16le mono PCM into the bytes that are sent, as they come."""

import asyncio
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

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


class Tempo:
    """Plays s16le mono PCM `speed` times as fast, as it comes; the result does not depend on how the input is cut."""

    def __init__(self, speed: float, sample_rate: int) -> None:
        from av.filter import Graph

        self._sample_rate = sample_rate
        self._num_samples = 0
        self._graph = Graph()
        source = self._graph.add_abuffer(
            sample_rate=sample_rate, format="s16", layout="mono", time_base=Fraction(1, sample_rate)
        )
        steps = [self._graph.add("atempo", repr(factor)) for factor in factors(speed)]
        sink = self._graph.add("abuffersink")
        self._graph.link_nodes(source, *steps, sink).configure()

    def stretch(self, pcm: bytes) -> bytes:
        """The stretched audio that `pcm` makes available; may be empty."""
        samples = np.frombuffer(pcm, "<i2")[np.newaxis]
        # atempo holds back about as much as the frame it was given: short frames keep a long chunk from waiting.
        step = self._sample_rate // 50
        return b"".join([self._push(samples[:, start : start + step]) for start in range(0, samples.shape[1], step)])

    def close(self) -> bytes:
        """What was held back."""
        self._graph.push(None)
        return self._pull()

    def _push(self, samples: NDArray[np.int16]) -> bytes:
        from av import AudioFrame

        frame = AudioFrame.from_ndarray(samples, format="s16", layout="mono")
        frame.sample_rate, frame.pts = self._sample_rate, self._num_samples
        self._num_samples += samples.shape[1]
        self._graph.push(frame)
        return self._pull()

    def _pull(self) -> bytes:
        from av import AudioFrame, error

        stretched = bytearray()
        while True:
            try:
                frame = self._graph.pull()
            except (error.BlockingIOError, error.EOFError):
                return bytes(stretched)
            assert isinstance(frame, AudioFrame)
            stretched += frame.to_ndarray().astype("<i2", copy=False).tobytes()


def factors(speed: float) -> list[float]:
    """`speed` as atempo steps: one skips samples above 2 and does not go below 0.5, so two share what is beyond."""
    return [speed] if 0.5 <= speed <= 2 else [speed**0.5] * 2


class Rendering:
    """Speed, then encoding. What takes milliseconds runs in a thread, away from the other streams' event loop."""

    def __init__(
        self,
        audio_format: AudioFormat,
        sample_rate: int,
        frame_samples: int,
        *,
        speed: float = 1.0,
        whole: bool = False,
    ) -> None:
        """`whole`: one body of known length, which begins when all of it is there."""
        self._audio_format, self._sample_rate = audio_format, sample_rate
        self._frame_samples = frame_samples
        self._tempo = Tempo(speed, sample_rate) if speed != 1 else None
        self._collected = bytearray()  # stretched PCM of a whole body
        self._encoder: Encoder | None = None if whole else self._open()
        cheap = audio_format in (AudioFormat.PCM, AudioFormat.WAV)
        self._threaded = self._tempo is not None or not cheap

    async def feed(self, pcm: bytes) -> bytes:
        """The bytes that `pcm` makes available; none before `close` for a whole body."""
        return await asyncio.to_thread(self._feed, pcm) if self._threaded and pcm else self._feed(pcm)

    async def close(self) -> bytes:
        """The rest of the body."""
        return await asyncio.to_thread(self._close) if self._threaded else self._close()

    def _feed(self, pcm: bytes) -> bytes:
        return self._encode(self._tempo.stretch(pcm) if self._tempo else pcm)

    def _close(self) -> bytes:
        rest = self._encode(self._tempo.close()) if self._tempo else b""
        if self._encoder is not None:
            return rest + self._encoder.close()
        encoder = self._open(len(self._collected))
        return encoder.encode(bytes(self._collected)) + encoder.close()

    def _encode(self, pcm: bytes) -> bytes:
        if self._encoder is not None:
            return self._encoder.encode(pcm)
        self._collected += pcm
        return b""

    def _open(self, num_bytes: int | None = None) -> Encoder:
        return open_encoder(
            self._audio_format, self._sample_rate, frame_samples=self._frame_samples, num_bytes=num_bytes
        )
