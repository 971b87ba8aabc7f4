"""From what a client sent to what the replicas are asked, checked against the loaded model."""

import secrets
import unicodedata
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Literal, TypeVar

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema
from pydantic_core import from_json

from deployments.errors import InvalidRequest
from deployments.protocol import ModelInfo, ModelKind, Reference, Sampling, SynthesisRequest
from deployments.voice.english import spoken_english
from serve_app import voices
from serve_app.audio import AudioFormat, OutputRate
from serve_app.config import ApiSettings
from serve_app.languages import foreign_language, language_name
from serve_app.reference_audio import read_aside

# Figures and signs become words: prose with many of them grows by less than a half, nothing but figures fivefold.
_MOST_GROWTH = 2
# A client may send the seed back: as many bits as every reader of JSON keeps.
_SEED_BITS = 53


# Dividing or multiplying logits by more would leave the range of float32.
Scale = Annotated[float, Field(gt=0, ge=1e-6, le=1e6)]
Probability = Annotated[float, Field(gt=0, le=1)]
INT32_MAX = 2**31 - 1
Model = TypeVar("Model", bound=BaseModel)

MAX_BODY_BYTES = 16 << 20  # of an HTTP request, and of a WebSocket message with reference audio


def _voice_name(value: object) -> object:
    """OpenAI sends a voice as its name or as {"id": name}."""
    return value.get("id") if isinstance(value, dict) else value


class SpeechBody(BaseModel):
    """Body of `POST /v1/audio/speech`. Unknown keys are ignored, and the answer says so; a null is an absent field."""

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
    sample_rate: OutputRate | None = None  # None: the model's
    stream: bool = True
    speed: Annotated[float, Field(ge=0.25, le=4)] = 1.0

    language: str = "auto"  # a name or an ISO code
    any_language: bool = False  # also one that the loaded voice has not learnt
    ref_audio: str | None = None
    ref_text: str | None = None
    x_vector_only_mode: bool = False
    non_streaming_mode: bool | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    ignore_eos: bool = False
    leading_silence: bool = False
    word_timestamps: bool = False  # events say when which word is heard

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
    return validated(SpeechBody, fields)


def validated(model: type[Model], fields: Mapping[str, object]) -> Model:
    """`fields` as `model` has them. Raises InvalidRequest that names the first bad one."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _invalid(error) from error


def _invalid(error: ValidationError) -> InvalidRequest:
    """The first problem, with the field that it is of."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    param = str(first["loc"][0])
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    return InvalidRequest(f"{param}: {first['msg']}.", param, code)


async def build_request(
    body: SpeechBody, info: ModelInfo, settings: ApiSettings, *, request_id: str, client: str = "", live: bool = False
) -> SynthesisRequest:
    """One utterance for the loaded model; the text of a `live` one is to come. Raises InvalidRequest with the field.

    The text may have nothing to speak, as "..." has: see `is_speakable`.
    """
    voices.check_model(body.model, info, settings)
    if body.ref_audio is not None and info.kind is not ModelKind.BASE:  # before `voice` is missed: it would not help
        raise InvalidRequest(f"{info.name} does not clone voices: load a Base checkpoint.", "ref_audio")
    return SynthesisRequest(
        request_id=request_id,
        client=client,
        voice=_voice(body, info),
        text="" if live else _text(body, info, settings),
        language=_language(body, info),
        instructions=_instructions(body, info, settings),
        reference=await _reference(body, info, settings),
        sampling=Sampling(**{option.name: getattr(body, option.name) for option in fields(Sampling)}),
        seed=draw_seed() if body.seed is None else body.seed,
        redraws=body.seed is None,
        non_streaming_mode=body.non_streaming_mode,
        ignore_eos=body.ignore_eos,
        leading_silence=body.leading_silence,
        word_times=body.word_timestamps and info.word_times,
    )


def draw_seed() -> int:
    """A seed for a request whose client gave none."""
    return secrets.randbits(_SEED_BITS)


def _missing(param: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{param} is required: {reason}.", param, "missing_required_parameter")


def _cleaned(param: str, text: str | None, settings: ApiSettings) -> str:
    """Nothing sent and nothing to speak are the same: an empty string."""
    _check_length(param, text or "", settings)
    return clean(text or "")


def _check_length(param: str, text: str, settings: ApiSettings) -> None:
    if len(text) > settings.max_input_chars:
        message = f"{param} has {len(text)} characters, at most {settings.max_input_chars} are allowed."
        raise InvalidRequest(message, param, "string_above_max_length")


def clean(text: str) -> str:
    """NFC without control and format (zero-width) characters, runs of whitespace as one space, no space at the ends."""
    spoken = "".join(char for char in text if char.isspace() or unicodedata.category(char) not in ("Cc", "Cf"))
    return " ".join(unicodedata.normalize("NFC", spoken).split())


def _text(body: SpeechBody, info: ModelInfo, settings: ApiSettings) -> str:
    """A spoken form is made from the text as it was sent, while lines and characters still say what they mean."""
    _check_length("input", body.input, settings)
    if not body.any_language and language_name(body.language) == "auto":
        foreign = foreign_language(body.input, info.languages)
        if foreign is not None:
            raise _not_spoken("input", f"it is written in {foreign}", body, info)
    text = spoken_text(body, info)
    if not clean(body.input) or (not text and is_speakable(body.input) and not body.any_language):
        raise InvalidRequest(f"input has no characters that can be spoken: {_speaks(body, info)}.", "input")
    if len(text) > (most := _MOST_GROWTH * settings.max_input_chars):
        message = f"input takes {len(text)} characters in words, at most {most} are allowed: send it in parts."
        raise InvalidRequest(message, "input", "string_above_max_length")
    return text


def spoken_text(body: SpeechBody, info: ModelInfo) -> str:
    """What the model reads of `input`; may be empty."""
    return spoken_english(body.input) if info.spoken_form == "english" else clean(body.input)


def is_speakable(text: str) -> bool:
    """Whether there is anything in a spoken text besides punctuation and pictures."""
    return any(unicodedata.category(char)[0] in "LN" for char in text)


def _voice(body: SpeechBody, info: ModelInfo) -> str | None:
    """Models without speakers ignore the voice, because OpenAI's clients cannot leave it out."""
    if info.kind is not ModelKind.CUSTOM_VOICE:
        return None
    if body.voice is None:
        raise _missing("voice", f"one of {voices.listing(info.voices)}")
    return voices.resolve(body.voice, info.voices)


def _language(body: SpeechBody, info: ModelInfo) -> str:
    language = language_name(body.language)
    if language in ("auto", *info.languages):
        return language
    if not body.any_language:
        raise _not_spoken("language", f"{body.language[:80]!r} is none of the loaded voice's", body, info)
    return "auto"


def _not_spoken(param: str, reason: str, body: SpeechBody, info: ModelInfo) -> InvalidRequest:
    remedy = '"any_language": true tries it anyway'
    return InvalidRequest(f"{param}: {reason}; {_speaks(body, info)}. {remedy}.", param, "unsupported_language")


def _speaks(body: SpeechBody, info: ModelInfo) -> str:
    voice = _voice(body, info)
    who = info.name if voice is None else f"the voice {voice!r} of {info.name}"
    return f"{who} speaks {', '.join(info.languages)}"


def _instructions(body: SpeechBody, info: ModelInfo, settings: ApiSettings) -> str | None:
    """Checkpoints that cannot follow instructions speak without them, as in the official package."""
    if not info.supports_instructions:
        return None
    instructions = _cleaned("instructions", body.instructions, settings) or None
    if info.kind is ModelKind.VOICE_DESIGN and instructions is None:
        raise _missing("instructions", "the loaded model designs its voice from them")
    return instructions


async def _reference(body: SpeechBody, info: ModelInfo, settings: ApiSettings) -> Reference | None:
    if info.kind is not ModelKind.BASE:
        return None
    if body.ref_audio is None:
        raise _missing("ref_audio", "the loaded model speaks with the voice of a recording")
    text = _cleaned("ref_text", body.ref_text, settings) or None
    if text is None and not body.x_vector_only_mode:
        raise _missing("ref_text", "what ref_audio says, unless x_vector_only_mode is true")
    return await read_aside(body.ref_audio, text, info, x_vector_only=body.x_vector_only_mode)
