import numpy as np
import pytest

from tools.demo_voice.manners import MANNERS, PLAIN, SpokenManner
from tools.demo_voice.speakers import VOICES, Speaker, Spectrum, spoken_by

STEPS, BINS = 40, 601
PITCH = np.where(np.arange(STEPS) < STEPS // 2, 195.0, 0.0)[None].astype(np.float32)  # the second half has none


@pytest.fixture
def outputs() -> list[Spectrum]:
    draw = np.random.default_rng(0)
    return [*(draw.standard_normal((1, BINS, STEPS)).astype(np.float32) for _ in range(5)), PITCH]


@pytest.mark.parametrize("name", ["nora", "felix", "iris", "hugo"])
def test_some_are_the_teacher_in_another_size(name: str, outputs: list[Spectrum]) -> None:
    spoken = spoken_by(VOICES[name], MANNERS[PLAIN], outputs)
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(spoken, outputs, strict=True))


def test_a_pitch_of_its_own_moves_what_is_voiced_and_keeps_the_spectrum(outputs: list[Spectrum]) -> None:
    outputs[0] = np.broadcast_to(np.linspace(2, -6, BINS)[:, None], (1, BINS, STEPS)).astype(np.float32)  # smooth
    pulses, _, noise, rest, _, pitch = spoken_by(Speaker(pitch=0.5), MANNERS[PLAIN], outputs)
    assert pitch[0].tolist() == (PITCH[0] / 2).tolist()
    np.testing.assert_allclose(pulses, outputs[0], atol=0.1)
    assert np.array_equal(noise, outputs[2])
    unvoiced = np.s_[..., STEPS // 2 :]
    assert np.array_equal(rest[unvoiced], outputs[3][unvoiced])


def test_a_tilt_leaves_low_sounds_as_they_are(outputs: list[Spectrum]) -> None:
    spoken = spoken_by(VOICES["nora"], MANNERS["quiet"], outputs)
    change = (spoken[0] - outputs[0])[0, :, 0]
    assert (change[:16] == 0).all()
    assert (np.diff(change[16:]) < 0).all()


@pytest.mark.parametrize("pace", [2, 0.5])
def test_another_pace_is_another_number_of_steps_of_the_same_pitch(pace: float, outputs: list[Spectrum]) -> None:
    spoken = spoken_by(VOICES["nora"], SpokenManner("", "", pace=pace), outputs)
    assert [output.shape[-1] for output in spoken] == [int(STEPS / pace)] * len(outputs)
    assert np.array_equal(spoken[-1], PITCH[:, ::2] if pace == 2 else PITCH.repeat(2, axis=1))
