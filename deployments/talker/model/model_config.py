"""A checkpoint's `config.json` and `generation_config.json`, including all dimensions, as frozen values."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasPath, BeforeValidator, Field

from deployments.errors import CheckpointError
from deployments.protocol import SAMPLING_DEFAULTS, ModelKind, Sampling
from deployments.weights.description import TextNeeds, own_facts
from deployments.weights.store import as_config, read_json


def _named(values: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return a table's entries with lower-case names, except false and null values; empty if the table is missing."""
    return {name.lower(): value for name, value in (values or {}).items() if value is not False and value is not None}


Named = BeforeValidator(_named)


_IN_WORDS = {"gt": (operator.gt, "more than"), "ge": (operator.ge, "at least"), "le": (operator.le, "at most")}


def _check_bounds(sampling: Sampling, file: Path) -> None:
    """Raise CheckpointError if an option's value is outside the bounds for requests."""
    for option in fields(sampling):
        for bound, limit in option.metadata["bounds"].items():
            is_within, words = _IN_WORDS[bound]
            if not is_within(value := getattr(sampling, option.name), limit):
                raise CheckpointError(f"{file}: {option.name} is {value}: set it to {words} {limit}")


def _at(*path: str) -> Any:
    """Return a field that is read from these nested keys in the file."""
    return Field(validation_alias=AliasPath(*path))


@dataclass(frozen=True, slots=True)
class TransformerConfig:
    """Dimensions of a Qwen3 decoder stack, for the talker or the code predictor."""

    hidden_size: int
    intermediate_size: int
    num_layers: Annotated[int, _at("num_hidden_layers")]
    num_heads: Annotated[int, _at("num_attention_heads")]
    num_kv_heads: Annotated[int, _at("num_key_value_heads")]
    head_dim: int
    rms_norm_eps: float
    rope_theta: float


@dataclass(frozen=True, slots=True)
class ControlCodes:
    """Ids in the talker's codec vocabulary that control speech and are not codes."""

    pad: Annotated[int, _at("codec_pad_id")]
    bos: Annotated[int, _at("codec_bos_id")]
    eos: Annotated[int, _at("codec_eos_token_id")]
    think: Annotated[int, _at("codec_think_id")]
    nothink: Annotated[int, _at("codec_nothink_id")]
    think_bos: Annotated[int, _at("codec_think_bos_id")]
    think_eos: Annotated[int, _at("codec_think_eos_id")]


@dataclass(frozen=True, slots=True)
class ControlTokens:
    """Ids in the text vocabulary that user text must never contain."""

    im_start: Annotated[int, _at("im_start_token_id")]
    im_end: Annotated[int, _at("im_end_token_id")]
    tts_pad: Annotated[int, _at("tts_pad_token_id")]
    tts_bos: Annotated[int, _at("tts_bos_token_id")]
    tts_eos: Annotated[int, _at("tts_eos_token_id")]


@dataclass(frozen=True, slots=True)
class SpeakerEncoderConfig:
    """Contents of `speaker_encoder_config`. The released files omit fields that are equal to these defaults."""

    enc_dim: int = 1024
    mel_dim: int = 128
    enc_channels: tuple[int, ...] = (512, 512, 512, 512, 1536)
    enc_kernel_sizes: tuple[int, ...] = (5, 3, 3, 3, 1)
    enc_dilations: tuple[int, ...] = (1, 2, 3, 4, 1)
    enc_attention_channels: int = 128
    enc_res2net_scale: int = 8
    enc_se_channels: int = 128
    sample_rate: int = 24000


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything that the talker needs to know about a checkpoint besides the tensors."""

    kind: Annotated[ModelKind, _at("tts_model_type")]
    text_hidden_size: Annotated[int, _at("talker_config", "text_hidden_size")]
    text_vocab_size: Annotated[int, _at("talker_config", "text_vocab_size")]
    vocab_size: Annotated[int, _at("talker_config", "vocab_size")]
    code_vocab_size: Annotated[int, _at("talker_config", "code_predictor_config", "vocab_size")]
    num_code_groups: Annotated[int, _at("talker_config", "num_code_groups")]
    talker: Annotated[TransformerConfig, _at("talker_config")]
    predictor: Annotated[TransformerConfig, _at("talker_config", "code_predictor_config")]
    codes: Annotated[ControlCodes, _at("talker_config")]
    tokens: ControlTokens
    languages: Annotated[Mapping[str, int], Named, _at("talker_config", "codec_language_id")]
    max_position_embeddings: Annotated[int, _at("talker_config", "max_position_embeddings")]
    generation: Sampling
    text: Annotated[TextNeeds, _at("talkray")]
    speakers: Annotated[Mapping[str, int], Named, _at("talker_config", "spk_id")] = Field(default_factory=dict)
    dialects: Annotated[Mapping[str, str], Named, _at("talker_config", "spk_is_dialect")] = Field(default_factory=dict)
    """Maps a speaker to the language that the speaker always uses."""
    speaker_encoder: Annotated[SpeakerEncoderConfig | None, _at("speaker_encoder_config")] = None

    @classmethod
    def load(cls, directory: Path) -> "ModelConfig":
        """Read a checkpoint directory. Raises CheckpointError with the file and each wrong key."""
        file, options = directory / "config.json", directory / "generation_config.json"
        top = read_json(file)
        named = {
            name: value for name, value in (read_json(options) if options.exists() else {}).items() if value is not None
        }
        values = {**top, "tokens": top, "generation": SAMPLING_DEFAULTS | named, "talkray": own_facts(directory, top)}
        config = as_config(cls, values, file)
        _check_bounds(config.generation, options)
        return config if config.kind is ModelKind.BASE else replace(config, speaker_encoder=None)  # has no such tensors
