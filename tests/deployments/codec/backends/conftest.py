from dataclasses import replace

import pytest
import torch

from deployments.codec.codec_config import DecoderConfig, SpeechTokenizerConfig
from talkray_tools.random_codec import randomize_decoder
from talkray_tools.unfolded_codec import DecoderNetwork


@pytest.fixture
def network(config: SpeechTokenizerConfig) -> DecoderNetwork:
    """Matrix units take rows of 16 values."""
    shape: DecoderConfig = replace(
        config.decoder, codebook_dim=16, decoder_dim=64, head_dim=32, hidden_size=16, intermediate_size=32
    )
    network = DecoderNetwork(shape)
    randomize_decoder(network, generator=torch.Generator().manual_seed(7))
    return network.requires_grad_(requires_grad=False)
