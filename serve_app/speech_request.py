"""From what a client sent to what the replicas are asked, checked against the loaded model."""

import secrets
from dataclasses import fields

from deployments.errors import InvalidRequest, ModelNotFound
from deployments.protocol import ModelInfo, ModelKind, Reference, Sampling, SynthesisRequest
from serve_app import voices
from serve_app.api_settings import ApiSettings
from serve_app.reference_audio import decode_aside
from serve_app.schemas import SpeechBody
from serve_app.spoken import spoken_english
from serve_app.text import clean

# A client may send the seed back: as many bits as every reader of JSON keeps.
_SEED_BITS = 53


async def build_request(
    body: SpeechBody, info: ModelInfo, settings: ApiSettings, *, request_id: str
) -> SynthesisRequest:
    """One utterance for the loaded model. Raises InvalidRequest that names the field."""
    check_model(body.model, info, settings)
    return SynthesisRequest(
        request_id=request_id,
        text=_text(body, info, settings),
        voice=_voice(body, info),
        language=_language(body, info),
        instructions=_instructions(body, info, settings),
        reference=await _reference(body, info, settings),
        sampling=Sampling(**{option.name: getattr(body, option.name) for option in fields(Sampling)}),
        seed=secrets.randbits(_SEED_BITS) if body.seed is None else body.seed,
        non_streaming_mode=body.non_streaming_mode,
        ignore_eos=body.ignore_eos,
        leading_silence=body.leading_silence,
    )


def check_model(name: str | None, info: ModelInfo, settings: ApiSettings) -> None:
    """No name means the loaded model, as its own and every alias do."""
    if name is not None and name not in (info.name, *settings.model_aliases):
        known = ", ".join((info.name, *settings.model_aliases))
        raise ModelNotFound(f"The model {name[:80]!r} is not loaded. Available: {known}.")


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


def _text(body: SpeechBody, info: ModelInfo, settings: ApiSettings) -> str:
    """A spoken form is made from the text as it was sent, while lines and characters still say what they mean."""
    _check_length("input", body.input, settings)
    text = spoken_english(body.input) if info.spoken_form == "english" else clean(body.input)
    if not text:
        raise InvalidRequest("input has no characters that can be spoken.", "input")
    return text


def _voice(body: SpeechBody, info: ModelInfo) -> str | None:
    """Models without speakers ignore the voice, because OpenAI's clients cannot leave it out."""
    if info.kind is not ModelKind.CUSTOM_VOICE:
        return None
    if body.voice is None:
        raise _missing("voice", f"one of {voices.listing(info.voices)}")
    return voices.resolve(body.voice, info.voices)


def _language(body: SpeechBody, info: ModelInfo) -> str:
    language = body.language.lower()
    if language not in ("auto", *info.languages):
        known = ", ".join(("auto", *info.languages))
        raise InvalidRequest(f"Unknown language {body.language[:80]!r}. Valid languages: {known}.", "language")
    return language


def _instructions(body: SpeechBody, info: ModelInfo, settings: ApiSettings) -> str | None:
    """Checkpoints that cannot follow instructions speak without them, as in the official package."""
    instructions = _cleaned("instructions", body.instructions, settings) or None
    if info.kind is ModelKind.VOICE_DESIGN and instructions is None:
        raise _missing("instructions", "the loaded model designs its voice from them")
    return instructions if info.supports_instructions else None


async def _reference(body: SpeechBody, info: ModelInfo, settings: ApiSettings) -> Reference | None:
    if info.kind is not ModelKind.BASE:
        if body.ref_audio is not None:
            raise InvalidRequest(f"{info.name} does not clone voices: load a Base checkpoint.", "ref_audio")
        return None
    if body.ref_audio is None:
        raise _missing("ref_audio", "the loaded model speaks with the voice of a recording")
    text = _cleaned("ref_text", body.ref_text, settings) or None
    if text is None and not body.x_vector_only_mode:
        raise _missing("ref_text", "what ref_audio says, unless x_vector_only_mode is true")
    audio = await decode_aside(body.ref_audio, info.sample_rate, settings=settings)
    return Reference(audio, text, body.x_vector_only_mode)
