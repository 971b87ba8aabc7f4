"""From a client's fields to a request to the replicas, checked against the loaded model."""

import asyncio
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
from deployments.protocol import ModelInfo, ModelKind, Reference, Sampling, SynthesisRequest
from serve_app.api import catalogue
from serve_app.audio.formats import AudioFormat, OutputRate
from serve_app.audio.recordings import read_aside
from serve_app.audio.reference_doctor import Preparation, decode_prepared
from serve_app.config import LEAST_SEGMENT_CHARS, ApiSettings
from serve_app.speech.characters import clean, is_speakable, without_halves
from serve_app.speech.detection import DETECT, detected
from serve_app.speech.first_audio import draw_seed
from serve_app.speech.languages import foreign_language, language_name
from serve_app.speech.markup import Markup
from serve_app.speech.spoken_text import SpokenText
from serve_app.voices.library import Voices
from serve_app.voices.record import StoredVoice

# Figures and signs become words: prose with many of them grows by less than a half, nothing but figures fivefold.
_MOST_GROWTH = 2

Model = TypeVar("Model", bound=BaseModel)


def _voice_name(value: object) -> object:
    """OpenAI sends a voice as its name or as {"id": name}."""
    return value.get("id") if isinstance(value, dict) else value


def _joined_halves(value: object) -> object:
    return without_halves(value) if isinstance(value, str) else value


def _with_sampling(body: type[Model]) -> type[Model]:
    """`body` with a field for each option of `Sampling`, in its bounds."""
    options: dict[str, Any] = {
        option.name: (Annotated[get_args(option.type)[0], Field(**option.metadata["bounds"])] | None, None)
        for option in fields(Sampling)
    }
    return create_model(body.__name__, __base__=body, __module__=__name__, __doc__=body.__doc__, **options)


@_with_sampling
class SpeechBody(BaseModel):
    """Body of `POST /v1/audio/speech`. Unknown keys are ignored, and the answer says so; a null is an absent field."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False, loc_by_alias=False)

    input: Annotated[
        str,
        BeforeValidator(_joined_halves, json_schema_input_type=str),
        Field(validation_alias=AliasChoices("input", "text")),
    ]
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

    language: str = "auto"  # a name or an ISO code; "detect": of each segment
    any_language: bool = False  # also one that the loaded voice has not learnt
    ref_audio: Annotated[str | None, Field(validation_alias=AliasChoices("ref_audio", "reference_audio"))] = None
    ref_text: Annotated[str | None, Field(validation_alias=AliasChoices("ref_text", "reference_text"))] = None
    x_vector_only_mode: bool = False
    prepare: Preparation | None = None  # of ref_audio; None: "none"
    non_streaming_mode: bool | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    ignore_eos: bool = False
    leading_silence: bool = False
    word_timestamps: bool = False  # events say when which word is heard
    markup: Markup | None = None  # None: as api.text.markup
    text_normalization: Literal["on", "off"] | None = None  # on: figures and signs become words
    lexicon: dict[str, str] | None = None  # how words are said
    max_segment_chars: Annotated[int, Field(ge=LEAST_SEGMENT_CHARS)] | None = None  # None: as api.text has it

    @property
    def sampling(self) -> Sampling:
        return Sampling(**{option.name: getattr(self, option.name) for option in fields(Sampling)})


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
    body: SpeechBody,
    info: ModelInfo,
    settings: ApiSettings,
    *,
    stored: StoredVoice | None,
    spoken: SpokenText,
    voices: Voices,
    request_id: str,
    client: str = "",
    live: bool = False,
) -> SynthesisRequest:
    """One utterance for the model `info`, which was chosen for `body`. Raises InvalidRequest that names the field.

    `spoken` is what is spoken of `body.input`, `stored` the voice that speaks, if it is one of `voices`: see
    `stored_voice`. A `live` request has no text yet. The text of others may have nothing to speak, as "..." has: see
    `is_speakable`.
    """
    if body.ref_audio is not None and info.kind is not ModelKind.BASE:  # before `voice` is missed: it would not help
        raise InvalidRequest(f"{info.name} does not clone voices: load a Base checkpoint.", "ref_audio")
    body = body if stored is None else _with_defaults(body, stored, info)
    language, of_each = _language(body, info), False
    if language == DETECT:
        of_each = not live
        whole = await asyncio.to_thread(detected, spoken.text, info.languages) if of_each else None
        language = whole or "auto"
    return SynthesisRequest(
        request_id=request_id,
        client=client,
        voice=_voice(body, info),
        text="" if live else _text(body, info, settings, spoken),
        stretches=() if live else spoken.stretches,
        max_segment_chars=spoken.rules.max_segment_chars,
        language=language,
        languages=info.languages if of_each else (),
        instructions=_instructions(body, info, settings),
        reference=await _reference(body, info, settings, stored, voices),
        sampling=body.sampling,
        seed=draw_seed() if body.seed is None else body.seed,
        redraws=body.seed is None,
        non_streaming_mode=body.non_streaming_mode,
        ignore_eos=body.ignore_eos,
        leading_silence=body.leading_silence,
        word_times=body.word_timestamps,
        model=info.route,
    )


def _missing(param: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{param} is required: {reason}.", param, "missing_required_parameter")


def _cleaned(param: str, text: str | None, settings: ApiSettings) -> str:
    """Nothing sent and nothing to speak are the same: an empty string."""
    check_length(param, text or "", settings)
    return clean(text or "")


def check_length(param: str, text: str, settings: ApiSettings) -> None:
    """Raises InvalidRequest of a text that is too long; before anything else looks at it."""
    if len(text) > settings.max_input_chars:
        message = f"{param} has {len(text)} characters, at most {settings.max_input_chars} are allowed."
        raise InvalidRequest(message, param, "string_above_max_length")


def _text(body: SpeechBody, info: ModelInfo, settings: ApiSettings, spoken: SpokenText) -> str:
    """The text that the model reads; may have nothing to speak."""
    check_length("input", body.input, settings)
    if not body.any_language and language_name(body.language) in ("auto", DETECT):
        foreign = foreign_language(body.input, info.languages)
        if foreign is not None:
            raise _not_spoken("input", f"it is written in {foreign}", body, info)
    text = spoken.text
    if spoken.left_out and not text and is_speakable(body.input) and not body.any_language:
        told = ", ".join(spoken.left_out)
        raise InvalidRequest(f'input: all of it is left out ({told}); "markup": "none" reads it as it is.', "input")
    if not clean(body.input) or (not text and is_speakable(body.input) and not body.any_language):
        raise InvalidRequest(f"input has no characters that can be spoken: {_speaks(body, info)}.", "input")
    if len(text) > (most := _MOST_GROWTH * settings.max_input_chars):
        message = f"input takes {len(text)} characters in words, at most {most} are allowed: send it in parts."
        raise InvalidRequest(message, "input", "string_above_max_length")
    return text


def _voice(body: SpeechBody, info: ModelInfo) -> str | None:
    """Models without speakers ignore the voice, because OpenAI's clients cannot leave it out."""
    if info.kind is not ModelKind.CUSTOM_VOICE:
        return None
    if body.voice is None:
        raise _missing("voice", f"one of {catalogue.listing(info.voices)}")
    return catalogue.resolve(body.voice, info.voices)


def _language(body: SpeechBody, info: ModelInfo) -> str:
    language = language_name(body.language)
    if language in ("auto", DETECT, *info.languages):
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


async def stored_voice(body: SpeechBody, info: ModelInfo, voices: Voices) -> StoredVoice | None:
    """The stored voice that `body.voice` means, if the model can speak with it and the request has no recording."""
    is_meant = info.kind is ModelKind.BASE and body.ref_audio is None and body.voice is not None
    return await voices.find(body.voice) if is_meant else None


def _with_defaults(body: SpeechBody, stored: StoredVoice, info: ModelInfo) -> SpeechBody:
    """The voice's own language and sampling options, where the request names none."""
    found: dict[str, object] = {name: value for name, value in stored.sampling.items() if getattr(body, name) is None}
    if "language" not in body.model_fields_set and language_name(stored.language or "") in info.languages:
        found["language"] = stored.language
    return body.model_copy(update=found)


async def _reference(
    body: SpeechBody, info: ModelInfo, settings: ApiSettings, stored: StoredVoice | None, voices: Voices
) -> Reference | None:
    if info.kind is not ModelKind.BASE:
        return None
    if stored is not None:
        take, _ = stored.take_for(body.instructions)
        return await voices.reference(stored, take, info, x_vector_only=body.x_vector_only_mode)
    if body.ref_audio is None:
        named = f"no voice {body.voice[:80]!r} is stored, and " if body.voice else ""
        raise _missing("ref_audio", f"{named}the loaded model speaks with the voice of a recording, sent or stored")
    text = _cleaned("ref_text", body.ref_text, settings) or None
    if text is None and not body.x_vector_only_mode:
        raise _missing("ref_text", "what ref_audio says, unless x_vector_only_mode is true")
    prepare = decode_prepared if body.prepare == "auto" else None
    return await read_aside(body.ref_audio, text, info, x_vector_only=body.x_vector_only_mode, prepare=prepare)
