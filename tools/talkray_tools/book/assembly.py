"""Assemble the audio parts of a book into one file with pauses, loudness, chapters, cover and tags, using PyAV.

Only one part is in memory at a time. Chapter times are computed from the parts' lengths before writing begins.
"""

import base64
import io
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import av
import numpy as np
import soundfile
from av.audio.stream import AudioStream
from av.filter import Graph
from av.stream import Disposition
from av.video.stream import VideoStream
from numpy.typing import NDArray

from deployments.errors import InvalidRequest
from serve_app.audio.file_headers import DISCLOSURE
from serve_app.cli.say import RefusedError

if TYPE_CHECKING:  # only defined for type checkers
    from av.container.core import Chapter as WrittenChapter

Float = NDArray[np.float32]

PEAK = 0.84  # of full scale; leaves 1.5 dB of headroom, because lossy formats overshoot
_SILENT_LUFS = -69.0  # the loudness meter reports -70 for silence
_LEAST_S = 3.0  # minimum seconds of audio for a loudness measurement
_MIME = {"mjpeg": "image/jpeg", "png": "image/png"}


@dataclass(frozen=True, slots=True)
class BookFormat:
    """Container, codec and options for one output format."""

    container: str
    codec: str
    bit_rate: int | None = None
    has_chapters: bool = False
    has_cover: bool = False  # whether the container stores the cover as a picture next to the audio
    options: Mapping[str, str] | None = None


# `ipod` is FFmpeg's name for m4b and does not accept JPEG. Players recognise an audiobook by the `M4B` brand.
BOOK_FORMATS = {
    ".m4b": BookFormat("mp4", "aac", 64_000, True, True, {"brand": "M4B ", "movflags": "+faststart"}),
    ".mp3": BookFormat("mp3", "libmp3lame", 64_000, True, True),
    ".opus": BookFormat("ogg", "libopus", 32_000, True),
    ".flac": BookFormat("flac", "flac", has_cover=True),
    ".wav": BookFormat("wav", "pcm_s16le", options={"rf64": "auto"}),
}


@dataclass(frozen=True, slots=True)
class Sound:
    """One part of the book: its audio file, its voice, and the silence before it."""

    audio: Path
    voice: str
    pause_s: float
    chapter: int
    speed: float = 1.0  # factor by which to speed up the audio


@dataclass(frozen=True, slots=True)
class Tags:
    """Book metadata for audio players."""

    title: str
    author: str = ""
    date: str = ""
    publisher: str = ""
    language: str = ""
    cover: bytes | None = None

    def told(self) -> dict[str, str]:
        named = {
            "title": self.title,
            "album": self.title,
            "artist": self.author,
            "album_artist": self.author,
            "date": self.date,
            "publisher": self.publisher,
            "language": self.language,
            "genre": "Audiobook",
            **DISCLOSURE,  # m4b supports only the comment field
        }
        return {name: value for name, value in named.items() if value}


@dataclass(frozen=True, slots=True)
class Timeline:
    """Start of each part and end of the last part, in samples."""

    starts: tuple[int, ...]
    end: int
    sample_rate: int

    def start_s(self, part: int) -> float:
        return self.starts[part] / self.sample_rate

    @property
    def length_s(self) -> float:
        return self.end / self.sample_rate


def book_format(file: Path) -> BookFormat:
    """Return the format for a file extension. Raises an `InvalidRequest` listing the supported extensions."""
    found = BOOK_FORMATS.get(file.suffix.lower())
    if found is None:
        raise InvalidRequest(f"{file}: the file extension must be one of {', '.join(BOOK_FORMATS)}", "output")
    return found


def timeline(sounds: Sequence[Sound]) -> Timeline:
    """Compute where each part begins. Raises `RefusedError` if the parts' sample rates differ."""
    infos = [soundfile.info(sound.audio) for sound in sounds]
    rates = {info.samplerate for info in infos}
    if len(rates) > 1:
        raise RefusedError(
            f"the parts come from several models, with sample rates {sorted(rates)} Hz: delete their folder"
        )
    rate, at, starts = rates.pop(), 0, []
    for sound, info in zip(sounds, infos, strict=True):
        at += round(sound.pause_s * rate)
        starts.append(at)
        at += info.frames
    return Timeline(tuple(starts), at, rate)


def chapter_starts(sounds: Sequence[Sound], times: Timeline) -> dict[int, float]:
    """Return the start of each chapter's first part in seconds. The first chapter starts at 0."""
    starts: dict[int, float] = {}
    for number, sound in enumerate(sounds):
        starts.setdefault(sound.chapter, times.start_s(number) if starts else 0.0)
    return starts


def gains(sounds: Sequence[Sound], target_lufs: float) -> dict[str, float]:
    """Return the gain for each voice so that the book, as an EBU R128 programme with pauses, has the target loudness.

    Voices are first adjusted to equal loudness.
    """
    factors = {sound.voice: 1.0 for sound in sounds}
    if len(factors) > 1:
        for voice in factors:
            own = [replace(sound, pause_s=0.0) for sound in sounds if sound.voice == voice]
            factors[voice] = _factor(_loudness(own, factors), target_lufs)
    whole = _factor(_loudness(sounds, factors), target_lufs)
    return {voice: factor * whole for voice, factor in factors.items()}


def _factor(loudness: float, target_lufs: float) -> float:
    return 1.0 if loudness < _SILENT_LUFS else float(10 ** ((target_lufs - loudness) / 20))


def _loudness(sounds: Sequence[Sound], factors: Mapping[str, float]) -> float:
    """Return the loudness of all sounds in LUFS. Audio too short to be measured is repeated."""
    rate, position, loudness = soundfile.info(sounds[0].audio).samplerate, 0, -70.0
    graph = _graph(rate, ("ebur128", "metadata=1"))
    num_samples = sum(soundfile.info(sound.audio).frames for sound in sounds)
    if not num_samples:
        return loudness
    for _ in range(math.ceil(_LEAST_S * rate / num_samples)):
        for sound in sounds:
            audio = _heard(sound, rate, factors)
            graph.push(_frame(audio, rate, position))
            position += audio.size
            loudness = _last_loudness(graph, loudness)
    graph.push(None)
    return _last_loudness(graph, loudness)


def _last_loudness(graph: Graph, before: float) -> float:
    for frame in _pulled(graph):
        before = float(frame.metadata.get("lavfi.r128.I", before))
    return before


def write_book(
    file: Path,
    sounds: Sequence[Sound],
    titles: Sequence[str],
    *,
    tags: Tags,
    factors: Mapping[str, float] | None = None,
    report: Callable[[int], object],
) -> None:
    """Write the book, and replace `file` once it is complete. Raises `RefusedError`.

    `titles` are the chapter titles, `factors` the gains of the voices. `report` receives the number of parts written.
    """
    new, kind = file.with_name(f".{file.name}.new"), book_format(file)
    try:
        with av.open(str(new), "w", format=kind.container, options=dict(kind.options or {})) as out:
            _write(out, kind, sounds, titles, tags=tags, factors=factors, report=report)
        new.replace(file)
    except OSError as error:
        raise RefusedError(f"{file} cannot be written: {error.strerror or error}") from None
    finally:
        new.unlink(missing_ok=True)


def _write(
    out: av.container.OutputContainer,
    kind: BookFormat,
    sounds: Sequence[Sound],
    titles: Sequence[str],
    *,
    tags: Tags,
    factors: Mapping[str, float] | None,
    report: Callable[[int], object],
) -> None:
    times = timeline(sounds)
    stream = out.add_stream(kind.codec, rate=times.sample_rate, layout="mono")
    assert isinstance(stream, AudioStream)
    if kind.bit_rate is not None:
        stream.bit_rate = kind.bit_rate
    for name, value in tags.told().items():
        out.metadata[name] = value
    if kind.has_chapters:
        out.set_chapters(_chapters(chapter_starts(sounds, times), titles, times.length_s))
    if tags.cover is not None and kind.has_cover:
        _add_picture(out, picture_of(tags.cover), tags.cover)
    elif tags.cover is not None and kind.container == "ogg":
        out.metadata["METADATA_BLOCK_PICTURE"] = _picture_block(picture_of(tags.cover), tags.cover)
    position = 0
    for audio in _levelled(_audio(sounds, times, factors or {}, report), times.sample_rate, limited=bool(factors)):
        out.mux(stream.encode(_frame(audio, times.sample_rate, position)))
        position += audio.size
    out.mux(stream.encode(None))


def _chapters(starts: Mapping[int, float], titles: Sequence[str], length_s: float) -> list["WrittenChapter"]:
    at_ms = [round(1000 * start_s) for start_s in starts.values()]
    ends_ms = [*at_ms[1:], round(1000 * length_s)]
    return [
        {
            "id": number,
            "start": start_ms,
            "end": end_ms,
            "time_base": Fraction(1, 1000),
            "metadata": {"title": titles[chapter]},
        }
        for number, (chapter, start_ms, end_ms) in enumerate(zip(starts, at_ms, ends_ms, strict=True))
    ]


def _audio(
    sounds: Sequence[Sound], times: Timeline, factors: Mapping[str, float], report: Callable[[int], object]
) -> Iterator[Float]:
    for number, sound in enumerate(sounds):
        yield _heard(sound, times.sample_rate, factors)
        report(number + 1)


def _heard(sound: Sound, sample_rate: int, factors: Mapping[str, float]) -> Float:
    pause = np.zeros(round(sound.pause_s * sample_rate), np.float32)
    return np.concatenate([pause, _samples(sound.audio) * np.float32(factors.get(sound.voice, 1.0))])


def _levelled(parts: Iterator[Float], sample_rate: int, *, limited: bool) -> Iterator[Float]:
    """Yield the parts with their lengths unchanged. Limits peaks to PEAK if a gain made the parts louder."""
    if not limited:
        yield from parts
        return
    graph = _graph(sample_rate, ("alimiter", f"limit={PEAK}:attack=5:release=60:level=false:latency=true"))
    position = 0
    for part in parts:
        graph.push(_frame(part, sample_rate, position))
        position += part.size
        yield from (frame.to_ndarray()[0] for frame in _pulled(graph))
    graph.push(None)
    yield from (frame.to_ndarray()[0] for frame in _pulled(graph))


def _graph(sample_rate: int, step: tuple[str, str]) -> Graph:
    graph = Graph()
    time_base = Fraction(1, sample_rate)
    source = graph.add_abuffer(sample_rate=sample_rate, format="flt", layout="mono", time_base=time_base)
    form = graph.add("aformat", f"sample_fmts=flt:sample_rates={sample_rate}:channel_layouts=mono")
    graph.link_nodes(source, graph.add(*step), form, graph.add("abuffersink")).configure()
    return graph


def _pulled(graph: Graph) -> Iterator[av.AudioFrame]:
    while True:
        try:
            frame = graph.pull()
        except (av.BlockingIOError, av.EOFError):
            return
        assert isinstance(frame, av.AudioFrame)
        yield frame


def _samples(file: Path) -> Float:
    audio: Float = soundfile.read(file, dtype="float32", always_2d=True)[0][:, 0]
    return audio


def _frame(samples: Float, rate: int, position: int) -> av.AudioFrame:
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples)[np.newaxis], format="flt", layout="mono")
    frame.sample_rate, frame.pts, frame.time_base = rate, position, Fraction(1, rate)
    return frame


@dataclass(frozen=True, slots=True)
class CoverPicture:
    """Codec and size of a cover, in FFmpeg's terms."""

    codec: str
    width: int
    height: int


def picture_of(content: bytes) -> CoverPicture:
    """Detect a cover's format. Raises `InvalidRequest` if the cover is neither JPEG nor PNG."""
    form = "jpeg_pipe" if content[:2] == b"\xff\xd8" else "png_pipe" if content[:4] == b"\x89PNG" else None
    if form is None:
        raise InvalidRequest("the cover is neither JPEG nor PNG", "cover")
    try:
        with av.open(io.BytesIO(content), format=form) as opened:
            video = opened.streams.video[0]
            found = CoverPicture("mjpeg" if form == "jpeg_pipe" else "png", video.width, video.height)
    except (av.FFmpegError, IndexError) as error:
        raise InvalidRequest(f"the cover is a damaged picture: {error}", "cover") from None
    if not (found.width and found.height):
        raise InvalidRequest("the cover is a damaged picture: its width or height is zero", "cover")
    return found


def _add_picture(out: av.container.OutputContainer, picture: CoverPicture, content: bytes) -> None:
    stream = out.add_stream(picture.codec, rate=1)
    assert isinstance(stream, VideoStream)
    stream.width, stream.height = picture.width, picture.height
    stream.pix_fmt = "yuvj420p" if picture.codec == "mjpeg" else "rgb24"
    stream.disposition = Disposition.attached_pic
    packet = av.Packet(content)
    packet.stream, packet.pts, packet.dts, packet.time_base = stream, 0, 0, Fraction(1, 1)
    packet.is_keyframe = True
    out.mux(packet)


def _picture_block(picture: CoverPicture, content: bytes) -> str:
    """Return a base64 FLAC picture block (type 3: front cover), the cover format of Ogg files."""
    mime = _MIME[picture.codec].encode()
    sizes = (picture.width, picture.height, 24, 0, len(content))
    block = struct.pack(">II", 3, len(mime)) + mime + struct.pack(">I5I", 0, *sizes) + content
    return base64.b64encode(block).decode()
