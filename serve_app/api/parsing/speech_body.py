"""Body of a speech request: its fields, other servers' names for them, and the checks that do not need a model."""

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    create_model,
)

from deployments.errors import InvalidRequest
from deployments.protocol import Sampling
from serve_app.api.parsing.client_input import plain_number, switch
from serve_app.api.parsing.field_names import Names
from serve_app.audio.clone_prompts import Preparation
from serve_app.audio.formats import AudioFormat, OutputRate
from serve_app.config import LEAST_SEGMENT_CHARS, ApiSettings, Markup
from serve_app.text.characters import repair_surrogates
from serve_app.text.languages import language_name

Model = TypeVar("Model", bound=BaseModel)

# Qwen3-TTS servers append the language to the model name, as in tts-1-hd-zh.
_WITH_LANGUAGE = re.compile(r"(tts-1(?:-hd)?)-([a-z]{2})")
_KOKORO_LANGUAGES = {"a": "en-US", "b": "en-GB", "e": "es", "f": "fr", "i": "it", "j": "ja", "p": "pt-BR", "z": "zh"}


def _voice_name(value: object) -> object:
    """Return the voice name. OpenAI's clients send a name or {"id": name}; an empty name becomes None."""
    name = value.get("id", value) if isinstance(value, dict) else value
    return name.strip() or None if isinstance(name, str) else name


def _joined_halves(value: object) -> object:
    return repair_surrogates(value) if isinstance(value, str) else value


def _with_sampling(body: type[Model]) -> type[Model]:
    """Add a field to `body` for each option of `Sampling`, with the option's limits."""
    options: dict[str, Any] = {
        option.name: (Annotated[get_args(option.type)[0], Field(**option.metadata["bounds"])] | None, None)
        for option in fields(Sampling)
    }
    return create_model(body.__name__, __base__=body, __module__=__name__, __doc__=body.__doc__, **options)


@_with_sampling
class SpeechBody(BaseModel):
    """Body of `POST /v1/audio/speech`. The response lists ignored unknown fields. A null counts as an absent field."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False, loc_by_alias=False)

    input: Annotated[
        str,
        BeforeValidator(_joined_halves, json_schema_input_type=str),
        Field(validation_alias=AliasChoices("input", "text")),
    ]
    model: str | None = None
    voice: Annotated[
        str | None,
        BeforeValidator(_voice_name, json_schema_input_type=str | dict[str, str] | None),
        Field(validation_alias=AliasChoices("voice", "speaker")),
    ] = None
    instructions: Annotated[str | None, Field(validation_alias=AliasChoices("instructions", "instruct"))] = None
    response_format: Annotated[
        AudioFormat | None, Field(strict=False), WithJsonSchema({"type": "string", "enum": list(AudioFormat)})
    ] = None
    stream_format: Literal["audio", "sse"] | None = None
    sample_rate: OutputRate | None = None  # None: the model's sample rate
    stream: bool = True
    speed: Annotated[float, Field(ge=0.25, le=4)] = 1.0

    language: str = "auto"  # a name, an ISO code, "auto", or "detect" (per-segment detection)
    any_language: bool = False  # also accept languages that the loaded voice was not trained on
    ref_audio: Annotated[str | None, Field(validation_alias=AliasChoices("ref_audio", "reference_audio"))] = None
    ref_text: Annotated[str | None, Field(validation_alias=AliasChoices("ref_text", "reference_text"))] = None
    x_vector_only_mode: bool = False
    prepare: Preparation | None = None  # preparation of ref_audio; None: "none"
    non_streaming_mode: bool | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    ignore_eos: bool = False
    leading_silence: bool = False
    word_timestamps: bool = False  # send events with word timestamps
    markup: Markup | None = None  # None: use the server's setting
    text_normalization: Literal["on", "off"] | None = None  # on: write numbers and symbols as words
    lexicon: dict[str, str] | None = None  # pronunciations by word
    max_segment_chars: Annotated[int, Field(ge=LEAST_SEGMENT_CHARS)] | None = None  # None: use the server's setting
    previous_request_id: str | None = None  # continue from where this request ended
    # `_with_sampling` adds do_sample, temperature, top_k and the other fields of `Sampling` (deployments/protocol.py).

    @property
    def sampling(self) -> Sampling:
        return Sampling(**{option.name: getattr(self, option.name) for option in fields(Sampling)})


# Fields that replicas receive unchanged, as fields of SynthesisRequest with the same names.
PASSED_ON = ("non_streaming_mode", "ignore_eos", "leading_silence")
# Fields that only extensions read.
EXTENSION_FIELDS = (
    "prepare",
    "word_timestamps",
    "markup",
    "text_normalization",
    "lexicon",
    "max_segment_chars",
    "previous_request_id",
)
# Field names of SpeechBody and their aliases.
SPEECH: Names = {
    str(choice): name
    for name, field in SpeechBody.model_fields.items()
    for choice in (field.validation_alias.choices if isinstance(field.validation_alias, AliasChoices) else [name])
}
# The same, plus the names used by Dify and Kokoro-FastAPI, which also serve `/v1/audio/speech`.
ALL_SPELLINGS: Names = {
    **SPEECH,
    "instruction": "instructions",
    "lang_code": "language",
    "ssml": None,
    "normalization_options": None,
}


def in_our_spelling(fields: Mapping[str, object]) -> dict[str, object]:
    """Replace other servers' names in `fields` with Talkray's own names. Raises InvalidRequest."""
    ours = dict(fields)
    if "instruction" in ours and "instructions" not in ours:  # Dify
        ours["instructions"] = ours.pop("instruction")
    code = ours.get("lang_code")
    if not isinstance(code, str | None):
        raise InvalidRequest("lang_code must be a string.", "lang_code")
    if code is not None and "language" not in ours:  # Kokoro-FastAPI
        ours["language"] = _KOKORO_LANGUAGES.get(code, code)
        del ours["lang_code"]
    if "ssml" in ours and switch(ours, "ssml") and "markup" not in ours:  # Kokoro-FastAPI
        ours["markup"] = "ssml"
    options = ours.get("normalization_options")
    if isinstance(options, dict) and options.get("normalize") is not None:  # Kokoro-FastAPI
        ours.setdefault("text_normalization", "on" if switch(options, "normalize") else "off")
    model = ours.get("model")
    named = _WITH_LANGUAGE.fullmatch(model) if isinstance(model, str) else None
    if named and language_name(named[2]) != named[2]:
        ours["model"] = named[1]
        ours.setdefault("language", named[2])
    return ours


def parse_speech(fields: Mapping[str, object], settings: ApiSettings) -> SpeechBody:
    """Parse the fields of one utterance. Raises InvalidRequest naming the first invalid field. The text's length is
    checked before any other code reads it.
    """
    body = validated(SpeechBody, fields)
    check_length("input", body.input, settings)
    return body


def validated(model: type[Model], fields: Mapping[str, object]) -> Model:
    """Validate `fields` as `model`. A string is accepted as a number, boolean or choice if its meaning is unambiguous.
    Raises InvalidRequest naming the first invalid field.
    """
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        refused = {str(each["loc"][0]) for each in error.errors() if len(each["loc"]) == 1}
        plain = {name: _unquoted(sent) for name, sent in fields.items() if name in refused and isinstance(sent, str)}
    try:
        return model.model_validate({**fields, **plain})
    except ValidationError as error:
        raise _invalid(error) from error


def _unquoted(text: str) -> object:
    known = text.strip().lower()
    return {"true": True, "false": False}.get(known, plain_number(known))


def _invalid(error: ValidationError) -> InvalidRequest:
    """Return the first validation error, with its field."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    param = str(first["loc"][0])
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    return InvalidRequest(f"{param}: {first['msg']}.", param, code)


def check_length(param: str, text: str, settings: ApiSettings) -> None:
    """Raise InvalidRequest if the text is too long."""
    if len(text) > settings.max_input_chars:
        message = f"{param} has {len(text)} characters. Use at most {settings.max_input_chars}."
        raise InvalidRequest(message, param, "string_above_max_length")
