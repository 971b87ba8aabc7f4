"""Dimensions of the speech tokenizer, read from the checkpoint's `speech_tokenizer/config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field

from deployments.errors import CheckpointError
from deployments.weights.store import as_config, read_json

CONTEXT = 6  # earlier rows that a kernel of size 7 reads
RESIDUAL_DILATIONS = (1, 3, 9)
PRE_CONV_TAPS = 3  # kernel size of the convolution before the transformer
MAX_FRAMES = 12  # per stream in one call on a GPU
MAX_CALL_FRAMES = 384  # across all streams in one call; limits memory use and the next stream's wait
_SMALL_GPU_BYTES, _TINY_GPU_BYTES = 16e9, 5e9


def call_frames(gpu_bytes: float) -> int:
    """Return the maximum number of frames in one call, across all streams, with `gpu_bytes` of memory.

    Captured calls take 6 MB per frame.
    """
    if gpu_bytes >= _SMALL_GPU_BYTES:
        return MAX_CALL_FRAMES
    return MAX_CALL_FRAMES // (4 if gpu_bytes >= _TINY_GPU_BYTES else 16)


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Dimensions of the decoder: residual codebooks, a sliding-window transformer, then upsampling convolutions."""

    attention_bias: bool
    codebook_dim: int
    codebook_size: int
    decoder_dim: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    latent_dim: int
    num_attention_heads: int
    num_hidden_layers: int
    num_key_value_heads: int
    num_quantizers: int
    num_semantic_quantizers: int
    rms_norm_eps: float
    rope_theta: float
    sliding_window: int
    upsample_rates: tuple[int, ...]
    upsampling_ratios: tuple[int, ...]

    @property
    def frame_samples(self) -> int:
        return prod(self.upsampling_ratios) * prod(self.upsample_rates)

    @property
    def cached_frames(self) -> int:
        """Number of frames whose keys and values a GPU stores per stream; a power of two."""
        return 1 << (self.sliding_window - 1 + MAX_FRAMES - 1).bit_length()

    @property
    def suits_matrix_units(self) -> bool:
        """Whether all dimensions of matrix products are multiples of 16, as in the released checkpoints."""
        channels = [self.decoder_dim >> step for step in range(len(self.upsample_rates) + 1)]
        sizes = (self.codebook_dim, self.latent_dim, self.hidden_size, self.intermediate_size, self.head_dim // 2)
        return all(size % 16 == 0 for size in (*channels, *sizes))

    @property
    def convolved_frames(self) -> int:
        """Number of frames that affect a sample through the convolutions after the transformer, including its own."""
        rows, reach = 1, 0.0  # rows per frame at this layer, and number of frames reached
        for ratio in self.upsampling_ratios:
            rows *= ratio
            reach += CONTEXT / rows
        reach += CONTEXT / rows
        for rate in self.upsample_rates:
            reach += 1 / rows
            rows *= rate
            reach += CONTEXT * sum(RESIDUAL_DILATIONS) / rows
        return ceil(reach + CONTEXT / rows) + 1

    @property
    def reach(self) -> int:
        """Number of earlier frames that affect the next sample."""
        return self.num_hidden_layers * (self.sliding_window - 1) + PRE_CONV_TAPS - 1 + self.convolved_frames


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Dimensions of the encoder (Mimi): strided convolutions, a causal transformer, then residual codebooks."""

    audio_channels: int
    codebook_dim: int
    codebook_size: int
    compress: int
    dilation_growth_rate: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    kernel_size: int
    last_kernel_size: int
    norm_eps: float
    num_attention_heads: int
    num_filters: int
    num_hidden_layers: int
    num_quantizers: int
    num_residual_layers: int
    num_semantic_quantizers: int
    residual_kernel_size: int
    rope_theta: float
    upsampling_ratios: tuple[int, ...]
    vector_quantization_hidden_dimension: int
    frame_samples: int  # encode_downsample_rate of the enclosing configuration

    @property
    def downsample_stride(self) -> int:
        """Stride of the convolution after the transformer, which reduces the rate to one step per frame."""
        return self.frame_samples // prod(self.upsampling_ratios)


@dataclass(frozen=True, slots=True)
class SpeechTokenizerConfig:
    """Configuration of the complete codec. Encoder and decoder use the same frame rate and the same codebooks."""

    decoder: Annotated[DecoderConfig, Field(validation_alias="decoder_config")]
    encoder: Annotated[EncoderConfig, Field(validation_alias="encoder_config")]
    input_sample_rate: int
    sample_rate: Annotated[int, Field(validation_alias="output_sample_rate")]
    frame_samples: Annotated[int, Field(validation_alias="decode_upsample_rate")]
    encoder_valid_num_quantizers: int

    @property
    def frame_s(self) -> float:
        return self.frame_samples / self.sample_rate

    @property
    def num_code_groups(self) -> int:
        return self.decoder.num_quantizers

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read `config.json` in `directory`, the checkpoint's `speech_tokenizer` folder. Raises CheckpointError."""
        file = directory / "config.json"
        return cls.from_dict(read_json(file), file)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: Path = Path("config.json")) -> Self:
        """Parse the known keys of a decoded `config.json`. Raises CheckpointError with each wrong key."""
        if "encoder_config" in values:
            encoder = {**values["encoder_config"], "frame_samples": values.get("encode_downsample_rate")}
            values = {**values, "encoder_config": encoder}
        config = as_config(cls, values, source)
        if config.decoder.frame_samples != config.frame_samples:
            raise CheckpointError(
                f"{source}: decode_upsample_rate is {config.frame_samples}, but the decoder's upsampling "
                f"factors multiply to {config.decoder.frame_samples}"
            )
        return config
