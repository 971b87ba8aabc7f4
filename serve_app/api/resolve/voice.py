"""The voice of a request: a speaker of the model, a kept voice, or a recording in the request."""

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
    """The voice that speaks a request."""

    name: str | None  # as `SpeechBody.voice`; a speaker has the model's own name
    stored: KeptVoice | None = None
    reason: str | None = None  # why it is not the voice that the client named


async def choose_voice(
    resolver: Resolver, named: object, body: SpeechBody, info: ModelInfo, *, lenient: bool
) -> ChosenVoice:
    """The voice that the client `named`, or the default one if it named none. A recording in `body` takes precedence
    over a kept voice.

    If the voice is unknown, the default one speaks for a `lenient` request, and `reason` reports it. For others a model
    with speakers raises InvalidRequest. A model that clones keeps the name: `build_utterance` raises the error, which
    also says how to send a recording.
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
    instead = f"no such voice here, {default.name} speaks"
    return ChosenVoice(default.id, default, None if named is None else instead)


def _speaker(resolver: Resolver, named: object, info: ModelInfo, *, lenient: bool) -> ChosenVoice:
    """One of the model's own. Clients of other services cannot know their names: they hear the default voice."""
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
            return ChosenVoice(default, reason=stored or f"no such voice here, {default} speaks")
        raise InvalidRequest(f"voice: {named[:80]!r} is {stored}.", "voice") if stored else error from None


def _stored(resolver: Resolver, name: str | None, info: ModelInfo) -> str | None:
    """The reason why a kept voice does not speak, if `name` is one."""
    return None if resolver.voices.known(name) is None else f"a stored voice, {NO_CLONES.format(info.name)}"
