"""Data that precedes the audio in a file: headers, and tags that mark the speech as synthetic."""

import struct
from functools import cache

UNKNOWN_LENGTH = 0xFFFFFFFF  # players read this as "until the end"; 0 would be an empty file
# Markers of synthetic audio: the term from the IPTC vocabulary, and a sentence.
SYNTHETIC = "http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia"
DISCLOSURE = {"digital_source_type": SYNTHETIC, "comment": f"Synthetic speech. digital_source_type={SYNTHETIC}"}


def wav_header(
    sample_rate: int, num_bytes: int | None, *, tag: int = 1, sample_bytes: int = 2, disclosed: bool
) -> bytes:
    """Return the 44-byte header of mono audio made from `num_bytes` of PCM. None: a stream of unknown length. `tag`:
    RIFF's format tag. `disclosed`: add a LIST chunk that marks the speech as synthetic.
    """
    tags = _info_chunk() if disclosed else b""
    data_size = UNKNOWN_LENGTH if num_bytes is None else num_bytes // 2 * sample_bytes
    riff_size = UNKNOWN_LENGTH if num_bytes is None else 36 + len(tags) + data_size
    fmt = struct.pack(
        "<4sIHHIIHH", b"fmt ", 16, tag, 1, sample_rate, sample_rate * sample_bytes, sample_bytes, sample_bytes * 8
    )
    return struct.pack("<4sI4s", b"RIFF", riff_size, b"WAVE") + fmt + tags + struct.pack("<4sI", b"data", data_size)


@cache
def _info_chunk() -> bytes:
    """Return a RIFF chunk with software and comment tags."""
    fields = b"INFO"
    for name, text in ((b"ISFT", "Talkray"), (b"ICMT", DISCLOSURE["comment"])):
        value = text.encode() + b"\0"
        fields += struct.pack("<4sI", name, len(value)) + value + b"\0" * (len(value) % 2)
    return struct.pack("<4sI", b"LIST", len(fields)) + fields


@cache
def id3_tag() -> bytes:
    """Return an ID3v2.4 tag in UTF-8 that marks the speech as synthetic. The tag precedes the first MP3 frame."""
    texts = {b"TXXX": f"\3digital_source_type\0{SYNTHETIC}", b"COMM": f"\3eng\0{DISCLOSURE['comment']}"}
    frames = b"".join(name + _synchsafe(len(text)) + b"\0\0" + text.encode() for name, text in texts.items())
    return b"ID3\4\0\0" + _synchsafe(len(frames)) + frames


def _synchsafe(size: int) -> bytes:
    """Encode `size` in ID3's format, four bytes of seven bits each."""
    return bytes(size >> shift & 0x7F for shift in (21, 14, 7, 0))


def with_flac_length(stream: bytes, num_samples: int) -> bytes:
    """Write the number of samples into the 36-bit field of STREAMINFO at the start of a FLAC stream.

    libsndfile does not read a stream of unknown length to its end.
    """
    end = 26  # "fLaC", block header, block and frame sizes; then 8 bytes of rate, channels, bits and length
    fields = int.from_bytes(stream[end - 8 : end], "big") | num_samples
    return stream[: end - 8] + fields.to_bytes(8, "big") + stream[end:]
