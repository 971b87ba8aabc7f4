"""Body of a speech request: its fields, and the checks that do not need a model."""

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, cast, get_args

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
from serve_app.api.parsing.client_input import plain_number
from serve_app.api.parsing.field_names import Names
from serve_app.audio.formats import AudioFormat, OutputRate
from serve_app.config import ApiSettings
from serve_app.text.characters import repair_surrogates

Model = TypeVar("Model", bound=BaseModel)


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
    non_streaming_mode: bool | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    ignore_eos: bool = False
    leading_silence: bool = False
    word_timestamps: bool = False  # send events with word timestamps
    # `_with_sampling` adds do_sample, temperature, top_k and the other fields of `Sampling` (deployments/protocol.py).
    # Extensions add the fields that only they read: see `with_fields`.

    @property
    def sampling(self) -> Sampling:
        return Sampling(**{option.name: getattr(self, option.name) for option in fields(Sampling)})

    def of(self, kind: type[Model]) -> Model:
        """Return this body as `kind`, which an extension has added."""
        assert isinstance(self, kind), f"{kind.__name__} are not in this body: see with_fields"
        return self


# Fields that replicas receive unchanged, as fields of SynthesisRequest with the same names.
PASSED_ON = ("non_streaming_mode", "ignore_eos", "leading_silence")


@cache
def with_fields(body: type[SpeechBody], more: type[BaseModel]) -> type[SpeechBody]:
    """Add the fields of an extension to a body. `SpeechBody.of` returns them."""
    bases = cast("tuple[type[SpeechBody], ...]", (more, body))
    return create_model("SpeechBody", __base__=bases, __module__=__name__, __doc__=SpeechBody.__doc__)


@cache
def names_of(body: type[SpeechBody]) -> Names:
    """Return the names of a body's fields, and their aliases."""
    aliases = {
        name: field.validation_alias.choices if isinstance(field.validation_alias, AliasChoices) else [name]
        for name, field in body.model_fields.items()
    }
    return {str(alias): name for name, choices in aliases.items() for alias in choices}


def parse_speech(kind: type[SpeechBody], fields: Mapping[str, object], settings: ApiSettings) -> SpeechBody:
    """Parse the fields of one utterance. Raises InvalidRequest naming the first invalid field. The text's length is
    checked before any other code reads it.
    """
    body = validated(kind, fields)
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
