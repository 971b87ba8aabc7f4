"""Runs where Triton is: on a GPU, or on CPU tensors in Triton's interpreter (TRITON_INTERPRET=1)."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from deployments.codec.config import DecoderConfig, SpeechTokenizerConfig
from deployments.codec.decoder import MIN_SNR_DB, CodecDecoder, DecoderNetwork, snr_db, to_pcm16
from deployments.codec.random_init import randomize_decoder
from deployments.codec.slots import FRAME_SIZES, GpuSlots, batch_buckets
from tests.deployments.interpreter import INTERPRETED


@pytest.fixture
def network(config: SpeechTokenizerConfig) -> DecoderNetwork:
    """Matrix units take rows of 16 values."""
    shape: DecoderConfig = replace(
        config.decoder, codebook_dim=16, decoder_dim=64, head_dim=32, hidden_size=16, intermediate_size=32
    )
    network = DecoderNetwork(shape)
    randomize_decoder(network, generator=torch.Generator().manual_seed(7))
    network.prepare()
    return network


def test_kernels_compute_what_the_plain_decoder_does(network: DecoderNetwork, device: torch.device) -> None:
    """Streams in different slots and at different positions, one of them a successor in its slot."""
    from deployments.codec.gpu_decoder import GpuDecoder

    exact = CodecDecoder(copy.deepcopy(network))
    decoder = GpuDecoder(network.to(device), num_slots=3, code_ring=8, device=device, dtype=torch.float32)
    codes = torch.randint(32, (2, 8, 4), generator=torch.Generator().manual_seed(0))
    parts: list[list[torch.Tensor]] = [[], []]
    slots = torch.tensor([2, 0, 3], device=device, dtype=torch.int32)  # 3 is the scratch slot
    for stream, slot in enumerate((2, 0)):
        decoder.reset(slot)
        decoder.codes[slot] = codes[1 - stream].short().to(device)
    decoder.decode(slots, 2)
    for stream, slot in enumerate((2, 0)):
        decoder.reset(slot)
        decoder.codes[slot] = codes[stream].short().to(device)
    for frames in (1, 2, 1):
        pcm = decoder.decode(slots, frames).cpu()
        for stream in range(2):
            parts[stream].append(pcm[stream])
    expected = to_pcm16(exact.decode(codes[:, :4], [exact.initial_state()] * 2)[0])
    got = np.stack([torch.cat(part).numpy() for part in parts])
    if INTERPRETED:
        assert np.abs(got.astype(int) - expected).max() <= 1
    else:
        assert snr_db(torch.from_numpy(expected), torch.from_numpy(got)) >= MIN_SNR_DB


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_captured_calls_are_the_decoder(network: DecoderNetwork, dtype: torch.dtype) -> None:
    exact = CodecDecoder(copy.deepcopy(network))
    slots = GpuSlots(network.to("cuda"), num_slots=4, device=torch.device("cuda"), dtype=dtype)
    slots.capture()
    total = sum(FRAME_SIZES)
    codes = torch.randint(32, (3, total, 4), generator=torch.Generator().manual_seed(0))
    for slot in range(3):
        slots.begin(slot)
        slots.write([slot] * total, range(total), codes[slot].short())
    parts = [slots.decode(range(3), frames).land() for frames in FRAME_SIZES]
    got = torch.from_numpy(np.concatenate([np.stack(part) for part in parts], axis=1))
    expected = torch.from_numpy(to_pcm16(exact.decode(codes, [exact.initial_state()] * 3)[0]))
    assert snr_db(expected, got) >= MIN_SNR_DB


def test_buckets_cover_every_batch() -> None:
    for largest in (1, 3, 8, 64, 100, 130):
        buckets = batch_buckets(largest)
        assert buckets == sorted(set(buckets))
        assert buckets[-1] == largest
