"""Speaker vectors and codes of stored recordings: read from the store, or learnt from replicas and written to it."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

from deployments.errors import InvalidRequest
from deployments.protocol import ModelInfo, Reference
from deployments.recording_cache import Lookups
from deployments.serving import metrics
from serve_app.client_audio import recordings
from serve_app.voices.stored_voice import StoredVoice, Take
from serve_app.voices.voice_store import VoiceStore

_MOST_UNDERIVED = 256

Aside = Callable[[Callable[[], Any]], Awaitable[Any]]


class ClonePrompts:
    """The prompts of one process."""

    def __init__(self, aside: Aside) -> None:
        """`aside` runs what blocks."""
        self._aside = aside
        self._underived: dict[bytes, tuple[StoredVoice, Reference]] = {}  # by key: their prompts are not stored yet

    async def reference(
        self, store: VoiceStore, voice: StoredVoice, take: Take, info: ModelInfo, *, x_vector_only: bool
    ) -> Reference:
        """For a request to replicas: what was derived of the recording for this checkpoint, else its samples. Raises
        InvalidRequest of a recording that is disabled, Damaged, StoreFailed, and NotFound where the voice was deleted.
        """
        if take.disabled:
            message = f"voice: the recording {take.style!r} of {voice.name!r} is disabled: {take.disabled}."
            raise InvalidRequest(message, "voice", "recording_disabled")
        key = voice.key(take, info.fingerprint or info.name)
        unprepared = Reference(None, take.text, x_vector_only=x_vector_only or take.text is None, key=key)
        reference = recordings.by_prompt(unprepared)
        if reference.prompt is None and (prompt := await self._aside(partial(store.derived, voice, key))) is not None:
            recordings.keep_clone_prompt(unprepared, prompt)
            reference = recordings.by_prompt(unprepared)
        is_known = reference.prompt is not None
        metrics.references("prompt", Lookups(hits=int(is_known), misses=int(not is_known)))
        if is_known:
            return reference
        if len(self._underived) >= _MOST_UNDERIVED:  # a stream that was cancelled brings no prompt
            self._underived.pop(next(iter(self._underived)))
        self._underived[key] = voice, unprepared
        read = partial(recordings.read_flac, key, lambda: store.recording(voice, take), info.sample_rate)
        return replace(unprepared, audio=await self._aside(read))

    async def keep(self, store: VoiceStore) -> None:
        """Replicas have answered with prompts of recordings that were sent as samples: store them."""
        for key, (voice, unprepared) in list(self._underived.items()):
            prompt = recordings.by_prompt(unprepared).prompt
            if prompt is not None and self._underived.pop(key, None) is not None:
                await self._aside(partial(store.keep_derived, voice, key, prompt))

    def forget(self, versions: set[bytes]) -> None:
        """Drop what is known of these versions of voices."""
        kept = self._underived.items()
        self._underived = {key: entry for key, entry in kept if entry[0].key_prefix not in versions}
        recordings.forget(versions)
