"""The eight speakers, derived from the teacher's single speaker.

The teacher's network outputs a pitch curve, the spectrum that filters its pulses, and the rest of the sound. A speaker
can therefore have a different pitch, melody, tilt and head size. For the head size, the sound is played faster or
slower than it was synthesised, which moves pitch and formants together.
"""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from tools.demo_voice.manners import SpokenManner

Spectrum = NDArray[np.float32]  # [1, bins, steps]

_TEACHER_PITCH = 195.0  # Hz, its median
_VOICED = 40.0  # Hz; there are no pulses below this pitch
_STEP_S, _BIN_HZ = 0.0125, 20.0  # resolution of the network's outputs
_LIFTER = 80  # samples; finer structure of a spectrum comes from harmonics, not from the mouth
_REST_FROM, _REST_TO = 1500.0, 4000.0  # Hz: the rest is pitched below the first value and unpitched above the second
_REST_CUT = 1.0  # nepers
_TREMOR_HZ = 5.2
_TILT_FROM = 300.0  # Hz
_NEPERS = np.log(10) / 20  # per dB


@dataclass(frozen=True, slots=True)
class Speaker:
    """How a speaker differs from the teacher."""

    size: Fraction = Fraction(1)  # factor for pitch and formants
    pitch: float = 1.0  # additional factor for the pitch only
    melody: float = 1.0  # exponent of the pitch relative to its median
    tremor: float = 0.0  # variation of the pitch, as a share of the pitch
    tilt_db: float = 0.0  # change of the harmonics per octave above _TILT_FROM
    speed: float = 1.0


VOICES = {
    "nora": Speaker(),
    "felix": Speaker(Fraction(22, 25)),
    "iris": Speaker(Fraction(11, 10)),
    "hugo": Speaker(Fraction(4, 5)),
    "otto": Speaker(Fraction(41, 50), pitch=0.61, melody=0.8, speed=0.95),
    "miles": Speaker(Fraction(23, 25), pitch=0.7, melody=1.2, tilt_db=1.0, speed=1.05),
    "lily": Speaker(Fraction(9, 8), pitch=1.16, melody=1.15),
    "edith": Speaker(pitch=0.88, tremor=0.04, tilt_db=-1.0, speed=0.88),
}


def spoken_by(speaker: Speaker, manner: SpokenManner, outputs: list[Spectrum]) -> list[Spectrum]:
    """Return the network's outputs, changed to those of this speaker.

    The outputs are log magnitudes and phases of the pulses' filter, log magnitudes of noise, log magnitudes and
    phases of the rest, and the pitch [1, steps].
    """
    steps = (np.arange(int(outputs[0].shape[-1] / manner.pace)) * manner.pace).astype(int)
    pulses, phases, noise, rest, rest_phases, pitch = (output[..., steps] for output in outputs)
    frequencies = np.arange(pulses.shape[1])[:, None] * _BIN_HZ
    voiced = pitch > _VOICED
    if (speaker.pitch, speaker.melody, speaker.tremor) != (1.0, 1.0, 0.0):
        pitch = np.where(voiced, _melody(speaker, pitch), pitch)
        pulses, phases = _minimum_phase(pulses)
        share = np.clip((_REST_TO - frequencies) / (_REST_TO - _REST_FROM), 0, 1)
        rest = rest - _REST_CUT * share * voiced[:, None]
    tilt_db = speaker.tilt_db + manner.tilt_db
    tilt = _NEPERS * tilt_db * np.log2(np.maximum(frequencies, _TILT_FROM) / _TILT_FROM)
    changed = pulses + tilt, phases, noise, rest + tilt, rest_phases, pitch
    return [output.astype(np.float32) for output in changed]


def _melody(speaker: Speaker, pitch: Spectrum) -> Spectrum:
    seconds = np.arange(pitch.shape[-1]) * _STEP_S
    shaken = 1 + speaker.tremor * np.sin(2 * np.pi * _TREMOR_HZ * seconds)
    relative = np.maximum(pitch, 1.0) / _TEACHER_PITCH
    moved: Spectrum = (_TEACHER_PITCH * speaker.pitch * relative**speaker.melody * shaken).astype(np.float32)
    return moved


def _minimum_phase(magnitudes: Spectrum) -> tuple[Spectrum, Spectrum]:
    """Return smoothed log magnitudes and their phases, in the network's format. With different harmonics, the
    network's own phases are no better than random ones.
    """
    cepstrum = np.fft.irfft(magnitudes[0].T.astype(np.float64), axis=1)
    kept = np.zeros(cepstrum.shape[1])
    kept[:_LIFTER] = 1 + np.cos(np.pi * np.arange(_LIFTER) / _LIFTER)
    kept[0] = 1
    smooth = np.fft.rfft(cepstrum * kept, axis=1).T[None]
    turns = np.angle(np.exp(1j * smooth.imag)) / np.pi
    return smooth.real.astype(np.float32), np.arctanh(np.clip(turns, -0.9999, 0.9999)).astype(np.float32)
