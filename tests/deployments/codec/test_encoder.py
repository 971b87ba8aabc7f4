from pathlib import Path

import numpy as np
import pytest
import torch

from deployments.codec.encoder import CodecEncoder
from tests.records import Record


@pytest.fixture(scope="module")
def encoder(directory: Path) -> CodecEncoder:
    return CodecEncoder.load(directory)


def noise(num_samples: int) -> np.ndarray:
    return (np.random.RandomState(num_samples).randn(num_samples) * 0.1).astype(np.float32)


@pytest.mark.parametrize(
    ("num_samples", "num_frames"), [(1, 1), (23, 1), (24, 1), (25, 2), (24 * 9, 9), (24 * 9 + 1, 10)]
)
def test_a_started_frame_counts(encoder: CodecEncoder, num_samples: int, num_frames: int) -> None:
    codes = encoder.encode(noise(num_samples))
    assert codes.shape == (num_frames, 4)
    assert codes.dtype == np.int16
    assert codes.min() >= 0
    assert codes.max() < 32


@pytest.mark.parametrize("num_samples", [1, 24 * 9 - 1, 24 * 9, 24 * 9 + 1])
def test_padding_behind_a_recording_does_not_change_its_codes(encoder: CodecEncoder, num_samples: int) -> None:
    audio = noise(num_samples)
    padded = torch.zeros(24 * 15)
    padded[:num_samples] = torch.from_numpy(audio)
    codes = encoder.encode(audio)
    assert np.array_equal(encoder.codes(padded, torch.tensor(num_samples)).numpy()[: len(codes)], codes)


def test_codes_of_noise(encoder: CodecEncoder) -> None:
    record = Record()
    for num_samples in (1, 24 * 9, *range(24 * 9 + 1, 500, 11)):
        record(f"{num_samples} samples", encoder.encode(noise(num_samples)).tolist())
    record.check("codec-encoder")
