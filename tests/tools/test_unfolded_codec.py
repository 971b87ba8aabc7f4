import pytest
import torch

from deployments.codec.backends.triton_slots import every_code
from deployments.codec.codec_config import SpeechTokenizerConfig
from deployments.codec.fold import tensor_shapes
from talkray_tools.random_codec import randomize_decoder
from talkray_tools.released import SHAPES
from talkray_tools.unfolded_codec import DecoderNetwork, largest_activation


def network_of(config: SpeechTokenizerConfig) -> DecoderNetwork:
    network = DecoderNetwork(config.decoder)
    randomize_decoder(network, generator=torch.Generator().manual_seed(1))
    return network.requires_grad_(requires_grad=False)


@pytest.mark.parametrize("name", ["tiny-Base", "1.7B-CustomVoice"])
@pytest.mark.parametrize("attention_bias", [False, True])
def test_what_is_folded_has_the_names_and_shapes_of_the_unfolded(name: str, attention_bias: bool) -> None:
    shape = SHAPES[name].codec
    shape = {**shape, "decoder_config": {**shape["decoder_config"], "attention_bias": attention_bias}}
    config = SpeechTokenizerConfig.from_dict(shape).decoder
    with torch.device("meta"):
        tensors = DecoderNetwork(config).state_dict()
    assert tensor_shapes(config) == {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def test_every_code_of_every_codebook_is_there() -> None:
    codes = every_code(SpeechTokenizerConfig.from_dict(SHAPES["1.7B-CustomVoice"].codec).decoder)
    assert codes.shape == (33, 64, 16)
    swept, random = codes[:-1].reshape(-1, 16), codes[-1]
    assert all(len(column.unique()) == 2048 for column in swept.T)
    assert len(random.unique()) > 500


def test_the_largest_activation_of_one_code_is_found(config: SpeechTokenizerConfig) -> None:
    network, done = network_of(config), list[tuple[int, int]]()
    calm = largest_activation(network, lambda count, total: done.append((count, total)))
    assert calm.value < 100
    assert done[-1] == (2, 2)
    network.quantizer.rvq_first.vq.layers[0]._codebook.embedding_sum[17] *= 1e6
    loud = largest_activation(network, lambda count, total: None)
    assert 1e5 < loud.value < 1e8
    assert "largest activation" in str(loud)


def test_what_is_not_finite_is_named_by_its_first_layer(config: SpeechTokenizerConfig) -> None:
    network = network_of(config)
    network.decoder[0].conv.bias[3] = torch.nan
    largest = largest_activation(network, lambda count, total: None)
    assert largest.layer == "decoder.0.conv"
    assert "NaN or infinity" in str(largest)
