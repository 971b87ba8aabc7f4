"""What a client sends, checked field by field."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema
from pydantic_core import from_json

from deployments.errors import InvalidRequest
from serve_app.audio import AudioFormat

# Dividing or multiplying logits by more would leave the range of float32.
Scale = Annotated[float, Field(gt=0, ge=1e-6, le=1e6)]
Probability = Annotated[float, Field(gt=0, le=1)]
INT32_MAX = 2**31 - 1


def _voice_name(value: object) -> object:
    """OpenAI sends a voice as its name or as {"id": name}."""
    return value.get("id") if isinstance(value, dict) else value


class SpeechBody(BaseModel):
    """Body of `POST /v1/audio/speech`. Unknown keys are ignored, a null is an absent field."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False, loc_by_alias=False)

    input: Annotated[str, Field(validation_alias=AliasChoices("input", "text"))]
    model: str | None = None
    voice: Annotated[
        Annotated[str, BeforeValidator(_voice_name, json_schema_input_type=str | dict[str, str])] | None,
        Field(validation_alias=AliasChoices("voice", "speaker")),
    ] = None
    instructions: Annotated[str | None, Field(validation_alias=AliasChoices("instructions", "instruct"))] = None
    response_format: Annotated[
        AudioFormat | None, Field(strict=False), WithJsonSchema({"type": "string", "enum": list(AudioFormat)})
    ] = None
    stream_format: Literal["audio", "sse"] | None = None
    stream: bool = True
    speed: Annotated[float, Field(ge=0.25, le=4)] = 1.0

    language: str = "auto"
    ref_audio: str | None = None
    ref_text: str | None = None
    x_vector_only_mode: bool = False
    non_streaming_mode: bool | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    ignore_eos: bool = False
    leading_silence: bool = False

    do_sample: bool | None = None
    temperature: Scale | None = None
    top_k: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    top_p: Probability | None = None
    repetition_penalty: Scale | None = None
    subtalker_dosample: bool | None = None
    subtalker_temperature: Scale | None = None
    subtalker_top_k: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    subtalker_top_p: Probability | None = None
    max_new_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None


def parse_object(raw: bytes | str) -> dict[str, object]:
    """A JSON object, its nulls left out. Raises InvalidRequest."""
    try:
        value = from_json(raw)
    except ValueError as error:
        raise InvalidRequest(f"Not valid JSON: {error}.", None, "invalid_json") from error
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.", None, "invalid_json")
    return {key: item for key, item in value.items() if item is not None}


def parse_speech(fields: Mapping[str, object]) -> SpeechBody:
    """The fields of one utterance. Raises InvalidRequest that names the first bad one."""
    try:
        return SpeechBody.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        param = str(first["loc"][0])
        code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
        raise InvalidRequest(f"{param}: {first['msg']}.", param, code) from error
