"""Reference decoder for codec frames from `/v1/audio/frames`. It writes the same samples as the server.

    python -m talkray_tools.decode_frames hello.frames hello.wav --model embedded

The format is specified in docs/codec-frames.md.
"""

import argparse
import struct
import sys
import wave
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from deployments.codec.backends.registry import load_decoder
from deployments.codec.decoder import CodecDecoder, to_pcm16
from deployments.errors import TalkrayError
from talkray_tools.arguments import checkpoint

HEADER = struct.Struct("<4sBBHII")
RECORD = struct.Struct("<BxxxI")
FRAMES, PLAY, DROP, SILENCE, RESTART, END = b"fpdsre"
_AT_ONCE = 12  # frames per decoder call


class BadFrames(TalkrayError):
    """Raised for an invalid or truncated stream of codec frames. The message states the position."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("frames", type=Path, help="response body of /v1/audio/frames")
    parser.add_argument("wav", type=Path)
    parser.add_argument("--model", type=checkpoint, default="embedded", help="model of the server")
    options = parser.parse_args(arguments)
    decoder = load_decoder(options.model / "speech_tokenizer")
    with options.frames.open("rb") as stream, wave.open(str(options.wav), "wb") as out:
        rate = read_header(stream, decoder)
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate)
        for pcm in decode(stream, decoder):
            out.writeframesraw(pcm.astype("<i2").tobytes())


def read_header(stream: BinaryIO, decoder: CodecDecoder) -> int:
    """Read the header and return the sample rate in Hz. Raises `BadFrames` if the decoder does not match the stream."""
    magic, version, codebooks, _, rate, frame_samples = HEADER.unpack(_take(stream, HEADER.size))
    if (magic, version) != (b"TRCF", 1):
        raise BadFrames(f"the file is not a version 1 stream of codec frames: it begins with {magic!r}")
    if (codebooks, frame_samples) != (decoder.config.num_quantizers, decoder.frame_samples):
        raise BadFrames(f"the codec has other frames than {codebooks} codebooks and {frame_samples} samples")
    return int(rate)


def records(stream: BinaryIO, codebooks: int) -> Iterator[tuple[int, int, NDArray[np.uint16]]]:
    """Yield kind, number and codes [number, codebooks] of each record. Raises `BadFrames` for a truncated stream."""
    kind = 0
    while kind != END:
        kind, number = RECORD.unpack(_take(stream, RECORD.size))
        rows = number if kind == FRAMES else 0
        yield kind, number, np.frombuffer(_take(stream, 2 * codebooks * rows), "<u2").reshape(rows, codebooks)


def decode(stream: BinaryIO, decoder: CodecDecoder) -> Iterator[NDArray[np.int16]]:
    """Yield the decoded audio in order. Raises `BadFrames` if the stream is truncated."""
    state = decoder.initial_state()
    audio = np.zeros(0, np.int16)  # decoded, but neither written nor dropped yet
    for kind, number, codes in records(stream, decoder.config.num_quantizers):
        if kind == FRAMES:
            for start in range(0, number, _AT_ONCE):
                rows = torch.from_numpy(codes[start : start + _AT_ONCE].astype(np.int64))
                samples, (state,) = decoder.decode(rows[None], [state])
                audio = np.concatenate((audio, to_pcm16(samples[0])))
        elif kind in (PLAY, DROP):
            if number > len(audio):
                raise BadFrames(f"a record needs {number} samples, but only {len(audio)} are decoded")
            heard, audio = audio[:number], audio[number:]
            if kind == PLAY:
                yield heard
        elif kind == SILENCE:
            yield np.zeros(number, np.int16)
        elif kind == RESTART:
            state, audio = decoder.initial_state(), audio[:0]
        elif kind != END:
            raise BadFrames(f"record kind {kind} is unknown")


def _take(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise BadFrames("the stream ends in the middle of a record")
    return data


if __name__ == "__main__":
    try:
        main()
    except TalkrayError as error:
        sys.exit(str(error))
