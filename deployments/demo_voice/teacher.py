"""The teacher: hibari's one voice, and four out of it.

Played faster or slower than it was synthesised, a voice moves in pitch and in formants together, as a smaller or a
larger speaker would. The teacher speaks slower or faster by the same factor, so the rate of speech stays.
"""

import importlib
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SAMPLE_RATE = 24000
VOICES = {"nora": Fraction(1), "iris": Fraction(11, 10), "felix": Fraction(22, 25), "hugo": Fraction(4, 5)}

Audio = NDArray[np.float32]  # [samples]

_TAPS = 48  # of the resampling filter, at the lower of the two rates
_STEP = SAMPLE_RATE // 100  # samples over which speech is told from silence
_SPEECH = 0.005  # of the peak
_LEAD_S, _TAIL_S, _PAUSE_S = 0.06, 0.14, 0.28
_FADE_S = 0.01
_LOUDNESS, _PEAK = 0.08, 0.95


@dataclass(frozen=True, slots=True)
class Teacher:
    """Speaks text in any of the voices."""

    stream: Callable[..., Iterator[Audio]]  # sentences of a text, one by one

    @classmethod
    def load(cls, wheels: Path | None) -> "Teacher":
        """From the installed package, or from the wheel in the directory `wheels`, which is unpacked aside."""
        if wheels is not None:
            (wheel,) = wheels.glob("hibari_tts-*.whl")
            target = tempfile.mkdtemp(prefix="teacher-")
            zipfile.ZipFile(wheel).extractall(target)
            sys.path.insert(0, target)
        return cls(importlib.import_module("hibari").Hibari(threads=1).stream)

    def speak(self, text: str, voice: str, *, seed: int) -> Audio:
        """Normalised speech, with little silence around it and short pauses between its sentences; maybe empty."""
        factor = VOICES[voice]
        sentences = [
            trimmed
            for sentence in self.stream(text, speed=float(1 / factor), seed=seed)
            if len(trimmed := _trim(resample(sentence, 1 / factor)))
        ]
        if not sentences:
            return np.zeros(0, np.float32)
        pause = np.zeros(int(_PAUSE_S * SAMPLE_RATE), np.float32)
        pieces = [piece for sentence in sentences for piece in (pause, sentence)][1:]
        lead, tail = (np.zeros(int(seconds * SAMPLE_RATE), np.float32) for seconds in (_LEAD_S, _TAIL_S))
        return _normalise(np.concatenate((lead, *pieces, tail)))


def resample(audio: Audio, ratio: Fraction) -> Audio:
    """`audio` with `ratio` times as many samples, band-limited."""
    if ratio == 1 or not len(audio):
        return audio
    up, down = ratio.numerator, ratio.denominator
    filters, reach = _filters(up, down)
    padded = np.pad(audio, (reach, reach + down))
    windows = np.lib.stride_tricks.sliding_window_view(padded, filters.shape[1])
    out = np.empty(len(audio) * up // down, np.float32)
    for phase in range(min(up, len(out))):
        # Output sample m lies at m * down / up of the input.
        count = len(range(phase, len(out), up))
        start = phase * down // up
        out[phase::up] = windows[start::down][:count] @ filters[phase]
    return out


@cache
def _filters(up: int, down: int) -> tuple[NDArray[np.float32], int]:
    """Windowed sinc at each of the `up` fractional positions, [up, taps], and the taps before the position."""
    cutoff = min(1.0, up / down) * 0.96
    reach = int(_TAPS / 2 / cutoff)
    distance = np.arange(-reach, reach + 1)[None] - (np.arange(up)[:, None] * down % up) / up
    window = np.cos(np.clip(distance / (reach + 1), -1, 1) * np.pi / 2) ** 2
    return (cutoff * np.sinc(cutoff * distance) * window).astype(np.float32), reach


def _trim(audio: Audio) -> Audio:
    """Without the silence on both sides, faded over the cuts."""
    steps = np.abs(audio[: len(audio) // _STEP * _STEP]).reshape(-1, _STEP).max(axis=1, initial=0)
    peak = steps.max(initial=0)
    if peak < 1e-3:
        return audio[:0]
    (speech,) = np.nonzero(steps > _SPEECH * peak)
    kept = audio[max(speech[0] - 1, 0) * _STEP : (speech[-1] + 2) * _STEP].copy()
    ramp = np.linspace(0, 1, int(_FADE_S * SAMPLE_RATE), dtype=np.float32)
    kept[: len(ramp)] *= ramp
    kept[-len(ramp) :] *= ramp[::-1]
    return kept


def _normalise(audio: Audio) -> Audio:
    """At the common loudness, measured where there is speech."""
    level = np.abs(audio)
    active = audio[level > _SPEECH * level.max()]
    gain = min(_LOUDNESS / float(np.sqrt(np.mean(np.square(active)))), _PEAK / float(level.max()))
    return (audio * gain).astype(np.float32)
