import math

import numpy as np
import pytest

from serve_app.tempo import Tempo, factors
from tests.serve_app.fake import CUSTOM_VOICE, tone
from tests.serve_app.test_audio import pitch

RATE, FRAME = CUSTOM_VOICE.sample_rate, CUSTOM_VOICE.frame_samples


def stretch(pcm: bytes, speed: float, piece_samples: int = FRAME) -> bytes:
    tempo, size = Tempo(speed, RATE), piece_samples * 2
    return b"".join([tempo.stretch(pcm[start : start + size]) for start in range(0, len(pcm), size)]) + tempo.close()


@pytest.mark.parametrize("speed", [0.25, 0.5, 0.8, 1.25, 2.0, 3.0, 4.0])
def test_duration_changes_and_pitch_stays(speed: float) -> None:
    samples = np.frombuffer(stretch(tone(3 * RATE), speed), "<i2").astype(float)
    assert samples.size / RATE * speed == pytest.approx(3, rel=0.02)
    assert pitch(samples, RATE) == pytest.approx(440, abs=3)


@pytest.mark.parametrize("speed", [0.7, 1.3])
def test_the_result_does_not_depend_on_how_the_audio_is_cut(speed: float) -> None:
    assert stretch(tone(RATE), speed, 700) == stretch(tone(RATE), speed, RATE)


@pytest.mark.parametrize("num_samples", [FRAME, RATE])
def test_little_is_held_back(num_samples: int) -> None:
    tempo = Tempo(1.25, RATE)
    stretched = len(tempo.stretch(tone(num_samples)) + tempo.stretch(tone(num_samples, start=num_samples))) // 2
    assert stretched >= (2 * num_samples - 0.1 * RATE) / 1.25


def test_nothing_in_nothing_out() -> None:
    tempo = Tempo(1.25, RATE)
    assert tempo.stretch(b"") + tempo.close() == b""


@pytest.mark.parametrize("speed", [0.25, 0.49, 0.5, 1.0, 2.0, 2.01, 4.0])
def test_every_step_is_one_that_atempo_does_well(speed: float) -> None:
    assert math.prod(factors(speed)) == pytest.approx(speed)
    assert all(0.5 <= factor <= 2 for factor in factors(speed))
