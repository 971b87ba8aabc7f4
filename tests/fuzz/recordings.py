"""Audio files, and what is left of them after an accident."""

import io
import random
import struct
from functools import cache

import av
import numpy as np
import soundfile

RATE = 24000
_SIZES = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF)
_SUBTYPES = (
    ("WAV", None), ("WAV", "FLOAT"), ("WAV", "ALAW"), ("WAV", "MS_ADPCM"), ("FLAC", None), ("MP3", None),
    ("OGG", "VORBIS"), ("OGG", "OPUS"), ("AIFF", None), ("AU", None), ("CAF", "ALAC_16"), ("W64", None),
)  # fmt: skip
_CONTAINERS = (("mov", "aac"), ("webm", "libopus"), ("matroska", "libmp3lame"), ("adts", "aac"), ("mov", "alac"))


@cache
def originals() -> tuple[bytes, ...]:
    """0.6 s of noise in every kind of file that is accepted."""
    signal = np.random.default_rng(0).standard_normal(RATE * 6 // 10) * 0.1
    return tuple(
        [_soundfile(signal, container, subtype) for container, subtype in _SUBTYPES]
        + [_av(signal, container, codec) for container, codec in _CONTAINERS]
    )


def _soundfile(signal: np.ndarray, container: str, subtype: str | None) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, signal, RATE, format=container, subtype=subtype)
    return file.getvalue()


def _av(signal: np.ndarray, container: str, codec: str) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=RATE, layout="mono")
        frame = av.AudioFrame.from_ndarray((signal * 32767).astype(np.int16)[None], format="s16", layout="mono")
        frame.sample_rate = RATE
        output.mux([*stream.encode(frame), *stream.encode(None)])
    return file.getvalue()


def mutated(chance: random.Random) -> bytes:
    """One of the originals after one to four accidents, most of them in its header."""
    data = bytearray(chance.choice(originals()))
    for _ in range(chance.randint(1, 4)):
        _harm(data, chance)
    return bytes(data)


def _harm(data: bytearray, chance: random.Random) -> None:
    near = chance.random() < 0.7
    place = chance.randrange(max(1, min(len(data), 128 if near else len(data))))
    match chance.randrange(8):
        case 0:
            del data[place:]
        case 1:
            data[place : place + 1] = bytes([data[place] ^ 1 << chance.randrange(8)]) if data else b""
        case 2:
            data[place : place + chance.randint(1, 16)] = chance.randbytes(chance.randint(1, 16))
        case 3:
            kind = chance.choice(["<I", ">I"])
            data[place : place + 4] = struct.pack(kind, chance.choice(_SIZES))
        case 4:
            data[place : place + 2] = struct.pack(chance.choice(["<H", ">H"]), chance.choice(_SIZES) & 0xFFFF)
        case 5:
            del data[place : place + chance.randint(1, 64)]
        case 6:
            other = chance.choice(originals())
            data[place:place] = other[: chance.randint(1, len(other))]
        case 7:
            data[place:place] = data[place : place + chance.randint(1, 4096)] * chance.randint(1, 8)
