"""Interface of stored voices. The core has no stored voices; the extension `voices` provides them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from deployments.errors import NotFound
from deployments.protocol import ModelInfo, Reference
from serve_app.text.languages import AUTO


class ClonedVoice(Protocol):
    """Voice cloned from a stored recording."""

    @property
    def id(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def language(self) -> str | None:
        """Language for requests that do not set one."""
        ...

    @property
    def sampling(self) -> Mapping[str, Any]:
        """Sampling options for requests that do not set them, by field."""
        ...

    @property
    def lexicon(self) -> Mapping[str, str]:
        """Pronunciations of words for this voice."""
        ...

    @property
    def styles(self) -> tuple[str, ...]:
        """Styles of the voice's recordings."""
        ...

    def has_style(self, words: str | None) -> bool:
        """Return whether `words`, such as instructions, name one of the voice's recordings."""
        ...

    def describe_take(self, words: str | None, *, is_tagged: bool) -> str:
        """Return the recording in use and the reason: a style tag or `words` named it, or it is the first recording."""
        ...


@dataclass(frozen=True, slots=True)
class ChosenVoice:
    """Voice of a request, and the language that it speaks."""

    name: str | None  # for speakers, the model's own spelling
    stored: ClonedVoice | None = None
    reason: str | None = None  # why the voice differs from the requested voice
    language: str | None = AUTO  # one of the model's languages, AUTO or DETECT; None: one that it does not speak
    default: str | None = None  # `name`, if the request does not name a voice

    @property
    def ignored(self) -> dict[str, str]:
        """The `reason`, by field."""
        return {"voice": self.reason} if self.reason else {}


class VoiceSource:
    """Stored voices that the current caller may use (`VISITOR`). This one is empty; an extension stores voices."""

    @property
    def most(self) -> int:
        """Maximum number of stored voices per caller."""
        return 0

    async def voices(self) -> Sequence[ClonedVoice]:
        """Return all stored voices that the caller may use."""
        return ()

    async def find(self, id_or_name: str | None) -> ClonedVoice | None:
        """Find a voice by its id or name, ignoring case."""
        return None

    def known(self, id_or_name: str | None) -> ClonedVoice | None:
        """Like `find`, but without reading the store."""
        return None

    def missing(self, name: str | None) -> NotFound | None:
        """Return the error for a name that looks like the id of a stored voice, if no such voice exists."""
        return None

    async def reference(self, voice: Any, words: str | None, info: ModelInfo, *, x_vector_only: bool) -> Reference:
        """Return the recording that `words` name, in the form that replicas expect. `voice` is a result of `find`."""
        raise NotFound("This server does not store voices.", "voice", "voice_not_found")
