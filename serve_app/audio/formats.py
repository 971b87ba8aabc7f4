"""Encodes responses: converts streamed s16le mono PCM to the requested speed, sample rate and format."""

import asyncio
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from functools import cache
from io import BytesIO
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from deployments.errors import InvalidRequest
from serve_app.audio.file_headers import DISCLOSURE, id3_tag, wav_header, with_flac_length

if TYPE_CHECKING:
    from av import AudioFrame

_STEP = 1 << 20  # bytes of a complete body encoded at a time
OutputRate = Literal[8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000]  # all formats support these rates


class AudioFormat(StrEnum):
    """`response_format` of a request."""

    MP3 = "mp3"
    OPUS = "opus"
    AAC = "aac"
    FLAC = "flac"
    WAV = "wav"
    PCM = "pcm"
    MULAW = "mulaw"  # G.711, 8 bits per sample, as in telephony
    ALAW = "alaw"
    FLOAT = "pcm_f32le"


@dataclass(frozen=True, slots=True)
class AudioOptions:
    """Audio format and options requested for a response."""

    audio_format: AudioFormat
    whole: bool = False  # one complete body of known length instead of a stream
    speed: float = 1.0
    sample_rate: int | None = None  # None: the model's sample rate
    bit_rate: int | None = None  # None: the format's default
    in_wav: bool = False  # raw format with a RIFF header
    disclosed: bool = False  # mark the speech as synthetic


@cache
def mulaw_table() -> NDArray[np.uint8]:
    """Return the mu-law bytes of all samples, [65536] (ITU-T G.711): sign, exponent and mantissa of the biased value,
    inverted.
    """
    samples = np.arange(65536, dtype=np.uint16).view(np.int16).astype(np.int32)
    biased = np.minimum(np.abs(samples), 32635) + 0x84
    exponent = np.floor(np.log2(biased)).astype(np.int32) - 7
    mantissa = (biased >> (exponent + 3)) & 0x0F
    sign = np.where(samples < 0, 0x80, 0)
    coded: NDArray[np.uint8] = (~(sign | exponent << 4 | mantissa)).astype(np.uint8)
    return coded


@cache
def alaw_table() -> NDArray[np.uint8]:
    """Return the A-law bytes of all samples, [65536] (ITU-T G.711): 13-bit values with every second bit inverted."""
    samples = np.arange(65536, dtype=np.uint16).view(np.int16).astype(np.int32) >> 3
    magnitude = np.where(samples < 0, -samples - 1, samples)
    exponent = np.floor(np.log2(np.maximum(magnitude, 32))).astype(np.int32) - 4
    is_linear = magnitude < 32
    mantissa = np.where(is_linear, magnitude >> 1, (magnitude >> exponent) & 0x0F)
    sign = np.where(samples < 0, 0, 0x80)
    coded: NDArray[np.uint8] = ((sign | np.where(is_linear, 0, exponent) << 4 | mantissa) ^ 0x55).astype(np.uint8)
    return coded


@dataclass(frozen=True, slots=True)
class RawFormat:
    """Format with independently coded samples, either without a container or after a RIFF header."""

    content_type: str
    convert: Callable[[bytes], bytes]  # input: s16le mono PCM, whole samples
    riff_tag: int
    sample_bytes: int
    in_wav: bool = False  # the header is always present


@dataclass(frozen=True, slots=True)
class CompressedFormat:
    """Compressed format that PyAV encodes."""

    content_type: str
    container: str
    codec: str
    bit_rate: int | None = None
    bit_rates: tuple[int, int] | None = None  # lowest and highest bit rate in mono
    codec_options: Mapping[str, str] = field(default_factory=dict)
    container_options: Mapping[str, str] = field(default_factory=dict)
    rates: tuple[int, ...] = ()  # sample rates of the encoder; empty: all
    says_length: bool = False  # the header contains the length if it is known
    rewrites_header: bool = False  # the muxer writes the length into the header at the end (LAME, for MP3)
    has_comments: bool = False  # the container has Vorbis comments
    has_id3: bool = False  # players expect ID3 tags before the audio


FORMATS: dict[AudioFormat, RawFormat | CompressedFormat] = {
    # Below 128 kbit/s, MP3 decoders wait longer for the first frame.
    AudioFormat.MP3: CompressedFormat(
        "audio/mpeg",
        "mp3",
        "libmp3lame",
        128_000,
        (8_000, 320_000),
        {"compression_level": "7"},
        {"id3v2_version": "0"},
        rewrites_header=True,
        has_id3=True,
    ),
    AudioFormat.OPUS: CompressedFormat(
        "audio/ogg",
        "ogg",
        "libopus",
        48_000,
        (6_000, 256_000),
        {"application": "audio", "vbr": "constrained", "compression_level": "5"},
        {"page_duration": "20000"},  # microseconds
        rates=(8000, 12000, 16000, 24000, 48000),
        has_comments=True,
    ),
    AudioFormat.AAC: CompressedFormat("audio/aac", "adts", "aac", 64_000, (6_000, 512_000)),
    AudioFormat.FLAC: CompressedFormat(
        "audio/flac",
        "flac",
        "flac",
        container_options={"metadata_header_padding": "0"},
        says_length=True,
        has_comments=True,
    ),
    AudioFormat.WAV: RawFormat("audio/wav", bytes, 1, 2, in_wav=True),
    AudioFormat.PCM: RawFormat("audio/pcm", bytes, 1, 2),
    AudioFormat.MULAW: RawFormat("audio/basic", lambda pcm: mulaw_table()[np.frombuffer(pcm, "<u2")].tobytes(), 7, 1),
    AudioFormat.ALAW: RawFormat(
        "audio/x-alaw-basic", lambda pcm: alaw_table()[np.frombuffer(pcm, "<u2")].tobytes(), 6, 1
    ),
    AudioFormat.FLOAT: RawFormat(
        "audio/x-float32", lambda pcm: (np.frombuffer(pcm, "<i2").astype("<f4") / 32768).tobytes(), 3, 4
    ),  # from -1 to 1
}


def check_bit_rate(audio_format: AudioFormat, bit_rate: int) -> None:
    """Raise InvalidRequest if the format's encoder does not support this rate. Formats without a bit rate pass."""
    row = FORMATS[audio_format]
    if isinstance(row, RawFormat) or row.bit_rates is None:
        return
    least, most = row.bit_rates
    if not least <= bit_rate <= most:
        message = f"bit_rate: {bit_rate} bit/s is not supported. For {audio_format}, use {least} to {most}."
        raise InvalidRequest(message, "bit_rate")


def kept_bytes(audio_format: AudioFormat) -> int:
    """Return the memory in bytes per sample of a complete response. PCM is kept, and the response may be larger."""
    row = FORMATS[audio_format]
    return max(2, row.sample_bytes) if isinstance(row, RawFormat) else 2


class RawEncoder:
    """Encoder for raw samples, preceded by a header. Do not use it after `close`."""

    def __init__(self, raw: RawFormat, header: bytes = b"") -> None:
        self._convert, self._header = raw.convert, header

    def encode(self, pcm: bytes) -> bytes:
        """Encode `pcm` (s16le, mono, whole samples) in this format."""
        return self._take_header() + self._convert(pcm) if pcm else b""

    def close(self) -> bytes:
        """Return the header if there was no audio, otherwise nothing."""
        return self._take_header()

    def _take_header(self) -> bytes:
        header, self._header = self._header, b""
        return header


class _Sink:
    """File without seek, so that muxers cannot rewrite bytes that have already been sent."""

    def __init__(self) -> None:
        self._out = bytearray()

    def write(self, data: bytes) -> int:
        self._out += data
        return len(data)

    def take(self) -> bytes:
        encoded = bytes(self._out)
        self._out.clear()
        return encoded


class CompressedEncoder:
    """PyAV encoder that converts s16le mono PCM to bytes of the container. Do not use it after `close`."""

    def __init__(
        self,
        codec: CompressedFormat,
        form: AudioOptions,
        sample_rate: int,
        *,
        frame_samples: int,
        num_bytes: int | None,
    ) -> None:
        """Create the encoder. Parameters: see `open_encoder`."""
        import av
        from av.audio.stream import AudioStream

        self._sample_rate = sample_rate
        self._num_samples = 0
        self._announced = num_bytes // 2 if num_bytes and codec.says_length else 0  # samples
        # The muxer rewrites the header at the end, so all bytes are kept until then.
        self._sink = BytesIO() if codec.rewrites_header and num_bytes is not None else _Sink()
        self._tag = id3_tag() if form.disclosed and codec.has_id3 else b""
        options = {**codec.container_options, "flush_packets": "1"}
        self._container = av.open(self._sink, mode="w", format=codec.container, options=options, buffer_size=256)
        rate = max(codec.rates) if codec.rates and sample_rate not in codec.rates else sample_rate
        # Without frame_size, FLAC would collect several codec frames. The other codecs have a fixed frame size.
        codec_options = {**codec.codec_options, "frame_size": str(frame_samples)}
        stream = self._container.add_stream(codec.codec, rate=rate, options=codec_options, layout="mono")
        assert isinstance(stream, AudioStream)
        self._stream = stream
        if codec.bit_rate is not None:
            self._stream.bit_rate = form.bit_rate or codec.bit_rate
        if form.disclosed and codec.has_comments:
            self._container.metadata.update(DISCLOSURE)

    def encode(self, pcm: bytes) -> bytes:
        """Return the compressed frames that `pcm` completes."""
        if not pcm:
            return b""
        samples = np.frombuffer(pcm, "<i2")
        self._container.mux(self._stream.encode(_frame(samples, self._sample_rate, self._num_samples)))
        self._num_samples += samples.size
        return self._take()

    def close(self) -> bytes:
        """Return the audio still buffered in the encoder, and the container's last page."""
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._take(is_over=True)

    def _take(self, *, is_over: bool = False) -> bytes:
        if isinstance(self._sink, BytesIO):
            return self._tag + self._sink.getvalue() if is_over else b""
        encoded, self._tag = self._tag + self._sink.take(), b""
        if self._announced and encoded:
            encoded, self._announced = with_flac_length(encoded, self._announced), 0
        return encoded


def open_encoder(
    form: AudioOptions, sample_rate: int, *, frame_samples: int, num_bytes: int | None = None
) -> RawEncoder | CompressedEncoder:
    """Open an encoder for one response from PCM at `sample_rate`. If `num_bytes` of PCM is known, the headers of WAV,
    FLAC and MP3 contain the length, and MP3 is returned only at the end. `form.disclosed` adds tags in formats that
    support tags.
    """
    row = FORMATS[form.audio_format]
    if isinstance(row, CompressedFormat):
        return CompressedEncoder(row, form, sample_rate, frame_samples=frame_samples, num_bytes=num_bytes)
    if not (form.in_wav or row.in_wav):
        return RawEncoder(row)
    tag, size = row.riff_tag, row.sample_bytes
    return RawEncoder(row, wav_header(sample_rate, num_bytes, tag=tag, sample_bytes=size, disclosed=form.disclosed))


class Filter:
    """Filter that changes the speed and sample rate of streamed s16le mono PCM with a few milliseconds of delay. The
    output does not depend on how the input is split.
    """

    def __init__(self, sample_rate: int, *, speed: float = 1.0, output_rate: int | None = None) -> None:
        from av.filter import Graph

        self._sample_rate = sample_rate
        self._num_samples = 0
        # FFmpeg's atempo filter delays audio by about one input frame, so short frames keep long chunks from waiting.
        self._step = sample_rate // 50 if speed != 1 else sys.maxsize
        self._graph = Graph()
        time_base = Fraction(1, sample_rate)
        source = self._graph.add_abuffer(sample_rate=sample_rate, format="s16", layout="mono", time_base=time_base)
        steps = [self._graph.add("atempo", repr(factor)) for factor in factors(speed) if speed != 1]
        if output_rate not in (None, sample_rate):
            steps.append(self._graph.add("aformat", f"sample_fmts=s16:sample_rates={output_rate}:channel_layouts=mono"))
        self._graph.link_nodes(source, *steps, self._graph.add("abuffersink")).configure()

    def feed(self, pcm: bytes) -> bytes:
        """Return the audio that `pcm` makes available, which may be empty."""
        samples = np.frombuffer(pcm, "<i2")
        filtered = b""
        for start in range(0, samples.size, self._step):
            part = samples[start : start + self._step]
            self._graph.push(_frame(part, self._sample_rate, self._num_samples))
            self._num_samples += part.size
            filtered += self._pull()
        return filtered

    def close(self) -> bytes:
        self._graph.push(None)
        return self._pull()

    def _pull(self) -> bytes:
        from av import AudioFrame, error

        filtered = bytearray()
        while True:
            try:
                frame = self._graph.pull()
            except (error.BlockingIOError, error.EOFError):
                return bytes(filtered)
            assert isinstance(frame, AudioFrame)
            filtered += frame.to_ndarray().astype("<i2", copy=False).tobytes()


def _frame(samples: NDArray[np.int16], rate: int, position: int) -> "AudioFrame":
    """Return a stream's samples as a frame at `position`, in samples."""
    from av import AudioFrame

    frame = AudioFrame.from_ndarray(samples[np.newaxis], format="s16", layout="mono")
    frame.sample_rate, frame.pts, frame.time_base = rate, position, Fraction(1, rate)
    return frame


def factors(speed: float) -> list[float]:
    """Split `speed` into atempo steps of 0.5 to 2. A single step drops samples above 2, and values below 0.5 are not
    supported.
    """
    count = max(1, math.ceil(abs(math.log2(speed))))
    return [speed ** (1 / count)] * count


class Rendering:
    """Converts speed and sample rate, then encodes. Slow encoders run in a thread, off the event loop."""

    def __init__(self, form: AudioOptions, sample_rate: int, frame_samples: int) -> None:
        """Create the rendering of audio at `sample_rate` Hz in frames of `frame_samples` samples."""
        self._form, self._sample_rate, self._frame_samples = form, sample_rate, frame_samples
        self._output_rate = form.sample_rate or sample_rate
        self._speed = form.speed
        self._filter: Filter | None = None  # created with the first audio, if a filter is needed
        self._collected = bytearray()  # filtered PCM of a complete body
        self._encoder = None if form.whole else self._open()
        self._is_compressed = isinstance(FORMATS[form.audio_format], CompressedFormat)
        self._threaded = form.speed != 1 or self._is_compressed
        self.samples = 0  # passed to the encoder, at the output rate

    @property
    def num_kept(self) -> int:
        """Number of bytes of a complete body held until `close`."""
        return len(self._collected) // 2 * kept_bytes(self._form.audio_format)

    def set_speed(self, *, speed: float) -> None:
        """Set the speed of subsequent audio. Call this before the first audio, or directly after `drain`."""
        self._speed = speed
        self._threaded = speed != 1 or self._is_compressed

    async def feed(self, pcm: bytes) -> bytes:
        """Return the encoded bytes that `pcm` makes available. A complete body is returned only by `close`."""
        return await asyncio.to_thread(self._feed, pcm) if self._threaded and pcm else self._feed(pcm)

    async def drain(self) -> bytes:
        """Return as much of the remaining audio as the encoder emits. The next audio starts with a new filter."""
        return await asyncio.to_thread(self._drain) if self._threaded else self._drain()

    async def close(self) -> bytes:
        is_long = self._threaded or len(self._collected) > _STEP
        return await asyncio.to_thread(self._close) if is_long else self._close()

    def _feed(self, pcm: bytes) -> bytes:
        if pcm and self._filter is None and (self._speed != 1 or self._output_rate != self._sample_rate):
            self._filter = Filter(self._sample_rate, speed=self._speed, output_rate=self._output_rate)
        return self._encode(pcm if self._filter is None else self._filter.feed(pcm))

    def _drain(self) -> bytes:
        rest = b"" if self._filter is None else self._filter.close()
        self._filter = None
        return self._encode(rest)

    def _close(self) -> bytes:
        rest = self._drain()
        if self._encoder is not None:
            return rest + self._encoder.close()
        encoder = self._open(len(self._collected))
        pcm = memoryview(self._collected)
        parts = [encoder.encode(bytes(pcm[start : start + _STEP])) for start in range(0, len(pcm), _STEP)]
        parts.append(encoder.close())
        return b"".join(parts)

    def _encode(self, pcm: bytes) -> bytes:
        self.samples += len(pcm) // 2
        if self._encoder is not None:
            return self._encoder.encode(pcm)
        self._collected += pcm
        return b""

    def _open(self, num_bytes: int | None = None) -> RawEncoder | CompressedEncoder:
        return open_encoder(self._form, self._output_rate, frame_samples=self._frame_samples, num_bytes=num_bytes)
