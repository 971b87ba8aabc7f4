"""The records of stored voices, and the portable file of a voice.

The recording, as FLAC, is authoritative. Speaker vectors and codes are derived from it for each checkpoint, and are
derived again for a new checkpoint.
"""

import hashlib
import io
import json
import logging
import operator
import re
import secrets
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from deployments.config import Strict
from deployments.errors import InvalidRequest
from deployments.protocol import Sampling
from deployments.recording_cache import VOICE_BYTES
from serve_app.audio.recordings import Preparation
from serve_app.extensions.text.lexicon import LONGEST_RESPELLING, LONGEST_WORD, MAX_WORDS, Lexicon
from serve_app.extensions.text.style_tags import named_take
from serve_app.extensions.voices.reference_doctor import Flaw, Sentence, check_recording
from serve_app.visitor import VISITOR

logger = logging.getLogger(__name__)

NEUTRAL = "neutral"  # the style of a voice's first recording
ID = re.compile(r"(voice|cons|design|lexicon)_[0-9a-f]{24}")
DESIGN_S = 3600.0  # how long a candidate may be locked
MAX_TAKES = 16
FILE_SUFFIX = ".voice"
_PART_BYTES = 96 << 10  # of a portable file, in memory per slow reader
_LARGEST_PART = 64 << 20  # of a portable file: the longest accepted recording is smaller

_HOLDS = {"gt": operator.gt, "ge": operator.ge, "le": operator.le, "lt": operator.lt}

MAX_TRANSCRIPT = 4096  # characters; by default a request may send as many
Name = Annotated[str, Field(min_length=1, max_length=80, pattern=r"^[^\x00-\x1f\x7f]+$")]
Language = Annotated[str, Field(max_length=80)]
MAX_DESCRIPTION = 500
Description = Annotated[str, Field(max_length=MAX_DESCRIPTION)]
Owner = Annotated[str, Field(max_length=512)]
Origin = Annotated[str, Field(max_length=4096)]  # names a model, which may be a path
Version = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
_Word = Annotated[str, Field(max_length=LONGEST_WORD)]
Words = Annotated[dict[_Word, Annotated[str, Field(max_length=LONGEST_RESPELLING)]], Field(max_length=MAX_WORDS)]
_Option = Annotated[str, Field(max_length=40)]
_Options = Annotated[dict[_Option, bool | int | float], Field(max_length=len(fields(Sampling)))]


class Take(Strict):
    """One recording of a voice."""

    style: Name = NEUTRAL
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]  # of the FLAC file
    seconds: float
    num_bytes: int
    # Its transcript. None: the voice is cloned from its speaker vector only.
    text: Annotated[str, Field(max_length=MAX_TRANSCRIPT)] | None = None
    changes: Annotated[tuple[Sentence, ...], Field(max_length=16)] = ()  # what its preparation did, a sentence each
    flaws: Annotated[tuple[Flaw, ...], Field(max_length=32)] = ()  # found in the sent file, most severe first
    disabled: Sentence = ""  # why it cannot be used; "": it can

    @classmethod
    def of_file(
        cls, data: bytes, *, text: str | None, style: str, prepare: Preparation, field: str
    ) -> tuple[Self, bytes]:
        """A recording in its stored form, and its mono FLAC file. Raises InvalidRequest for `field`. Blocks."""
        if len(text or "") > MAX_TRANSCRIPT:
            message = f"ref_text has {len(text or '')} characters, at most {MAX_TRANSCRIPT} are allowed."
            raise InvalidRequest(message, "ref_text", "string_above_max_length")
        text = " ".join((text or "").split()) or None
        checked = check_recording(data, field=field, transcript=text, heard=None, prepare=prepare)
        # 24 bits represent every 16-bit sample, and the mean of two channels of them. Louder samples would wrap around.
        samples = np.clip(checked.audio, -1, 1 - 2**-23)
        findings = {"changes": checked.changes, "flaws": checked.flaws}
        return cls.of_samples(samples, checked.sample_rate, "PCM_24", style=style, text=text, **findings)

    @classmethod
    def of_samples(
        cls, samples: NDArray[np.generic], sample_rate: int, subtype: str, **fields: Any
    ) -> tuple[Self, bytes]:
        """The take of `samples` [samples], with other `fields`, and its FLAC file of a `subtype`. Blocks."""
        import soundfile

        file = io.BytesIO()
        soundfile.write(file, samples, sample_rate, format="FLAC", subtype=subtype)
        flac = file.getvalue()
        seconds = round(len(samples) / sample_rate, 3)
        return cls(sha256=hashlib.sha256(flac).hexdigest(), seconds=seconds, num_bytes=len(flac), **fields), flac

    @property
    def cloned_by(self) -> Literal["transcript", "vector"]:
        """Without a transcript, a clone has the sound of a voice, but less of its way of speaking."""
        return "transcript" if self.text else "vector"

    def as_json(self) -> dict[str, object]:
        """The object that the API returns to the owner."""
        known = {"style": self.style, "seconds": self.seconds, "text": self.text, "cloned_by": self.cloned_by}
        known |= {"disabled": self.disabled} if self.disabled else {}
        return {**known, "changes": self.changes, "flaws": [asdict(flaw) for flaw in self.flaws]}


@dataclass(frozen=True, slots=True)
class SentRecording:
    """A recording as sent."""

    data: bytes
    text: str | None = None  # its transcript
    style: str = NEUTRAL
    prepare: Preparation = "auto"


@dataclass(frozen=True, slots=True)
class Details:
    """A client's description of a new voice."""

    name: str
    language: str | None = None
    description: str = ""
    consent: str | None = None  # id of a stored consent recording, or a statement
    provenance: str = ""


class Consent(Strict):
    """The uploader's statement about the speaker's consent, which is not verified."""

    statement: Annotated[str, Field(max_length=1000)] | None = None  # free text
    recording: Annotated[str, Field(max_length=40)] | None = None  # id of a stored consent recording


class Stored(Strict):
    """The common fields of records."""

    prefix: ClassVar[Literal["voice", "cons", "design", "lexicon"]]  # of ids

    id: Annotated[str, Field(max_length=40)]
    name: Name
    owner: Owner = ""  # the name of the API key; "" if no keys are required
    created_at: int  # seconds since 1970

    @classmethod
    def new(cls, **values: object) -> Self:
        """The first version of a record that the caller owns. Raises InvalidRequest with the field."""
        owned = {"id": new_id(cls.prefix), "owner": VISITOR.get().name or "", "created_at": now()}
        version = {"version": new_version()} if "version" in cls.model_fields else {}
        return cls.made(**values, **owned, **version)

    @classmethod
    def made(cls, **values: object) -> Self:
        """A record from values that a client may have sent. Raises InvalidRequest with the field."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            code = "string_above_max_length" if first["type"] == "string_too_long" else "invalid_value"
            raise InvalidRequest(f"{first['loc'][0]}: {first['msg']}.", str(first["loc"][0]), code) from None

    @classmethod
    def read(cls, stored: dict[str, Any]) -> Self:
        """A record from the store. One that predates the limits remains: its texts are cut to them, and a recording is
        disabled if its transcript is too long. Each case is logged. Raises ValidationError.
        """
        try:
            return cls.model_validate(stored)
        except ValidationError as error:
            too_long = [each for each in error.errors(include_url=False) if each["type"] == "string_too_long"]
        for each in too_long:
            *path, field = each["loc"]
            within: Any = stored
            for step in path:
                within = within[step]
            text, most = within[field], each["ctx"]["max_length"]
            within[field], fate = text[:most], f"cut to {most}"
            if field == "text":
                fate = "too many, so the recording is disabled"
                reason = f"its transcript has {len(text)} characters, at most {most} are allowed: store it again"
                within |= {"text": None, "disabled": reason}
            where = ".".join(map(str, each["loc"]))
            logger.warning("%s: %s has %d characters: %s", stored.get("id"), where, len(text), fate)
        return cls.model_validate(stored)

    @property
    def num_bytes(self) -> int:
        """Size of its recordings."""
        return 0

    def changed(self, **changes: object) -> Self:
        """A copy with some values replaced and a new version. Raises InvalidRequest with the field."""
        version = {"version": new_version()} if "version" in type(self).model_fields else {}
        return type(self).made(**{**dict(self), **changes, **version})

    def is_named(self, name: str) -> bool:
        return self.name.casefold() == name.casefold()


class StoredVoice(Stored):
    """One voice. Each version has its own `version`, so that data derived from an old one is never used for it."""

    prefix: ClassVar = "voice"

    id: Annotated[str, Field(pattern=r"^voice_[0-9a-f]{24}$")]
    version: Version
    takes: Annotated[tuple[Take, ...], Field(min_length=1, max_length=MAX_TAKES)]
    language: Language | None = None  # for requests without a language
    sampling: _Options = Field(default_factory=dict)  # for options that a request does not name
    lexicon: Words = Field(default_factory=dict)  # respellings of words that a request does not respell
    description: Description = ""
    consent: Consent = Consent()
    provenance: Origin = ""  # where it is from: "openai", "elevenlabs", "import", ...

    @property
    def num_bytes(self) -> int:
        return sum(take.num_bytes for take in self.takes)

    @property
    def key_prefix(self) -> bytes:
        """Prefix of the keys of all data derived from this version, in every cache of every process."""
        return hashlib.sha256(f"{self.id} {self.version}".encode()).digest()[:VOICE_BYTES]

    def key(self, take: Take, fingerprint: str) -> bytes:
        """The key of one recording for the checkpoint with this fingerprint; see `Reference.key`."""
        return self.key_prefix + hashlib.sha256(f"{take.sha256} {fingerprint}".encode()).digest()[:VOICE_BYTES]

    @classmethod
    def made(cls, **values: object) -> Self:
        """A voice from checked takes and values that a client may have sent. Raises InvalidRequest with the field."""
        voice = super().made(**values)
        _check_sampling(voice.sampling)
        Lexicon.checked(voice.lexicon, "lexicon")
        styles = [take.style.casefold() for take in voice.takes]
        if len(set(styles)) < len(styles):
            raise InvalidRequest("style: the takes of a voice have different styles.", "style")
        return voice

    def take_for(self, words: str | None) -> Take:
        """The take whose style is named in `words`, such as instructions; else the first take."""
        return self.take_named(words) or self.takes[0]

    def take_named(self, words: str | None) -> Take | None:
        """The take whose style is named in `words`."""
        named = named_take(words, self.styles)
        return next((take for take in self.takes if take.style == named), None)

    @property
    def styles(self) -> tuple[str, ...]:
        return tuple(take.style for take in self.takes)

    def has_style(self, words: str | None) -> bool:
        return self.take_named(words) is not None

    def take_note(self, words: str | None, *, is_tagged: bool) -> str:
        """Which take speaks, and why it was chosen."""
        named = self.take_named(words)
        take = named or self.takes[0]
        why = "tag" if is_tagged else "instructions" if named else "the first"
        by_vector = "" if take.text else ", by its vector only: it has no transcript"
        return f"{take.style} ({why}{by_vector})"


class StoredConsent(Stored):
    """A recording of a speaker's consent."""

    prefix: ClassVar = "cons"
    noun: ClassVar = "consent"

    id: Annotated[str, Field(pattern=r"^cons_[0-9a-f]{24}$")]
    language: Language
    take: Take

    @property
    def num_bytes(self) -> int:
        return self.take.num_bytes


class StoredDesign(Stored):
    """A voice made from a description: a candidate for an hour, from which a StoredVoice may be made."""

    prefix: ClassVar = "design"

    id: Annotated[str, Field(pattern=r"^design_[0-9a-f]{24}$")]
    name: Name = "design"
    description: Description
    language: Language | None = None
    model: Origin  # that spoke the text
    seed: Annotated[int, Field(ge=0, lt=2**64)]
    take: Take  # with its text

    @property
    def expires_at(self) -> int:
        """Seconds since 1970."""
        return self.created_at + int(DESIGN_S)


class StoredLexicon(Stored):
    """Respellings for requests that name the lexicon, or for all requests."""

    prefix: ClassVar = "lexicon"
    noun: ClassVar = "lexicon"

    id: Annotated[str, Field(pattern=r"^lexicon_[0-9a-f]{24}$")]
    version: Version
    words: Words  # respelling by word
    for_all: bool = False  # whether it applies to every request of the server

    @classmethod
    def named(cls, name: str, words: Mapping[str, str]) -> Self:
        """A lexicon of the caller, from checked words. Raises InvalidRequest."""
        if not name.isprintable():
            raise InvalidRequest("name must have 1 to 80 printable characters.", "name")
        return cls.new(name=name, words=dict(words))

    def with_words(self, words: Mapping[str, str]) -> Self:
        """The next version. Raises InvalidRequest."""
        return self.changed(words=Lexicon.checked(words, "words").words)


def _check_sampling(sampling: Mapping[str, bool | int | float]) -> None:
    """Raises InvalidRequest if an option is unknown, or outside the bounds for requests."""
    options = {option.name: option for option in fields(Sampling)}
    for name, value in sampling.items():
        if name not in options:
            raise InvalidRequest(f"sampling: {name[:40]!r} is none of {', '.join(options)}.", "sampling")
        kind, bounds = get_args(options[name].type)[0], options[name].metadata["bounds"]
        is_kind = isinstance(value, bool) == (kind is bool) and isinstance(value, int if kind is int else int | float)
        if not is_kind or not all(_HOLDS[bound](value, limit) for bound, limit in bounds.items()):
            raise InvalidRequest(f"sampling: {name} must be of type {kind.__name__}, within {bounds}.", "sampling")


def new_id(kind: Literal["voice", "cons", "design", "lexicon"]) -> str:
    return f"{kind}_{secrets.token_hex(12)}"


def new_version() -> str:
    return secrets.token_hex(8)


def now() -> int:
    return int(time.time())


def packed(voice: StoredVoice, recording: Callable[[Take], bytes]) -> Iterator[bytes]:
    """The portable file, in parts: a zip with each recording, by its sha256, and `voice.json`. One recording at a time
    is in memory. Blocks.
    """
    out = _Parts()
    with zipfile.ZipFile(out, "w") as archive:
        for take in {take.sha256: take for take in voice.takes}.values():
            content = memoryview(recording(take))
            with archive.open(f"{take.sha256}.flac", "w") as entry:
                for start in range(0, len(content), _PART_BYTES):
                    entry.write(content[start : start + _PART_BYTES])
                    yield out.taken()
        archive.writestr("voice.json", voice.model_dump_json(indent=1))
    yield out.taken()


class _Parts(io.RawIOBase):
    """A file whose content is taken out while it is written."""

    def __init__(self) -> None:
        self._written = bytearray()

    def write(self, content: Any) -> int:
        self._written += content
        return len(content)

    def taken(self) -> bytes:
        part, self._written = self._written, bytearray()
        return bytes(part)


def unpack(file: Path) -> tuple[StoredVoice, dict[str, bytes]]:
    """The voice of a portable file and its recordings by sha256, all checked. Raises InvalidRequest."""
    try:
        with zipfile.ZipFile(file) as archive:
            voice = StoredVoice.model_validate(json.loads(_part(archive, "voice.json")))
            recordings = {take.sha256: _part(archive, f"{take.sha256}.flac") for take in voice.takes}
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise InvalidRequest(f"{file} is not a voice file: {error}.", "file") from None
    for sha256, recording in recordings.items():
        if hashlib.sha256(recording).hexdigest() != sha256:
            raise InvalidRequest(f"{file} is damaged: the recording {sha256[:12]} has changed.", "file")
    return voice, recordings


def _part(archive: zipfile.ZipFile, name: str) -> bytes:
    if archive.getinfo(name).file_size > _LARGEST_PART:
        raise ValueError(f"{name} is larger than {_LARGEST_PART} bytes")
    return archive.read(name)
