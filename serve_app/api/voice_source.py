"""Voices in addition to those of the models. The core has none: the extension `voices` stores them."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from deployments.errors import NotFound
from deployments.protocol import ModelInfo, Reference


class KeptVoice(Protocol):
    """A voice that speaks from a stored recording."""

    @property
    def id(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def language(self) -> str | None:
        """The language of requests that name none."""
        ...

    @property
    def sampling(self) -> Mapping[str, object]:
        """Sampling options of requests that do not set them, by field."""
        ...

    @property
    def lexicon(self) -> Mapping[str, str]:
        """Pronunciations of words in this voice."""
        ...

    @property
    def styles(self) -> tuple[str, ...]:
        """The styles of its recordings."""
        ...

    def has_style(self, words: str | None) -> bool:
        """Whether words, such as instructions, name one of its recordings."""
        ...

    def take_note(self, words: str | None, *, is_tagged: bool) -> str:
        """Which recording speaks, and why: a tag of the text or these words named it, or it is the first."""
        ...


class VoiceSource(Protocol):
    """The kept voices that the caller of this context may use (`VISITOR`)."""

    @property
    def most(self) -> int:
        """How many of them a caller may have."""
        ...

    async def voices(self) -> Sequence[KeptVoice]:
        """All of them."""
        ...

    async def find(self, id_or_name: str | None) -> KeptVoice | None:
        """The voice that a client means, in any case."""
        ...

    def known(self, id_or_name: str | None) -> KeptVoice | None:
        """The voice that `find` would return, without a look at the store."""
        ...

    def missing(self, name: str | None) -> NotFound | None:
        """The error for a name that can only be a kept voice's id, if no voice has it."""
        ...

    async def reference(self, voice: Any, words: str | None, info: ModelInfo, *, x_vector_only: bool) -> Reference:
        """The recording that `words` name, for replicas. `voice`: as `find` returned it."""
        ...


class NoVoices:
    """The source of a server that keeps no voices."""

    most = 0

    async def voices(self) -> Sequence[KeptVoice]:
        return ()

    async def find(self, id_or_name: str | None) -> KeptVoice | None:
        return None

    def known(self, id_or_name: str | None) -> KeptVoice | None:
        return None

    def missing(self, name: str | None) -> NotFound | None:
        return None

    async def reference(self, voice: Any, words: str | None, info: ModelInfo, *, x_vector_only: bool) -> Reference:
        raise NotFound("No voices are kept here.", "voice", "voice_not_found")
