import torch

from deployments.codec.codec_config import SpeechTokenizerConfig
from deployments.codec.encoder import EncoderNetwork
from talkray_tools.random_codec import randomize_codec
from talkray_tools.unfolded_codec import DecoderNetwork


def randomized(config: SpeechTokenizerConfig, seed: int) -> dict[str, torch.Tensor]:
    decoder, encoder = DecoderNetwork(config.decoder), EncoderNetwork(config.encoder)
    randomize_codec(decoder, encoder, generator=torch.Generator().manual_seed(seed))
    return {**decoder.state_dict(prefix="decoder."), **encoder.state_dict(prefix="encoder.")}


def test_a_seed_gives_its_weights_whatever_the_global_generator_says(config: SpeechTokenizerConfig) -> None:
    first = randomized(config, 1)
    torch.manual_seed(99)
    again, other = randomized(config, 1), randomized(config, 2)
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert not torch.equal(first["decoder.pre_conv.conv.weight"], other["decoder.pre_conv.conv.weight"])


def test_no_codebook_is_empty_and_no_branch_is_dead(config: SpeechTokenizerConfig) -> None:
    for name, tensor in randomized(config, 1).items():
        assert tensor.isfinite().all(), name
        assert tensor.any(), name
