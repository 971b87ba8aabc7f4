"""Simulate a zero-buffer player from the arrival times of the audio."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

AUDIBLE_WINDOW_S = 0.010
AUDIBLE_DBFS = -50.0
FULL_SCALE = 32768.0  # of s16


@dataclass(frozen=True, slots=True)
class Playback:
    """Playback of one stream without a buffer. It starts with the first sample and stalls while no sample is available.

    `lateness_s` has one value per chunk after the first: the chunk's arrival minus the time at which the player had
    played all earlier audio, including earlier stalls. Negative values mean that the chunk was on time. A chunk counts
    as late if it arrives late by more than the duration of one sample.
    """

    lateness_s: tuple[float, ...]
    sample_s: float  # duration of one sample

    @property
    def stalls_s(self) -> list[float]:
        """Duration of each underrun."""
        return [lateness for lateness in self.lateness_s if lateness > self.sample_s]

    @property
    def underruns(self) -> int:
        return len(self.stalls_s)

    @property
    def stall_s(self) -> float:
        """Total duration of all underruns."""
        return sum(self.stalls_s)

    @property
    def num_chunks(self) -> int:
        """Number of chunks that contain audio, including the first one."""
        return len(self.lateness_s) + 1


def simulate(arrivals_s: Sequence[float], samples: Sequence[int], *, sample_rate: int) -> Playback:
    """Simulate playback of chunks that arrived at `arrivals_s` (ascending). `samples` are cumulative counts.

    Every chunk must add at least one sample.
    """
    lateness = []
    played_out_s = arrivals_s[0] + samples[0] / sample_rate
    for arrival_s, (before, after) in zip(arrivals_s[1:], pairwise(samples), strict=True):
        lateness.append(arrival_s - played_out_s)
        played_out_s = max(played_out_s, arrival_s) + (after - before) / sample_rate
    return Playback(tuple(lateness), 1 / sample_rate)


def heard_at(sample: int, arrivals_s: Sequence[float], samples: Sequence[int], *, sample_rate: int) -> float:
    """Return when the player that `simulate` models plays sample number `sample`. The sample must have arrived."""
    starts_s, first = arrivals_s[0], 0
    for arrival_s, total in zip(arrivals_s, samples, strict=True):
        starts_s = max(starts_s, arrival_s)
        if sample < total:
            return starts_s + (sample - first) / sample_rate
        starts_s, first = starts_s + (total - first) / sample_rate, total
    raise ValueError(f"sample {sample} never arrived")


class AudibleOnset:
    """Finds the first audible sample, which is the start of the first loud window of AUDIBLE_WINDOW_S."""

    def __init__(self, sample_rate: int, channels: int) -> None:
        self.window_samples = max(1, round(sample_rate * AUDIBLE_WINDOW_S))
        self.window_values = self.window_samples * channels
        self.sample: int | None = None
        self._rest = b""
        self._quiet_windows = 0

    def feed(self, pcm: bytes) -> None:
        """Process the next bytes of s16le audio, which may be split at any byte."""
        if self.sample is not None:
            return
        data = self._rest + pcm
        num_windows = len(data) // (2 * self.window_values)
        pcm16 = np.frombuffer(data, "<i2", num_windows * self.window_values).astype(np.float64)
        rms = np.sqrt(np.mean(pcm16.reshape(num_windows, self.window_values) ** 2, axis=1))
        loud = rms > FULL_SCALE * 10 ** (AUDIBLE_DBFS / 20)
        if loud.any():
            self.sample = (self._quiet_windows + int(loud.argmax())) * self.window_samples
        self._quiet_windows += num_windows
        self._rest = data[2 * num_windows * self.window_values :]
