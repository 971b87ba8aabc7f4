import math

import numpy as np
import pytest

from loadtest.playback import AudibleOnset, Playback, heard_at, simulate


def play(arrivals_s: list[float], samples: list[int]) -> Playback:
    return simulate(arrivals_s, samples, sample_rate=1000)


@pytest.mark.parametrize(("arrivals_s", "samples", "lateness_s", "stalls"), [
    ([5.0, 5.5, 6.0], [1000, 2000, 3000], (-0.5, -1.0), (0, 0, 3)),
    ([0.0, 1.25], [1000, 2000], (0.25,), (1, 0.25, 2)), ([3.0], [10], (), (0, 0, 1)),
    ([0.0, 2.0, 3.0], [1000, 2000, 3000], (1.0, 0.0), (1, 1.0, 3)),  # a stall moves what is due after it
])  # fmt: skip
def test_a_late_chunk_stalls_by_its_lateness(
    arrivals_s: list[float], samples: list[int], lateness_s: tuple[float, ...], stalls: tuple[int, float, int]
) -> None:
    playback = play(arrivals_s, samples)
    assert playback.lateness_s == lateness_s
    assert (playback.underruns, playback.stall_s, playback.num_chunks) == stalls


def test_a_chunk_on_the_dot_is_in_time_in_spite_of_rounding() -> None:
    arrivals_s = [0.1 + 0.1 * index for index in range(50)]
    assert play(arrivals_s, [100 * (index + 1) for index in range(50)]).underruns == 0


@pytest.mark.parametrize(("sample", "heard_s"), [(0, 5.0), (999, 5.999), (1000, 7.0), (1500, 7.5), (2500, 8.5)])
def test_a_sample_is_heard_when_the_player_gets_to_it(sample: int, heard_s: float) -> None:
    assert math.isclose(heard_at(sample, [5.0, 7.0, 7.1], [1000, 2000, 3000], sample_rate=1000), heard_s)


def test_a_sample_that_never_came_is_not_heard() -> None:
    with pytest.raises(ValueError, match="never arrived"):
        heard_at(10, [0.0], [10], sample_rate=1000)


def tone(amplitude: float, samples: int) -> bytes:
    return np.full(samples, amplitude, "<i2").tobytes()


@pytest.mark.parametrize("cut", [1, 7, 960, 100_000])
def test_the_onset_is_the_first_loud_window_for_any_cutting(cut: int) -> None:
    audio = tone(0, 250) + tone(3000, 500)
    onset = AudibleOnset(sample_rate=10_000, channels=1)  # windows of 100 samples
    for start in range(0, len(audio), cut):
        onset.feed(audio[start : start + cut])
    assert onset.sample == 200


@pytest.mark.parametrize(("audio", "rate", "channels", "sample"), [
    (tone(100, 5000), 10_000, 1, None),  # -50.3 dBFS
    (tone(0, 400) + tone(110, 400), 10_000, 2, 200),  # -49.5 dBFS, counted per channel
    (tone(0, 3) + tone(5000, 3), 10, 1, 3),  # less than one sample a window
])  # fmt: skip
def test_the_onset_is_louder_than_50_dbfs(audio: bytes, rate: int, channels: int, sample: int | None) -> None:
    onset = AudibleOnset(sample_rate=rate, channels=channels)
    onset.feed(audio)
    assert onset.sample == sample
