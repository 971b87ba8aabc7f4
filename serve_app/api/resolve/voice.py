"""Selection of a request's voice: a speaker of the model, a stored voice, or a recording in the request. Also errors
for text in a language that the voice cannot speak.
"""

from dataclasses import replace

from deployments.errors import InvalidRequest
from deployments.protocol import ModelInfo, ModelKind
from serve_app.api import catalogue
from serve_app.api.parsing.speech_body import SpeechBody
from serve_app.api.voice_source import ChosenVoice, VoiceSource
from serve_app.text.languages import foreign_language, spoken_language

NO_CLONES = "{} does not clone voices: load a Base checkpoint"


async def choose_voice(
    voices: VoiceSource,
    named: object,
    body: SpeechBody,
    info: ModelInfo,
    *,
    default: str | None,
    lenient: bool = False,
) -> ChosenVoice:
    """Choose the voice that the client `named`, or the server's `default` voice. A recording in `body` takes precedence
    over a stored voice.

    For a `lenient` request, the default voice replaces an unknown voice, and `reason` reports this. For a strict
    request, raises InvalidRequest if the model has speakers. If the model clones voices, keeps the unknown name: the
    error that `build_utterance` then raises describes how to send a recording.
    """
    voice = await _voice(voices, named, body, info, default=default, lenient=lenient)
    own_language = None if voice.stored is None or "language" in body.model_fields_set else voice.stored.language
    language = spoken_language(body.language, info.languages, default=own_language)
    return replace(voice, language=language, default=None if named else voice.name)


async def _voice(
    voices: VoiceSource, named: object, body: SpeechBody, info: ModelInfo, *, default: str | None, lenient: bool
) -> ChosenVoice:
    if info.kind is ModelKind.CUSTOM_VOICE:
        return _speaker(voices, named, info, default=default, lenient=lenient)
    name = named if isinstance(named, str) else None
    reason = None
    if named not in (None, ""):
        reason = "not a name" if name is None else "the loaded model has no named voices"
    if info.kind is ModelKind.VOICE_DESIGN:
        return ChosenVoice(None, reason=_stored(voices, name, info) or reason)
    if body.ref_audio is not None:
        return ChosenVoice(name, reason=reason)
    if (stored := await voices.find(name)) is not None:
        return ChosenVoice(name, stored)
    if name is not None and not lenient:
        return ChosenVoice(name)
    if (stored := await voices.find(default)) is None:
        return ChosenVoice(name, reason=reason)
    instead = f"unknown voice, used {stored.name}"
    return ChosenVoice(stored.id, stored, None if named is None else instead)


def _speaker(voices: VoiceSource, named: object, info: ModelInfo, *, default: str | None, lenient: bool) -> ChosenVoice:
    """Choose a speaker of the model. For an unknown name, a lenient request gets the default voice, because other
    services' clients are unaware of the speakers.
    """
    is_here = default is not None and catalogue.is_named(default, info.voices)
    speaker = catalogue.find_speaker(default if default and is_here else info.voices[0], info.voices)
    if named is None or (lenient and named == ""):
        return ChosenVoice(speaker)
    if not isinstance(named, str):
        return ChosenVoice(speaker, reason="not a name")
    try:
        return ChosenVoice(catalogue.find_speaker(named, info.voices))
    except InvalidRequest:
        stored = _stored(voices, named, info)
        if lenient:
            return ChosenVoice(speaker, reason=stored or f"unknown voice, used {speaker}")
        if stored:
            raise InvalidRequest(f"voice: {named[:80]!r} is {stored}.", "voice") from None
        raise


def _stored(voices: VoiceSource, name: str | None, info: ModelInfo) -> str | None:
    """Return why a stored voice cannot be used, or None if `name` is not a stored voice."""
    return None if voices.known(name) is None else f"a stored voice, {NO_CLONES.format(info.name)}"


def check_language(text: str, info: ModelInfo, speaker: str | None) -> None:
    """Raise InvalidRequest if `text` is clearly in a language that the voice cannot speak."""
    if (foreign := foreign_language(text, info.languages)) is not None:
        raise not_spoken("input", f"the text is written in {foreign}", info, speaker)


def unspoken_script(text: str, info: ModelInfo, speaker: str | None) -> InvalidRequest | None:
    """Return the error if the model cannot speak the text's script, or None if the script is not the cause."""
    if (script := foreign_language(text, info.languages)) is None:
        return None
    message = f"input is written in {script}, so none of it can be spoken; {speaks(info, speaker)}."
    return InvalidRequest(message, "input", "unsupported_language")


def speaks(info: ModelInfo, speaker: str | None) -> str:
    """Describe the languages of the model's speaker, or of the model, for error messages."""
    speaker_name = info.name if speaker is None else f"the voice {speaker!r} of {info.name}"
    return f"{speaker_name} speaks {', '.join(info.languages)}"


def not_spoken(param: str, reason: str, info: ModelInfo, speaker: str | None) -> InvalidRequest:
    """Return the error for a language that the voice cannot speak."""
    remedy = 'Set "any_language" to true to try it anyway'
    return InvalidRequest(f"{param}: {reason}; {speaks(info, speaker)}. {remedy}.", param, "unsupported_language")
