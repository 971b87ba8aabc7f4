"""Selection of a request's voice: a speaker of the model, a stored voice, or a recording in the request."""

from dataclasses import dataclass

from deployments.errors import InvalidRequest
from deployments.protocol import ModelInfo, ModelKind
from serve_app.api import catalogue
from serve_app.api.parsing.speech_body import SpeechBody
from serve_app.api.resolve.resolver import Resolver
from serve_app.api.voice_source import KeptVoice

NO_CLONES = "{} does not clone voices: load a Base checkpoint"


@dataclass(frozen=True, slots=True)
class ChosenVoice:
    """Voice of a request."""

    name: str | None  # as in `SpeechBody.voice`; for speakers, the model's own spelling
    stored: KeptVoice | None = None
    reason: str | None = None  # why the voice differs from the requested voice


async def choose_voice(
    resolver: Resolver, named: object, body: SpeechBody, info: ModelInfo, *, lenient: bool
) -> ChosenVoice:
    """Choose the voice that the client `named`, or the default voice. A recording in `body` takes precedence over a
    stored voice.

    For a `lenient` request, the default voice replaces an unknown voice, and `reason` reports this. For a strict
    request, raises InvalidRequest if the model has speakers. If the model clones voices, keeps the unknown name: the
    error that `build_utterance` then raises describes how to send a recording.
    """
    if info.kind is ModelKind.CUSTOM_VOICE:
        return _speaker(resolver, named, info, lenient=lenient)
    name = named if isinstance(named, str) else None
    reason = "the loaded model has no named voices" if name else None if named in (None, "") else "not a name"
    if info.kind is ModelKind.VOICE_DESIGN:
        return ChosenVoice(None, reason=_stored(resolver, name, info) or reason)
    if body.ref_audio is not None:
        return ChosenVoice(name, reason=reason)
    if (stored := await resolver.voices.find(name)) is not None:
        return ChosenVoice(name, stored)
    if name is not None and not lenient:
        return ChosenVoice(name)
    if (default := await resolver.voices.find(resolver.settings.default_voice)) is None:
        return ChosenVoice(name, reason=reason)
    instead = f"unknown voice, used {default.name}"
    return ChosenVoice(default.id, default, None if named is None else instead)


def _speaker(resolver: Resolver, named: object, info: ModelInfo, *, lenient: bool) -> ChosenVoice:
    """Choose a speaker of the model. For an unknown name, a lenient request gets the default voice, because other
    services' clients are unaware of the speakers.
    """
    wanted = resolver.settings.default_voice
    is_here = wanted is not None and catalogue.is_named(wanted, info.voices)
    default = catalogue.resolve(wanted if wanted and is_here else info.voices[0], info.voices)
    if named is None or (lenient and named == ""):
        return ChosenVoice(default)
    if not isinstance(named, str):
        return ChosenVoice(default, reason="not a name")
    try:
        return ChosenVoice(catalogue.resolve(named, info.voices))
    except InvalidRequest as error:
        stored = _stored(resolver, named, info)
        if lenient:
            return ChosenVoice(default, reason=stored or f"unknown voice, used {default}")
        raise InvalidRequest(f"voice: {named[:80]!r} is {stored}.", "voice") if stored else error from None


def _stored(resolver: Resolver, name: str | None, info: ModelInfo) -> str | None:
    """Return why a stored voice cannot be used, or None if `name` is not a stored voice."""
    return None if resolver.voices.known(name) is None else f"a stored voice, {NO_CLONES.format(info.name)}"
