from pathlib import Path

import numpy as np
import pytest
import torch

from deployments.codec.encoder import CodecEncoder, EncoderNetwork


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


def test_what_follows_does_not_change_what_was_encoded(encoder: CodecEncoder) -> None:
    """The convolutions and the attention are causal, except for the padding after the last sample."""
    audio = noise(24 * 20)
    assert np.array_equal(encoder.encode(audio)[:9], encoder.encode(audio[: 24 * 10])[:9])


@pytest.mark.parametrize("num_samples", [1, 24 * 9 - 1, 24 * 9, 24 * 9 + 1])
def test_padding_behind_a_recording_does_not_change_its_codes(encoder: CodecEncoder, num_samples: int) -> None:
    audio = noise(num_samples)
    padded = torch.zeros(24 * 15)
    padded[:num_samples] = torch.from_numpy(audio)
    codes = encoder.encode(audio)
    assert np.array_equal(encoder.codes(padded, torch.tensor(num_samples)).numpy()[: len(codes)], codes)


def test_codes_depend_on_the_sound(encoder: CodecEncoder) -> None:
    codes = encoder.encode(noise(24 * 40))
    assert len(np.unique(codes[:, 0])) > 1
    assert len(np.unique(codes[:, 3])) > 2


def test_codes_are_the_nearest_entries_of_the_residual(encoder: CodecEncoder) -> None:
    network = encoder.network
    assert isinstance(network, EncoderNetwork)
    x = torch.randn(1, 16, 5, generator=torch.Generator().manual_seed(1))
    codes = network.quantizer.encode(x, 4)
    vq = network.quantizer.acoustic_residual_vector_quantizer
    residual = torch.einsum("oi,it->to", vq.input_proj.weight[:, :, 0], x[0])
    for depth in range(3):
        book = vq.layers[depth].codebook
        table = book.embed_sum / book.cluster_usage[:, None]
        distances = (residual[:, None] - table[None]).square().sum(-1)
        assert torch.equal(distances.argmin(-1), codes[:, 1 + depth])
        residual = residual - table[codes[:, 1 + depth]]
