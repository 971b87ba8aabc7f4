"""What can be measured of speech without understanding it: a hiss at its beginning, steps where audio was joined."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.int16]  # [samples]

_WINDOW_S, _HOP_S = 0.02, 0.005
_BEGINNING_S = 0.08
_LOUD = 150  # rms, of 32,768
_HIGH_HZ, _MOSTLY_HIGH = 4000, 0.4


def begins_with_hiss(samples: Samples, sample_rate: int) -> bool:
    """Whether a window of 20 ms in the first 80 ms is audible and has over 40 % of its energy above 4 kHz."""
    size, hop = int(_WINDOW_S * sample_rate), int(_HOP_S * sample_rate)
    beginning = samples[: int(_BEGINNING_S * sample_rate)].astype(np.float64)
    windows = [beginning[start : start + size] for start in range(0, len(beginning) - size + 1, hop)]
    return any(_is_hiss(window, sample_rate) for window in windows)


def _is_hiss(window: NDArray[np.float64], sample_rate: int) -> bool:
    if np.sqrt(np.mean(np.square(window))) <= _LOUD:
        return False
    energy = np.abs(np.fft.rfft(window * np.hanning(len(window)))) ** 2
    high = np.fft.rfftfreq(len(window), 1 / sample_rate) > _HIGH_HZ
    return bool(energy[high].sum() > _MOSTLY_HIGH * energy.sum())


def steps_where_joined(samples: Samples, joints: Sequence[int] = ()) -> list[int]:
    """Places where speech begins, is joined or ends with a larger step than any inside it, in samples.

    `joints` are the first samples of what was joined. Before and behind the whole there is silence.
    """
    padded = np.concatenate(([0], samples.astype(np.int64), [0]))
    steps = np.abs(np.diff(padded))  # [samples + 1]: steps[n] is the one to sample n
    joined = [0, *joints, len(samples)]
    inside = np.delete(steps, joined).max(initial=0)
    return [place for place in joined if steps[place] > inside]
