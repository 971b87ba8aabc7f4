import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from deployments.codec.backends.registry import load_decoder
from deployments.codec.codec_config import SpeechTokenizerConfig
from deployments.codec.decoder import CodecDecoder
from deployments.codec.encoder import EncoderNetwork
from talkray_tools.random_codec import randomize_codec
from talkray_tools.unfolded_codec import DecoderNetwork

CONFIG = {
    "model_type": "qwen3_tts_tokenizer_12hz", "encoder_valid_num_quantizers": 4, "input_sample_rate": 300,
    "output_sample_rate": 300, "decode_upsample_rate": 24, "encode_downsample_rate": 24,
    "decoder_config": {
        "attention_bias": False, "codebook_dim": 8, "codebook_size": 32, "decoder_dim": 16, "head_dim": 8,
        "hidden_size": 12, "intermediate_size": 16, "latent_dim": 16, "num_attention_heads": 4,
        "num_hidden_layers": 2, "num_key_value_heads": 2, "num_quantizers": 4, "num_semantic_quantizers": 1,
        "rms_norm_eps": 1e-5, "rope_theta": 10000, "sliding_window": 6, "upsample_rates": [4, 3],
        "upsampling_ratios": [2],
    },
    "encoder_config": {
        "audio_channels": 1, "codebook_dim": 6, "codebook_size": 32, "compress": 2, "dilation_growth_rate": 2,
        "head_dim": 8, "hidden_size": 16, "intermediate_size": 24, "kernel_size": 7, "last_kernel_size": 3,
        "norm_eps": 1e-5, "num_attention_heads": 2, "num_filters": 4, "num_hidden_layers": 2,
        "num_quantizers": 6, "num_residual_layers": 1, "num_semantic_quantizers": 1, "residual_kernel_size": 3,
        "rope_theta": 10000.0, "upsampling_ratios": [4, 3], "vector_quantization_hidden_dimension": 6,
    },
}  # fmt: skip


@pytest.fixture(scope="session")
def config() -> SpeechTokenizerConfig:
    return SpeechTokenizerConfig.from_dict(CONFIG)


@pytest.fixture(scope="session")
def networks(config: SpeechTokenizerConfig) -> tuple[DecoderNetwork, EncoderNetwork]:
    torch.set_num_threads(1)
    decoder, encoder = DecoderNetwork(config.decoder), EncoderNetwork(config.encoder)
    randomize_codec(decoder, encoder, generator=torch.Generator().manual_seed(7))
    return decoder, encoder


@pytest.fixture(scope="session")
def tensors(networks: tuple[DecoderNetwork, EncoderNetwork]) -> dict[str, torch.Tensor]:
    decoder, encoder = networks
    prefixed = {f"decoder.{name}": tensor for name, tensor in decoder.state_dict().items()}
    return prefixed | {f"encoder.{name}": tensor for name, tensor in encoder.state_dict().items()}


@pytest.fixture(scope="session")
def directory(tensors: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("speech_tokenizer")
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.fixture(scope="session")
def decoder(directory: Path) -> CodecDecoder:
    return load_decoder(directory)


@pytest.fixture(scope="session")
def codes(config: SpeechTokenizerConfig) -> torch.Tensor:  # [3 streams, 40 frames, num_code_groups]
    generator = torch.Generator().manual_seed(0)
    return torch.randint(config.decoder.codebook_size, (3, 40, config.num_code_groups), generator=generator)
