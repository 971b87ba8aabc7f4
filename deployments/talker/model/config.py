"""`config.json` and `generation_config.json` of a checkpoint as frozen values. Every dimension comes from here."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from deployments.errors import CheckpointError
from deployments.protocol import ModelKind, Sampling


class _Section:
    """One JSON object of a config file. A missing key fails with its path and the file's name."""

    def __init__(self, values: Mapping[str, Any], file: Path, path: str = "") -> None:
        self.values, self.file, self.path = values, file, path

    def __getitem__(self, key: str) -> Any:
        if key not in self.values:
            raise CheckpointError(f"{self.file}: key {self.path + key!r} is missing")
        return self.values[key]

    def section(self, key: str) -> "_Section":
        return _Section(self[key], self.file, f"{self.path}{key}.")


@dataclass(frozen=True, slots=True)
class TransformerConfig:
    """A Qwen3 decoder stack: the talker's, or the code predictor's."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float

    @classmethod
    def read(cls, section: _Section) -> "TransformerConfig":
        """The stack that `talker_config` or `code_predictor_config` describes."""
        return cls(
            hidden_size=section["hidden_size"],
            intermediate_size=section["intermediate_size"],
            num_layers=section["num_hidden_layers"],
            num_heads=section["num_attention_heads"],
            num_kv_heads=section["num_key_value_heads"],
            head_dim=section["head_dim"],
            rms_norm_eps=section["rms_norm_eps"],
            rope_theta=float(section["rope_theta"]),
        )


@dataclass(frozen=True, slots=True)
class ControlCodes:
    """Ids of the talker's codec vocabulary that are not codes."""

    pad: int
    bos: int
    eos: int
    think: int
    nothink: int
    think_bos: int
    think_eos: int


@dataclass(frozen=True, slots=True)
class ControlTokens:
    """Ids of the text vocabulary that only Talkray may write, never user text."""

    im_start: int
    im_end: int
    tts_pad: int
    tts_bos: int
    tts_eos: int


@dataclass(frozen=True, slots=True)
class TextNeeds:
    """What text has to be like before the checkpoint can speak it: Talkray's own addition to `config.json`."""

    spoken_form: str | None = None  # "english": normalised to spoken words
    max_segment_chars: int = 1000


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything the talker needs to know of a checkpoint besides its tensors."""

    kind: ModelKind
    size: str
    text_hidden_size: int
    text_vocab_size: int
    vocab_size: int
    code_vocab_size: int
    num_code_groups: int
    talker: TransformerConfig
    predictor: TransformerConfig
    codes: ControlCodes
    tokens: ControlTokens
    languages: Mapping[str, int]
    speakers: Mapping[str, int]
    dialects: Mapping[str, str]  # speaker -> language it always speaks
    speaker_encoder: Mapping[str, Any] | None
    max_position_embeddings: int
    text: TextNeeds
    generation: Sampling

    @property
    def num_suppressed(self) -> int:
        """How many ids at the end of the vocabulary are never sampled, end of speech apart."""
        return 1024

    @property
    def drops_instructions(self) -> bool:
        """The official package ignores instructions for the small CustomVoice model, which was not trained on them."""
        return self.kind is ModelKind.CUSTOM_VOICE and self.size == "0b6"

    @classmethod
    def load(cls, directory: Path) -> "ModelConfig":
        """Read a checkpoint directory; raises CheckpointError with the file and key that is wrong."""
        top = _Section(_read_json(directory / "config.json"), directory / "config.json")
        talker = top.section("talker_config")
        predictor = talker.section("code_predictor_config")
        dialects = talker.values.get("spk_is_dialect") or {}
        return cls(
            kind=_kind(top),
            size=top["tts_model_size"],
            text_hidden_size=talker["text_hidden_size"],
            text_vocab_size=talker["text_vocab_size"],
            vocab_size=talker["vocab_size"],
            code_vocab_size=predictor["vocab_size"],
            num_code_groups=talker["num_code_groups"],
            talker=TransformerConfig.read(talker),
            predictor=TransformerConfig.read(predictor),
            codes=_control_codes(talker),
            tokens=_control_tokens(top),
            languages={name.lower(): code for name, code in talker["codec_language_id"].items()},
            speakers={name.lower(): code for name, code in (talker.values.get("spk_id") or {}).items()},
            dialects={name.lower(): dialect for name, dialect in dialects.items() if dialect},
            speaker_encoder=top.values.get("speaker_encoder_config"),
            max_position_embeddings=talker["max_position_embeddings"],
            text=_text_needs(top),
            generation=_generation(directory / "generation_config.json"),
        )


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing: is {file.parent} a Qwen3-TTS checkpoint directory?") from None
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from None


def _kind(top: _Section) -> ModelKind:
    try:
        return ModelKind(top["tts_model_type"])
    except ValueError:
        known = ", ".join(ModelKind)
        raise CheckpointError(f"{top.file}: tts_model_type {top['tts_model_type']!r} is none of {known}") from None


def _text_needs(top: _Section) -> TextNeeds:
    """The optional object `talkray`, which checkpoints made for Talkray have."""
    values = top.values.get("talkray") or {}
    needs = TextNeeds(**{field.name: values[field.name] for field in fields(TextNeeds) if field.name in values})
    if needs.spoken_form not in (None, "english"):
        raise CheckpointError(f"{top.file}: talkray.spoken_form {needs.spoken_form!r} is not known, only 'english' is")
    if not isinstance(needs.max_segment_chars, int) or needs.max_segment_chars < 1:
        raise CheckpointError(
            f"{top.file}: talkray.max_segment_chars {needs.max_segment_chars!r} is no positive integer"
        )
    return needs


def _control_codes(talker: _Section) -> ControlCodes:
    return ControlCodes(
        pad=talker["codec_pad_id"],
        bos=talker["codec_bos_id"],
        eos=talker["codec_eos_token_id"],
        think=talker["codec_think_id"],
        nothink=talker["codec_nothink_id"],
        think_bos=talker["codec_think_bos_id"],
        think_eos=talker["codec_think_eos_id"],
    )


def _control_tokens(top: _Section) -> ControlTokens:
    return ControlTokens(
        im_start=top["im_start_token_id"],
        im_end=top["im_end_token_id"],
        tts_pad=top["tts_pad_token_id"],
        tts_bos=top["tts_bos_token_id"],
        tts_eos=top["tts_eos_token_id"],
    )


# What the official wrapper falls back to where generation_config.json lacks a key.
_WRAPPER_DEFAULTS = {
    "do_sample": True,
    "temperature": 0.9,
    "top_k": 50,
    "top_p": 1.0,
    "repetition_penalty": 1.05,
    "subtalker_dosample": True,
    "subtalker_temperature": 0.9,
    "subtalker_top_k": 50,
    "subtalker_top_p": 1.0,
    "max_new_tokens": 2048,
}


def _generation(file: Path) -> Sampling:
    values = _read_json(file) if file.exists() else {}
    return Sampling(**{key: values.get(key, default) for key, default in _WRAPPER_DEFAULTS.items()})
