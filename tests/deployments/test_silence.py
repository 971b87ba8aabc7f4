from unittest import mock

import numpy as np
import pytest

from deployments.protocol import Pcm
from deployments.speech_detection import FirstSound, LeadingSilence, first_sound

RATE = 1000  # windows of 10 samples


def quiet(num_samples: int) -> Pcm:
    return np.where(np.arange(num_samples) % 2, 20, -20).astype(np.int16)  # -64 dB


def loud(num_samples: int) -> Pcm:
    return np.arange(1000, 1000 + num_samples, dtype=np.int16)


def trim(pcm: Pcm, sizes: list[int]) -> Pcm:
    with mock.patch("deployments.speech_detection._MAX_TRIM_S", 1.0):
        silence = LeadingSilence(RATE)
    chunks = np.split(pcm, np.cumsum(sizes))
    return np.concatenate([silence.trim(chunk) for chunk in chunks])


@pytest.mark.parametrize(("parts", "sizes", "start"), [
    *([(200, 300, 100), sizes, 180] for sizes in ([], [1] * 300, [7] * 60, [150, 3, 9], [200], [205])),
    ((0, 50, 500), [10, 30], 0), ((105, 100, 0), [104, 3], 80),  # sound at once, and in the middle of a window
    *([(1200, 100, 0), sizes, 1000] for sizes in ([], [1] * 1100, [130] * 8, [1000])),  # it gives up
])  # fmt: skip
def test_sound_keeps_a_little_silence_before_it(parts: tuple[int, int, int], sizes: list[int], start: int) -> None:
    pcm = np.concatenate((quiet(parts[0]), loud(parts[1]), quiet(parts[2])))
    assert np.array_equal(trim(pcm, sizes), pcm[start:])


def test_nothing_audible_gives_nothing_before_the_limit() -> None:
    assert len(trim(quiet(999), [100, 100])) == 0


def test_the_first_sound_is_the_first_loud_window() -> None:
    assert first_sound(np.concatenate((quiet(2505), loud(100))), RATE) == 2500
    assert first_sound(quiet(500), RATE) is None
    click = quiet(500)
    click[105] = 200  # one loud sample is no sound
    assert first_sound(click, RATE) is None


@pytest.mark.parametrize("sizes", [[500], [1] * 500, [203, 4, 293], [7] * 72])
def test_the_first_sound_of_a_stream_is_found_once_however_it_is_cut(sizes: list[int]) -> None:
    sound, pcm = FirstSound(RATE), np.concatenate((quiet(205), loud(100), quiet(95), loud(100)))
    first_sounds = [sound.feed(chunk) for chunk in np.split(pcm, np.cumsum(sizes))]
    assert [place_s for place_s in first_sounds if place_s is not None] == [0.2]


def test_a_quiet_stream_has_no_first_sound() -> None:
    sound = FirstSound(RATE)
    assert [sound.feed(quiet(60)) for _ in range(4)] == [None] * 4
