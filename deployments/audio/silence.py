"""Drops the quiet start of a stream, so that the first byte a listener gets is close to the first sound."""

from math import ceil

import numpy as np
from numpy.typing import NDArray

Pcm = NDArray[np.int16]  # [samples]

_WINDOW_S = 0.01
_FULL_SCALE = 32768
QUIET_DB = -50.0  # of full scale: nothing that is quieter counts as sound
_KEEP_S = 0.02  # before the first sound, so that no attack is cut
_MAX_TRIM_S = 10.0  # behind which everything passes


def first_sound(pcm: Pcm, sample_rate: int) -> int | None:
    """Where the first window begins that is louder than QUIET_DB; None where all is quiet."""
    window = _window(sample_rate)
    num_windows = len(pcm) // window
    windows = pcm[: num_windows * window].reshape(num_windows, window).astype(np.float32)
    power = (_FULL_SCALE * 10 ** (QUIET_DB / 20)) ** 2
    loud = np.flatnonzero(np.square(windows).mean(axis=1) > power)
    return int(loud[0]) * window if len(loud) else None


def _window(sample_rate: int) -> int:
    return max(1, round(_WINDOW_S * sample_rate))


class FirstSound:
    """Finds where a stream, which comes in chunks, begins to be heard."""

    def __init__(self, sample_rate: int) -> None:
        self._sample_rate, self._window = sample_rate, _window(sample_rate)
        self._rest: Pcm = np.zeros(0, np.int16)  # of a window that is not whole yet
        self._num_quiet = 0  # samples in front of it
        self._is_found = False

    def feed(self, pcm: Pcm) -> float | None:
        """Seconds of the stream in front of the first sound, with the chunk that has it; None with all others."""
        if self._is_found:
            return None
        pcm = np.concatenate((self._rest, pcm))
        onset = first_sound(pcm, self._sample_rate)
        if onset is None:
            whole = len(pcm) // self._window * self._window
            self._rest, self._num_quiet = pcm[whole:], self._num_quiet + whole
            return None
        self._is_found = True
        return (self._num_quiet + onset) / self._sample_rate


class LeadingSilence:
    """Trims one stream, chunk by chunk. Positions elsewhere stay on the codec's untrimmed timeline."""

    def __init__(self, sample_rate: int) -> None:
        self._sample_rate, self._window = sample_rate, _window(sample_rate)
        self._keep = ceil(_KEEP_S * sample_rate / self._window) * self._window
        self._max_trim = round(_MAX_TRIM_S * sample_rate)
        self._held: Pcm | None = np.zeros(
            0, np.int16
        )  # quiet samples that may still be kept; None once sound was found
        self._num_dropped = 0

    def trim(self, pcm: Pcm) -> Pcm:
        """The samples to send of the next ones: none until a window is louder than QUIET_DB, then all."""
        if self._held is None:
            return pcm
        pcm = np.concatenate((self._held, pcm))
        onset = first_sound(pcm, self._sample_rate)
        give_up = self._max_trim - self._num_dropped
        if onset is None and len(pcm) < give_up:
            self._hold_end(pcm)
            return pcm[:0]
        self._held = None
        start = give_up if onset is None else min(max(0, onset - self._keep), give_up)
        return pcm[start:]

    def _hold_end(self, pcm: Pcm) -> None:
        unfinished = len(pcm) % self._window
        dropped = max(0, len(pcm) - unfinished - self._keep)
        self._held = pcm[dropped:]
        self._num_dropped += dropped
