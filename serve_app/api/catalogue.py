"""Voices and model names: the speakers of the loaded models, and OpenAI's thirteen voice names as aliases."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle

from deployments.errors import InvalidRequest, ModelNotFound, StartError
from deployments.protocol import ModelInfo, ModelKind
from serve_app.api.responses.listing import Paging
from serve_app.api.voice_source import ClonedVoice, VoiceSource
from serve_app.config import CLONE_ALIAS, ApiSettings


@dataclass(frozen=True, slots=True)
class Voice:
    """Entry in the voice list."""

    id: str
    name: str
    language: str
    gender: str
    description: str
    type: str  # "builtin", "alias" or "stored"
    alias_of: str | None = None  # id of the voice that the alias refers to


@dataclass(frozen=True, slots=True)
class Character:
    """Released speaker, as described in the model card."""

    language: str
    gender: str
    description: str


RELEASED = {
    "vivian": Character("chinese", "female", "Bright, slightly edgy young voice"),
    "serena": Character("chinese", "female", "Warm, gentle young voice"),
    "uncle_fu": Character("chinese", "male", "Seasoned voice with a low, mellow timbre"),
    "dylan": Character("beijing_dialect", "male", "Youthful Beijing voice with a clear, natural timbre"),
    "eric": Character("sichuan_dialect", "male", "Lively Chengdu voice with a slightly husky brightness"),
    "ryan": Character("english", "male", "Dynamic voice with strong rhythmic drive"),
    "aiden": Character("english", "male", "Sunny American voice with a clear midrange"),
    "ono_anna": Character("japanese", "female", "Playful voice with a light, nimble timbre"),
    "sohee": Character("korean", "female", "Warm voice with rich emotion"),
}
EMBEDDED = {
    "nora": Character("english", "female", "Clear voice"),
    "felix": Character("english", "male", "Deeper voice"),
    "iris": Character("english", "female", "Bright voice"),
    "hugo": Character("english", "male", "Large voice"),
    "otto": Character("english", "male", "Deepest voice"),
    "miles": Character("english", "male", "Lively lower voice"),
    "lily": Character("english", "female", "High, bright voice"),
    "edith": Character("english", "female", "Older, slower voice"),
}
UNKNOWN = Character("", "", "")
# Dates and versions that vendors append to model names: gpt-4o-mini-tts-2025-12-15, tts-1-1106, qwen-tts-latest,
# NAME@20251215.
_PINNED = re.compile(r"[-@:](?:[0-9]{4}-?[0-9]{2}-?[0-9]{2}|[0-9]{2}-?[0-9]{2}|latest)$")

# For each alias, a released and an embedded speaker of the same gender and similar pitch. The speakers eric and dylan
# are left out, because with language "auto" they speak any text in their dialect.
ALIASES = {
    "alloy": ("vivian", "nora"),
    "ash": ("ryan", "felix"),
    "ballad": ("aiden", "miles"),
    "cedar": ("ryan", "otto"),
    "coral": ("sohee", "iris"),
    "echo": ("aiden", "miles"),
    "fable": ("uncle_fu", "hugo"),
    "marin": ("serena", "edith"),
    "nova": ("vivian", "lily"),
    "onyx": ("uncle_fu", "otto"),
    "sage": ("serena", "edith"),
    "shimmer": ("ono_anna", "lily"),
    "verse": ("aiden", "felix"),
}


def aliases(speakers: Sequence[str]) -> dict[str, str]:
    """Map OpenAI's voice names to `speakers`. If all preferred speakers for a name are missing, use the next speaker in
    turn.
    """
    spread = dict(zip(ALIASES, cycle(speakers), strict=False))
    preferred = {name: speaker for name, targets in ALIASES.items() for speaker in targets if speaker in speakers}
    return {name: target for name, target in (spread | preferred).items() if name not in speakers}


def find_speaker(name: str, speakers: Sequence[str]) -> str:
    """Return the speaker for `name`, ignoring case. Raises InvalidRequest with the valid names."""
    known = {speaker: speaker for speaker in speakers} | aliases(speakers)
    if (wanted := name.lower()) in known:
        return known[wanted]
    raise InvalidRequest(f"Unknown voice {name[:80]!r}. Valid voices: {listing(speakers)}.", "voice", "voice_not_found")


def is_named(name: str, speakers: Sequence[str]) -> bool:
    """Return whether `find_speaker` accepts `name`."""
    return name.lower() in speakers or name.lower() in aliases(speakers)


def check_default(settings: ApiSettings, model: str, speakers: Sequence[str], *, clones: bool) -> None:
    """Raise StartError if `api.default_voice` is not one of `model`'s voices. If the model `clones` voices, the setting
    may be a stored voice, which each request looks up.
    """
    try:
        if settings.default_voice is not None and not clones:
            find_speaker(settings.default_voice, speakers)
    except InvalidRequest:
        valid = f"set one of {listing(speakers)}" if speakers else "the model has no named voices; remove the setting"
        raise StartError(f"api.default_voice: {settings.default_voice!r} is not a voice of {model}; {valid}") from None


def listing(speakers: Sequence[str]) -> str:
    """Return every accepted name, for an error message."""
    return ", ".join([*speakers, *aliases(speakers)])


def voice_list(*models: ModelInfo) -> list[Voice]:
    """Return the speakers, then the aliases, for `GET /v1/audio/voices`. A speaker replaces an alias with the same
    name.
    """
    listed = [voice for info in models for voice in _voices(info)]
    own = {voice.id: voice for voice in reversed(listed) if voice.type == "builtin"}
    first = {voice.id: own.get(voice.id, voice) for voice in reversed(listed)}
    return list({voice.id: first[voice.id] for voice in listed}.values())


def _voices(info: ModelInfo) -> list[Voice]:
    characters = EMBEDDED if EMBEDDED.keys() >= set(info.voices) else RELEASED
    kinds = [(name, name, "builtin") for name in info.voices]
    kinds += [(alias, speaker, "alias") for alias, speaker in aliases(info.voices).items()]
    return [_voice(name, speaker, characters.get(speaker, UNKNOWN), kind) for name, speaker, kind in kinds]


def stored_voice(voice: ClonedVoice) -> Voice:
    """Convert a stored voice to a list entry."""
    return Voice(
        voice.id, voice.name, language=voice.language or "", gender="", description=voice.description, type="stored"
    )


async def all_voices(models: Sequence[ModelInfo], voices: VoiceSource) -> list[Voice]:
    """Return the models' voices, then the caller's stored voices."""
    return [*voice_list(*models), *map(stored_voice, await voices.voices())]


def page_of_voices(voices: Sequence[Voice], paging: Paging, source: VoiceSource) -> tuple[list[Voice], str | None]:
    """Return a page like `Paging.cut`. Without paging parameters, a client gets all of its stored voices and the
    models' voices.
    """
    most = source.most + sum(voice.type != "stored" for voice in voices)
    return replace(paging, default=most, most=most).cut(voices)


def _voice(voice_id: str, speaker: str, character: Character, kind: str) -> Voice:
    described = f"{character.description} ({speaker})" if kind == "alias" else character.description
    name = voice_id.replace("_", " ").title()
    alias_of = speaker if kind == "alias" else None
    return Voice(voice_id, name, character.language, character.gender, described.strip(), kind, alias_of)


def check_model(name: str | None, info: ModelInfo, settings: ApiSettings) -> None:
    """Raise ModelNotFound if `name` belongs to another model. Accepts None, the model's own name and every alias."""
    if name is not None and not is_known(name, info, settings):
        raise not_loaded(name, [info], settings)


def is_known(name: object, info: ModelInfo, settings: ApiSettings) -> bool:
    """Return whether a request with this model name is for this model."""
    if not isinstance(name, str):
        return False
    clones = unpinned(name) == CLONE_ALIAS and info.kind is ModelKind.BASE
    return clones or matches_model(name, info) or is_alias(name, settings)


def matches_model(name: str, info: ModelInfo) -> bool:
    """Return whether `name` is the model's own name or its checkpoint's, with or without the folder or owner."""
    return name == info.name or (
        bool(info.checkpoint) and name in (info.checkpoint, info.checkpoint.rpartition("/")[2])
    )


def is_alias(name: str, settings: ApiSettings) -> bool:
    """Return whether `name` is an alias for any model. The other fields of the request select the model."""
    return name in settings.model_aliases or unpinned(name) in settings.model_aliases


def unpinned(name: str) -> str:
    """Return a model name without the date or version that a client has pinned."""
    return _PINNED.sub("", name)


def not_loaded(name: str, models: Sequence[ModelInfo], settings: ApiSettings) -> ModelNotFound:
    known = ", ".join((*(info.name for info in models), *settings.model_aliases))
    return ModelNotFound(f"The model {name[:80]!r} is not loaded. Available: {known}.")
