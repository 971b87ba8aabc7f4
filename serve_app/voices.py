"""Voice names: the checkpoint's own speakers, and OpenAI's thirteen as aliases onto them."""

from collections.abc import Sequence
from dataclasses import dataclass

from deployments.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Voice:
    """One entry of the voice list."""

    id: str
    name: str
    language: str
    gender: str
    description: str
    type: str  # "builtin" or "alias"


@dataclass(frozen=True, slots=True)
class Character:
    """What the model card says of a released speaker."""

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
UNKNOWN = Character("", "", "")

# By gender and weight of the voice. Not eric and dylan: with language "auto" they turn any text into their dialect.
ALIASES = {
    "alloy": "vivian",
    "ash": "ryan",
    "ballad": "aiden",
    "cedar": "ryan",
    "coral": "sohee",
    "echo": "aiden",
    "fable": "uncle_fu",
    "marin": "serena",
    "nova": "vivian",
    "onyx": "uncle_fu",
    "sage": "serena",
    "shimmer": "ono_anna",
    "verse": "aiden",
}


def aliases(speakers: Sequence[str]) -> dict[str, str]:
    """OpenAI's names onto `speakers`: the preferred match where it is there, else spread by order."""
    if not speakers:
        return {}
    spread = {name: speakers[index % len(speakers)] for index, name in enumerate(ALIASES)}
    preferred = {name: speaker for name, speaker in ALIASES.items() if speaker in speakers}
    return {name: target for name, target in (spread | preferred).items() if name not in speakers}


def resolve(name: str, speakers: Sequence[str]) -> str:
    """The speaker that `name` means, in any case. Raises InvalidRequest with the valid names."""
    wanted = name.lower()
    if wanted in speakers:
        return wanted
    known = aliases(speakers)
    if wanted in known:
        return known[wanted]
    raise InvalidRequest(f"Unknown voice {name[:80]!r}. Valid voices: {listing(speakers)}.", "voice", "voice_not_found")


def listing(speakers: Sequence[str]) -> str:
    """Every accepted name, for an error message."""
    return ", ".join([*speakers, *aliases(speakers)])


def voice_list(speakers: Sequence[str]) -> list[Voice]:
    """The speakers, then the aliases, as `GET /v1/audio/voices` shows them."""
    builtin = [_voice(speaker, speaker, "builtin") for speaker in speakers]
    return builtin + [_voice(alias, speaker, "alias") for alias, speaker in aliases(speakers).items()]


def _voice(voice_id: str, speaker: str, kind: str) -> Voice:
    character = RELEASED.get(speaker, UNKNOWN)
    described = f"{character.description} ({speaker})" if kind == "alias" else character.description
    name = voice_id.replace("_", " ").title()
    return Voice(voice_id, name, character.language, character.gender, described.strip(), kind)
