"""Records of stored voices, and the portable file format for a voice.

The FLAC recording is authoritative. Replicas derive a speaker vector and codes from the recording, once
for each checkpoint.
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
from serve_app.api.access.callers import VISITOR
from serve_app.audio.clone_prompts import Preparation
from serve_app.extensions.text.lexicon import LONGEST_RESPELLING, LONGEST_WORD, MAX_WORDS, Lexicon
from serve_app.extensions.text.style_tags import named_take
from serve_app.extensions.voices.reference_doctor import Flaw, Sentence, check_recording

logger = logging.getLogger(__name__)

NEUTRAL = "neutral"  # style of the first recording of a voice
ID = re.compile(r"(voice|cons|design|lexicon)_[0-9a-f]{24}")
DESIGN_S = 3600.0  # lifetime of a design
MAX_TAKES = 16
FILE_SUFFIX = ".voice"
_PART_BYTES = 96 << 10  # unit in which a portable file is sent; each slow reader holds one in memory
_LARGEST_PART = 64 << 20  # in a portable file; every accepted recording is smaller

_HOLDS = {"gt": operator.gt, "ge": operator.ge, "le": operator.le, "lt": operator.lt}

MAX_TRANSCRIPT = 4096  # characters, equal to the default limit of requests
Name = Annotated[str, Field(min_length=1, max_length=80, pattern=r"^[^\x00-\x1f\x7f]+$")]
Language = Annotated[str, Field(max_length=80)]
MAX_DESCRIPTION = 500
Description = Annotated[str, Field(max_length=MAX_DESCRIPTION)]
Owner = Annotated[str, Field(max_length=512)]
Origin = Annotated[str, Field(max_length=4096)]  # may name a model, which may be a path
Version = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
_Word = Annotated[str, Field(max_length=LONGEST_WORD)]
Words = Annotated[dict[_Word, Annotated[str, Field(max_length=LONGEST_RESPELLING)]], Field(max_length=MAX_WORDS)]
_Option = Annotated[str, Field(max_length=40)]
_Options = Annotated[dict[_Option, bool | int | float], Field(max_length=len(fields(Sampling)))]


class Sent(Strict):
    """Base class of objects that contain values from clients."""

    @classmethod
    def made(cls, **values: object) -> Self:
        """Create an object from values that a client may have sent. Raises InvalidRequest with the field."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            code = "string_above_max_length" if first["type"] == "string_too_long" else "invalid_value"
            raise InvalidRequest(f"{first['loc'][0]}: {first['msg']}.", str(first["loc"][0]), code) from None


class Take(Sent):
    """A recording of a voice in one style, and what its check found."""

    style: Name = NEUTRAL
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]  # of the FLAC file
    seconds: float
    num_bytes: int
    # Transcript of the recording. If there is none, the talker clones only the speaker vector.
    text: Annotated[str, Field(max_length=MAX_TRANSCRIPT)] | None = None
    changes: Annotated[tuple[Sentence, ...], Field(max_length=16)] = ()  # made while preparing it, one sentence each
    flaws: Annotated[tuple[Flaw, ...], Field(max_length=32)] = ()  # of the uploaded file, most severe first
    disabled: Sentence = ""  # why requests cannot use the take, or "" if they can

    @classmethod
    def of_file(
        cls, data: bytes, *, text: str | None, style: str, prepare: Preparation, field: str
    ) -> tuple[Self, bytes]:
        """Return a take of the recording `data`, and its mono FLAC file. Raises InvalidRequest for `field`. Blocks."""
        if len(text or "") > MAX_TRANSCRIPT:
            message = f"ref_text has {len(text or '')} characters. Send at most {MAX_TRANSCRIPT}."
            raise InvalidRequest(message, "ref_text", "string_above_max_length")
        text = " ".join((text or "").split()) or None
        checked = check_recording(data, field=field, transcript=text, heard=None, prepare=prepare)
        # 24 bits represent every 16-bit sample, and the mean of two such samples. Unless clipped, loud ones would wrap.
        samples = np.clip(checked.audio, -1, 1 - 2**-23)
        findings = {"changes": checked.changes, "flaws": checked.flaws}
        return cls.of_samples(samples, checked.sample_rate, "PCM_24", style=style, text=text, **findings)

    @classmethod
    def of_samples(
        cls, samples: NDArray[np.generic], sample_rate: int, subtype: str, **fields: Any
    ) -> tuple[Self, bytes]:
        """Return a take of `samples` [samples] with other `fields`, and its FLAC file of the `subtype`. Blocks."""
        import soundfile

        file = io.BytesIO()
        soundfile.write(file, samples, sample_rate, format="FLAC", subtype=subtype)
        flac = file.getvalue()
        seconds = round(len(samples) / sample_rate, 3)
        return cls.made(sha256=hashlib.sha256(flac).hexdigest(), seconds=seconds, num_bytes=len(flac), **fields), flac

    @property
    def cloned_by(self) -> Literal["transcript", "vector"]:
        """Input for cloning. If it has no transcript, clones keep the voice's sound but lose its way of speaking."""
        return "transcript" if self.text else "vector"

    def as_json(self) -> dict[str, object]:
        """Return the object that the API sends to the owner."""
        known = {"style": self.style, "seconds": self.seconds, "text": self.text, "cloned_by": self.cloned_by}
        known |= {"disabled": self.disabled} if self.disabled else {}
        return {**known, "changes": self.changes, "flaws": [asdict(flaw) for flaw in self.flaws]}


@dataclass(frozen=True, slots=True)
class SentRecording:
    """A recording as uploaded by the client, before it is checked and prepared."""

    data: bytes
    text: str | None = None  # transcript
    style: str = NEUTRAL
    prepare: Preparation = "auto"


@dataclass(frozen=True, slots=True)
class Details:
    """Properties of a new voice, as sent by the client."""

    name: str
    language: str | None = None
    description: str = ""
    consent: str | None = None  # ID of a stored consent recording, or a statement
    provenance: str = ""


class Consent(Strict):
    """Unverified evidence of the speaker's consent, as provided by the uploader."""

    statement: Annotated[str, Field(max_length=1000)] | None = None  # free text
    recording: Annotated[str, Field(max_length=40)] | None = None  # ID of a stored consent recording


class Stored(Sent):
    """Base class for records, defining the fields that they share."""

    prefix: ClassVar[Literal["voice", "cons", "design", "lexicon"]]  # of the ID

    id: Annotated[str, Field(max_length=40)]
    name: Name
    owner: Owner = ""  # name of the API key, or "" if the server does not require keys
    created_at: int  # seconds since 1970

    @classmethod
    def new(cls, **values: object) -> Self:
        """Create the first version of a record, owned by the caller. Raises InvalidRequest with the field."""
        owned = {"id": new_id(cls.prefix), "owner": VISITOR.get().name or "", "created_at": now()}
        version = {"version": new_version()} if "version" in cls.model_fields else {}
        return cls.made(**values, **owned, **version)

    @classmethod
    def read(cls, stored: dict[str, Any]) -> Self:
        """Create a record from the stored values. Raises ValidationError.

        If a text exceeds its limit, cut the text and log a warning. If a transcript is too long, disable the recording.
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
                reason = f"its transcript has {len(text)} characters, more than {most}. Store the recording again"
                within |= {"text": None, "disabled": reason}
            where = ".".join(map(str, each["loc"]))
            logger.warning("%s: %s has %d characters: %s", stored.get("id"), where, len(text), fate)
        return cls.model_validate(stored)

    @property
    def num_bytes(self) -> int:
        """Size of the recordings in bytes."""
        return 0

    def changed(self, **changes: object) -> Self:
        """Return a copy with some values replaced and a new version. Raises InvalidRequest with the field."""
        version = {"version": new_version()} if "version" in type(self).model_fields else {}
        return type(self).made(**{**dict(self), **changes, **version})

    def is_named(self, name: str) -> bool:
        return self.name.casefold() == name.casefold()


class StoredVoice(Stored):
    """A stored voice. Every change sets a new `version`, so replicas never use data derived from an old version."""

    prefix: ClassVar = "voice"

    id: Annotated[str, Field(pattern=r"^voice_[0-9a-f]{24}$")]
    version: Version
    takes: Annotated[tuple[Take, ...], Field(min_length=1, max_length=MAX_TAKES)]
    language: Language | None = None  # default for requests
    sampling: _Options = Field(default_factory=dict)  # defaults for requests
    lexicon: Words = Field(default_factory=dict)  # respelling by word; requests can override them
    description: Description = ""
    consent: Consent = Consent()
    provenance: Origin = ""  # source: "openai", "elevenlabs", "import", ...

    @property
    def num_bytes(self) -> int:
        return sum(take.num_bytes for take in self.takes)

    @property
    def key_prefix(self) -> bytes:
        """Prefix of the cache keys for all data derived from this version. It is the same in every process."""
        return hashlib.sha256(f"{self.id} {self.version}".encode()).digest()[:VOICE_BYTES]

    def key(self, take: Take, fingerprint: str) -> bytes:
        """Return the cache key of a recording for the checkpoint with this fingerprint. See `Reference.key`."""
        return self.key_prefix + hashlib.sha256(f"{take.sha256} {fingerprint}".encode()).digest()[:VOICE_BYTES]

    @classmethod
    def made(cls, **values: object) -> Self:
        """Create a voice from checked takes and other, unchecked values. Raises InvalidRequest with the field."""
        voice = super().made(**values)
        _check_sampling(voice.sampling)
        Lexicon.checked(voice.lexicon, "lexicon")
        styles = [take.style.casefold() for take in voice.takes]
        if len(set(styles)) < len(styles):
            raise InvalidRequest("style: another take of the voice already has this style.", "style")
        return voice

    def take_for(self, words: str | None) -> Take:
        """Return the take whose style occurs in `words`, such as instructions, or the first take."""
        return self.take_named(words) or self.takes[0]

    def take_named(self, words: str | None) -> Take | None:
        """Return the take whose style occurs in `words`, or None."""
        named = named_take(words, self.styles)
        return next((take for take in self.takes if take.style == named), None)

    @property
    def styles(self) -> tuple[str, ...]:
        return tuple(take.style for take in self.takes)

    def has_style(self, words: str | None) -> bool:
        return self.take_named(words) is not None

    def describe_take(self, words: str | None, *, is_tagged: bool) -> str:
        """Describe which take is used, and why."""
        named = self.take_named(words)
        take = named or self.takes[0]
        why = "tag" if is_tagged else "instructions" if named else "the first"
        by_vector = "" if take.text else ", speaker vector only: the transcript is missing"
        return f"{take.style} ({why}{by_vector})"


class StoredConsent(Stored):
    """Recording in which a speaker consents to the use of a voice."""

    prefix: ClassVar = "cons"
    noun: ClassVar = "consent"

    id: Annotated[str, Field(pattern=r"^cons_[0-9a-f]{24}$")]
    language: Language
    take: Take

    @property
    def num_bytes(self) -> int:
        return self.take.num_bytes


class StoredDesign(Stored):
    """Candidate for a voice, synthesized from a description. Clients may store the candidate as a voice for an hour."""

    prefix: ClassVar = "design"

    id: Annotated[str, Field(pattern=r"^design_[0-9a-f]{24}$")]
    name: Name = "design"
    description: Description
    language: Language | None = None
    model: Origin  # model that spoke the text of the take
    seed: Annotated[int, Field(ge=0, lt=2**64)]
    take: Take

    @property
    def expires_at(self) -> int:
        """Expiry time in seconds since 1970."""
        return self.created_at + int(DESIGN_S)


class StoredLexicon(Stored):
    """Named respellings of words, for requests that select the lexicon or for all requests."""

    prefix: ClassVar = "lexicon"
    noun: ClassVar = "lexicon"

    id: Annotated[str, Field(pattern=r"^lexicon_[0-9a-f]{24}$")]
    version: Version
    words: Words  # respelling by word
    for_all: bool = False  # whether the respellings apply to every request to the server

    @classmethod
    def named(cls, name: str, words: Mapping[str, str]) -> Self:
        """Create a lexicon for the caller from checked words. Raises InvalidRequest if `name` is wrong."""
        if not name.isprintable():
            raise InvalidRequest("name must have 1 to 80 printable characters. Remove all others.", "name")
        return cls.new(name=name, words=dict(words))

    def with_words(self, words: Mapping[str, str]) -> Self:
        """Return the next version with these words. Raises InvalidRequest."""
        return self.changed(words=Lexicon.checked(words, "words").words)


def _check_sampling(sampling: Mapping[str, bool | int | float]) -> None:
    """Raise InvalidRequest if an option is unknown, or if its value is not valid in requests."""
    options = {option.name: option for option in fields(Sampling)}
    for name, value in sampling.items():
        if name not in options:
            raise InvalidRequest(f"sampling: {name[:40]!r} is unknown. Use {', '.join(options)}.", "sampling")
        kind, bounds = get_args(options[name].type)[0], options[name].metadata["bounds"]
        is_kind = isinstance(value, bool) == (kind is bool) and isinstance(value, int if kind is int else int | float)
        if not is_kind or not all(_HOLDS[bound](value, limit) for bound, limit in bounds.items()):
            raise InvalidRequest(f"sampling: {name} must have type {kind.__name__} and bounds {bounds}.", "sampling")


def new_id(kind: Literal["voice", "cons", "design", "lexicon"]) -> str:
    return f"{kind}_{secrets.token_hex(12)}"


def new_version() -> str:
    return secrets.token_hex(8)


def now() -> int:
    return int(time.time())


def packed(voice: StoredVoice, recording: Callable[[Take], bytes]) -> Iterator[bytes]:
    """Yield the portable file of a voice in parts: a zip with `voice.json` and each recording, named by its sha256.

    Only one recording is in memory at a time. Blocks.
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
    """Write-only buffer from which the reader takes the bytes during the write."""

    def __init__(self) -> None:
        self._written = bytearray()

    def write(self, content: Any) -> int:
        self._written += content
        return len(content)

    def taken(self) -> bytes:
        part, self._written = self._written, bytearray()
        return bytes(part)


def unpack(file: Path) -> tuple[StoredVoice, dict[str, bytes]]:
    """Read and check a portable file. Return the voice and its recordings by sha256. Raises InvalidRequest."""
    try:
        with zipfile.ZipFile(file) as archive:
            voice = StoredVoice.model_validate(json.loads(_part(archive, "voice.json")))
            recordings = {take.sha256: _part(archive, f"{take.sha256}.flac") for take in voice.takes}
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise InvalidRequest(f"{file} is not a voice file: {error}.", "file") from None
    for sha256, recording in recordings.items():
        if hashlib.sha256(recording).hexdigest() != sha256:
            raise InvalidRequest(f"{file} is damaged: the checksum of {sha256[:12]}.flac is wrong.", "file")
    return voice, recordings


def _part(archive: zipfile.ZipFile, name: str) -> bytes:
    if archive.getinfo(name).file_size > _LARGEST_PART:
        raise ValueError(f"{name} is larger than {_LARGEST_PART} bytes")
    return archive.read(name)
