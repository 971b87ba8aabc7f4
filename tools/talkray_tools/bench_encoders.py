"""Measure the CPU time of audio encoders, and the time until each emits its first bytes.

    talkray bench encoders

The input is a chord whose loudness varies like speech, in frames of 80 ms, as from the codec. The time to first bytes
is wall-clock time; all other times are CPU times of this thread.
"""

import json
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from serve_app.audio.formats import AudioFormat, AudioOptions, CompressedEncoder, RawEncoder, open_encoder
from talkray_tools.arguments import CommandParser

Row = dict[str, Any]
_RATE, _FRAME_SAMPLES = 24000, 1920
_STEP_MS = 5  # of audio: the resolution of the time to first bytes
# Formats with their bit rates; None selects the encoder's default.
FORMATS: tuple[tuple[AudioFormat, int | None], ...] = (
    *((each, None) for each in AudioFormat),
    (AudioFormat.MP3, 32_000),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print a table. `--out` also writes the rows as JSON."""
    parser = CommandParser(prog="talkray bench encoders", description="Measure the CPU time of encoders.")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of audio in each run")
    parser.add_argument("--runs", type=int, default=5, help="runs of each encoder")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    pcm = speech_like(options.seconds)
    print("| format | opening, ms | first bytes, ms | audio needed, ms | CPU, ms per second of audio | kbit/s |")
    print("|---|---|---|---|---|---|")
    rows = []
    for audio_format, bit_rate in FORMATS:
        row = measure(audio_format, bit_rate, pcm, runs=options.runs)
        rows.append(row)
        name = f"{audio_format}{f', {bit_rate // 1000} kbit/s' if bit_rate else ''}"
        until = "none" if row["until_first_ms"] is None else f"{row['until_first_ms']:.0f}"
        print(
            f"| {name} | {row['open_ms']:.2f} | {row['first_ms']:.2f} | {until} "
            f"| {row['cpu_ms_per_s']:.2f} | {row['kbit_per_s']:.0f} |"
        )
    if options.out is not None:
        report = {"cpu": platform.processor() or platform.machine(), "rows": rows}
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def speech_like(seconds: float) -> bytes:
    """Return s16le audio: harmonics of 120 Hz with four syllables per second."""
    times = np.arange(int(seconds * _RATE)) / _RATE
    voice = np.sum([np.sin(2 * np.pi * 120 * harmonic * times) / harmonic for harmonic in range(1, 25)], axis=0)
    loudness = 0.15 + 0.85 * np.abs(np.sin(2 * np.pi * 2 * times))
    noise = np.random.default_rng(0).normal(0, 0.05, len(times))
    samples = ((voice * loudness + noise) * 6000).clip(-32768, 32767).astype("<i2")
    return bytes(samples.tobytes())


def measure(audio_format: AudioFormat, bit_rate: int | None, pcm: bytes, *, runs: int) -> Row:
    """Return the medians over all runs. `until_first_ms` is None if 80 ms of input yield no audio bytes."""
    opened, first, cpu, size = [], [], [], 0
    frames = [pcm[start : start + 2 * _FRAME_SAMPLES] for start in range(0, len(pcm), 2 * _FRAME_SAMPLES)]
    for _ in range(runs):
        began_ns = time.perf_counter_ns()
        encoder = _open(audio_format, bit_rate)
        opened.append((time.perf_counter_ns() - began_ns) / 1e6)
        began_ns, cpu_began_ns = time.perf_counter_ns(), time.thread_time_ns()
        size = len(encoder.encode(frames[0]))
        first.append((time.perf_counter_ns() - began_ns) / 1e6)
        size += sum(len(encoder.encode(frame)) for frame in frames[1:]) + len(encoder.close())
        cpu.append((time.thread_time_ns() - cpu_began_ns) / 1e6)
    seconds = len(pcm) / 2 / _RATE
    return {
        "format": audio_format,
        "bit_rate": bit_rate,
        "open_ms": statistics.median(opened),
        "first_ms": statistics.median(first),
        "until_first_ms": until_first_ms(audio_format, bit_rate, pcm),
        "cpu_ms_per_s": statistics.median(cpu) / seconds,
        "kbit_per_s": size * 8 / 1000 / seconds,
    }


def until_first_ms(audio_format: AudioFormat, bit_rate: int | None, pcm: bytes) -> float | None:
    """Return how many milliseconds of audio the encoder needs before it emits more than a header."""
    encoder, header = _open(audio_format, bit_rate), _header_bytes(audio_format)
    step, num_bytes = 2 * _RATE * _STEP_MS // 1000, 0
    for number in range(1, 400 // _STEP_MS + 1):
        num_bytes += len(encoder.encode(pcm[(number - 1) * step : number * step]))
        if num_bytes > header:
            return float(number * _STEP_MS)
    return None


def _header_bytes(audio_format: AudioFormat) -> int:
    """Return the header size in bytes for containers that do not begin with audio."""
    return {AudioFormat.WAV: 44, AudioFormat.OPUS: 200, AudioFormat.FLAC: 100}.get(audio_format, 0)


def _open(audio_format: AudioFormat, bit_rate: int | None) -> RawEncoder | CompressedEncoder:
    return open_encoder(AudioOptions(audio_format, bit_rate=bit_rate), _RATE, frame_samples=_FRAME_SAMPLES)


if __name__ == "__main__":
    main()
