from pathlib import Path

import pytest
import torch

from deployments.errors import InvalidRequest
from deployments.talker.model.model_config import SpeakerEncoderConfig
from deployments.talker.model.speaker_encoder import SpeakerEncoder, log_mel
from deployments.weights.store import as_config
from talkray_tools.released import SHAPES
from tests.records import Record

# Equality with the official encoder is in tests/parity/test_golden.py.

FILE = Path("config.json")
SECTION = {**SHAPES["tiny-Base"].config["speaker_encoder_config"], "enc_dim": 24}


@pytest.fixture(scope="module")
def encoder() -> SpeakerEncoder:
    torch.manual_seed(0)
    return SpeakerEncoder(as_config(SpeakerEncoderConfig, SECTION, FILE)).eval()


def noise(num_samples: int) -> torch.Tensor:
    return 0.1 * torch.randn(num_samples, generator=torch.Generator().manual_seed(1))


def test_the_shortest_recording_is_accepted_and_a_shorter_one_refused(encoder: SpeakerEncoder) -> None:
    shortest = encoder.min_samples
    assert encoder.embed(noise(shortest)).isfinite().all()
    with pytest.raises(InvalidRequest, match="ref_audio is too short") as error:
        encoder.embed(noise(shortest - 1))
    assert error.value.param == "ref_audio"


def test_padding_behind_a_recording_does_not_change_its_vector(encoder: SpeakerEncoder) -> None:
    audio = noise(7001)
    padded = torch.cat((audio, torch.zeros(5000)))
    torch.testing.assert_close(encoder.vector(padded, torch.tensor(len(audio))), encoder.embed(audio))


@pytest.mark.parametrize("num_samples", [0, 1, 384])
def test_hardly_any_audio_is_refused(num_samples: int, encoder: SpeakerEncoder) -> None:
    with pytest.raises(InvalidRequest):
        encoder.embed(noise(num_samples))


def test_the_released_section_names_only_what_differs() -> None:
    config = as_config(SpeakerEncoderConfig, {"enc_dim": 2048, "sample_rate": 24000, "model_type": "whatever"}, FILE)
    assert config == SpeakerEncoderConfig(enc_dim=2048)


def test_spectrograms_and_vectors_of_noise(encoder: SpeakerEncoder) -> None:
    record = Record()
    mel = log_mel(noise(6000), torch.tensor(5500), sample_rate=24000, num_mels=128)
    for band in range(0, 128, 5):
        record(f"band {band}", *(f"{level:.1f}" for level in mel[band].tolist()))
    for num_samples in (3000, 7001, 30000):
        record(f"{num_samples} samples", *(f"{value:.3f}" for value in encoder.embed(noise(num_samples)).tolist()))
    record.check("speaker-encoder")
