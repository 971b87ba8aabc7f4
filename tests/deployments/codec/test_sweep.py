import torch

from deployments.codec.config import SpeechTokenizerConfig
from deployments.codec.decoder import CodecDecoder, to_pcm16
from deployments.codec.fold import fold
from deployments.codec.reference import DecoderNetwork
from deployments.codec.sweep import Sweep, every_code
from talkray_tools.random_codec import randomize_decoder
from talkray_tools.released import SHAPES


def network_of(config: SpeechTokenizerConfig) -> DecoderNetwork:
    network = DecoderNetwork(config.decoder)
    randomize_decoder(network, generator=torch.Generator().manual_seed(1))
    return network.requires_grad_(requires_grad=False)


def test_every_code_of_every_codebook_is_there() -> None:
    codes = every_code(SpeechTokenizerConfig.from_dict(SHAPES["1.7B-CustomVoice"].codec).decoder)
    assert codes.shape == (33, 64, 16)
    swept, random = codes[:-1].reshape(-1, 16), codes[-1]
    assert all(len(column.unique()) == 2048 for column in swept.T)
    assert len(random.unique()) > 500


def test_the_largest_activation_of_one_code_is_found(config: SpeechTokenizerConfig) -> None:
    network = network_of(config)
    calm = Sweep.of(network)
    assert calm.largest.value < 100
    network.quantizer.rvq_first.vq.layers[0]._codebook.embedding_sum[17] *= 1e6
    loud = Sweep.of(network).largest
    assert 1e5 < loud.value < 1e8
    assert "largest activation" in str(loud)


def test_what_is_not_finite_is_named_by_its_first_layer(config: SpeechTokenizerConfig) -> None:
    network = network_of(config)
    network.decoder[0].conv.bias[3] = torch.nan
    largest = Sweep.of(network).largest
    assert largest.layer == "decoder.0.conv"
    assert "NaN or infinity" in str(largest)


def test_the_audio_is_that_of_the_decoder_that_serves(config: SpeechTokenizerConfig) -> None:
    network, done = network_of(config), []
    sweep = Sweep.of(network, progress=lambda count, total: done.append((count, total)))
    decoder = CodecDecoder(fold(network.state_dict(), network.config))
    audio, _ = decoder.decode(sweep.codes, [decoder.initial_state()] * len(sweep.codes))
    assert (torch.from_numpy(to_pcm16(audio)).int() - sweep.audio).abs().max() <= 1
    assert done[-1] == (len(sweep.codes), len(sweep.codes))
