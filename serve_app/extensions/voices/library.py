"""In-memory copy of the stored voices, which each ingress replica keeps up to date.

Any process can change the store. Each ingress replica reads the store every POLL_S seconds, and whenever a voice name
is unknown. If a voice is deleted or gets a new version, the ingress drops its cached data for the old version, and asks
all replicas to do the same.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import ParamSpec, TypeVar

import obstore

from deployments.errors import Conflict, InvalidRequest, NotFound, NotReady, TalkrayError
from deployments.protocol import ModelInfo, ModelKind, Reference
from deployments.recording_cache import Lookups
from deployments.serving import metrics
from serve_app.api.access.callers import VISITOR
from serve_app.api.parsing.speech_body import SpeechBody
from serve_app.api.resolve.ignored_fields import NO_CLONING, Reasons
from serve_app.api.speech_service import SpeechService
from serve_app.api.voice_source import ChosenVoice, VoiceSource
from serve_app.audio import clone_prompts, recordings
from serve_app.audio.clone_prompts import Decode
from serve_app.extension import ExtensionState, forget_nothing
from serve_app.extensions.text.lexicon import Lexicon, LexiconSource
from serve_app.extensions.voices.clocks import SteadyClock
from serve_app.extensions.voices.keeping import check_kept, check_unused
from serve_app.extensions.voices.reference_doctor import decode_prepared
from serve_app.extensions.voices.settings import RecordingFields, VoiceSettings
from serve_app.extensions.voices.stored_voice import (
    DESIGN_S,
    ID,
    Details,
    SentRecording,
    StoredConsent,
    StoredDesign,
    StoredLexicon,
    StoredVoice,
    Take,
)
from serve_app.extensions.voices.voice_store import Damaged, NoStore, Record, StoreFailed, VoiceStore, path_of, tried

logger = logging.getLogger(__name__)

POLL_S = 2.0
_SWEEP_S = 3600.0
_READERS = 16  # number of parallel reads; reading a record from a bucket takes 20 ms
_MOST_UNDERIVED = 256
_LEAST_BETWEEN_S = 0.1  # minimum time between store reads for unknown names

Forget = Callable[[tuple[bytes, ...]], Awaitable[None]]
P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R", StoredVoice, StoredConsent, StoredDesign, StoredLexicon)
Other = TypeVar("Other", StoredConsent, StoredLexicon)


class Voices(ExtensionState, VoiceSource, LexiconSource):
    """Stored voices that VISITOR may see. All methods raise StoreFailed if the store is unreachable."""

    body_fields = RecordingFields

    def __init__(
        self, store: VoiceStore | None, settings: VoiceSettings, *, why_not: str = "", forget: Forget = forget_nothing
    ) -> None:
        """Without a store, `why_not` names the setting to change. `forget` notifies all replicas of deleted voices."""
        self.store, self._settings, self._why_not, self._forget = store, settings, why_not, forget
        self._records: dict[str, Record] = {}  # by path
        self._marks: dict[str, obstore.ObjectMeta] = {}
        self._for_all = Lexicon.EMPTY
        self._reading = asyncio.Lock()
        self._num_looks, self._read_s = 0, float("-inf")
        self._failure: TalkrayError | None = None  # error from the last read
        self._writing = asyncio.Lock()  # held from a read of the store until the write that depends on it
        self._to_forget: set[bytes] = set()  # key prefixes that replicas may still cache
        self._over: list[tuple[Record, datetime | None]] = []  # arguments for `VoiceStore.clear`
        self._threads = ThreadPoolExecutor(_READERS, "voices")
        self._underived: dict[bytes, tuple[StoredVoice, Reference]] = {}  # by key, without a stored prompt
        self._following: asyncio.Task[None] | None = None

    @property
    def most(self) -> int:
        return self._settings.max_voices

    def preparation(self, body: SpeechBody) -> Decode | None:
        return decode_prepared if body.of(RecordingFields).prepare == "auto" else None

    def unused(self, body: SpeechBody, info: ModelInfo, voice: ChosenVoice) -> Reasons:
        if body.of(RecordingFields).prepare is None or (info.kind is ModelKind.BASE and voice.stored is None):
            return {}
        return {"prepare": NO_CLONING if voice.stored is None else "only applies to recordings in the request"}

    async def voices(self) -> list[StoredVoice]:
        """Return the visible voices, oldest first. The list is empty until the store has been read."""
        with contextlib.suppress(StoreFailed):  # `_look_again` logs the error
            await self._follow()
        return self._visible(StoredVoice)

    async def consents(self) -> list[StoredConsent]:
        await self._follow()
        return self._visible(StoredConsent)

    async def all_of(self, kind: type[R]) -> list[R]:
        """Return the visible records of a kind, oldest first. The list can contain expired designs."""
        await self.refresh()
        return self._visible(kind)

    async def lexicon_for_all(self) -> Lexicon:
        """Return the respellings for every caller, or an empty lexicon until the store has been read."""
        if self._following is not None and self._read_s < 0:
            with contextlib.suppress(StoreFailed):  # `_look_again` logs the error
                await self.refresh()
        return self._for_all

    async def find(self, id_or_name: str | None) -> StoredVoice | None:
        """Return the voice with this ID or name, ignoring case. The client's own voices take precedence."""
        if self.store is None or not id_or_name:
            return None
        await self._follow()
        voice = self._find(StoredVoice, id_or_name)
        if voice is None:
            # Another process may have just stored the voice. All requests with unknown names share these reads.
            await self.refresh(not_before_s=self._read_s + _LEAST_BETWEEN_S)
            voice = self._find(StoredVoice, id_or_name)
        return voice

    def known(self, id_or_name: str | None) -> StoredVoice | None:
        """Return the voice that `find` would return, without reading the store."""
        return self._find(StoredVoice, id_or_name) if id_or_name else None

    async def get(self, id_or_name: str) -> StoredVoice:
        """Return the voice with this ID or name. Raises NotFound if there is none, or if it belongs to another key."""
        if (voice := await self.find(id_or_name)) is None:
            raise _unknown("voice", id_or_name, "voice_id")
        return voice

    def missing(self, name: str | None) -> NotFound | None:
        """Return an error if `name` looks like a voice ID but no voice has this ID."""
        is_lost = name is not None and ID.fullmatch(name.lower()) and self.known(name) is None
        return _unknown("voice", name.lower(), "voice") if name is not None and is_lost else None

    async def get_other(self, kind: type[Other], record_id: str) -> Other:
        """Return a consent or a lexicon. Raises NotFound if there is none, or if it belongs to another key."""
        await self.refresh()
        if (record := self._find(kind, record_id)) is None:
            raise _unknown(kind.noun, record_id, kind.noun)
        return record

    async def add(self, details: Details, sent: Sequence[SentRecording], *, field: str) -> StoredVoice:
        """Store a voice. Requests that do not name a style use the first recording.

        `field` is the client's name for the recordings in errors. Raises InvalidRequest, Conflict.
        """
        self.files()
        consent = await self._consent(details.consent)
        taken = [await self._recorded(recording, field) for recording in sent]
        voice = StoredVoice.new(
            name=details.name,
            takes=tuple(take for take, _ in taken),
            language=details.language,
            description=details.description,
            consent=consent,
            provenance=details.provenance,
        )
        return await self.keep(voice, {take.sha256: flac for take, flac in taken})

    async def keep(self, record: R, files: Mapping[str, bytes]) -> R:
        """Store a record unchanged, with its recordings by sha256, and return the record. An exported voice keeps its
        ID. Raises Conflict, StoreFailed.
        """
        async with self._writing:
            await self.refresh()
            return await self._keep(record, files)

    async def add_consent(self, name: str, language: str, sent: SentRecording, *, field: str) -> StoredConsent:
        """Store a consent recording unchanged, because it is evidence. Raises InvalidRequest, Conflict."""
        self.files()
        take, flac = await self._recorded(replace(sent, prepare="none"), field)
        made = StoredConsent.new(name=name, language=language, take=take)
        return await self.keep(made, {take.sha256: flac})

    async def change_voice(
        self, voice: StoredVoice, changes: Mapping[str, object], *, added: Sequence[SentRecording] = (), field: str = ""
    ) -> StoredVoice:
        """Change a voice's fields and append recordings. Raises InvalidRequest, and the errors of `change`."""
        self.files()
        taken = [await self._recorded(recording, field) for recording in added]

        def next_version(present: StoredVoice) -> StoredVoice:
            return present.changed(**changes, takes=(*present.takes, *(take for take, _ in taken)))

        return await self.change(voice, next_version, {take.sha256: flac for take, flac in taken})

    async def change(self, record: R, next_version: Callable[[R], R], files: Mapping[str, bytes] | None = None) -> R:
        """Store the result of `next_version` for the current record, with new recordings by sha256. Raises Conflict,
        the errors of `next_version`, and NotFound if the record was deleted during this change.
        """
        async with self._writing:
            await self.refresh()
            present = next((each for each in self._all(type(record)) if each.id == record.id), None)
            if present is None:
                code = "lexicon_not_found" if isinstance(record, StoredLexicon) else "voice_not_found"
                raise NotFound(f"{record.name!r} was deleted during this request.", None, code)
            changed = await self._keep(next_version(present), files or {})
        await self._forget_gone()
        return changed

    async def remove(self, record: Record) -> None:
        """Delete a record from the store, and from the cache of every replica that responds.

        Raises Conflict if the record is a consent that a voice refers to.
        """
        store = self.files()
        async with self._writing:
            if isinstance(record, StoredConsent):  # another process may just have stored a voice that uses it
                await self.refresh()
                check_unused(record, self._records.values())
                kept = await self.aside(tried, partial(store.recording, record, record.take))
                await self.aside(store.delete, path_of(record.id))
                await self.refresh()
                try:
                    check_unused(record, self._records.values())
                except Conflict:  # another process may have deleted the recording
                    files = {} if isinstance(kept, Damaged) else {record.take.sha256: kept}
                    await self.aside(store.write, record, files)
                    raise
            await self.aside(store.remove, record)
        await self._forget_gone()

    async def recording(self, record: Record, take: Take) -> bytes:
        """Return the FLAC file of a take. Raises Damaged, StoreFailed, NotFound."""
        return await self.aside(self.files().recording, record, take)

    async def reference(
        self, voice: StoredVoice, words: str | None, info: ModelInfo, *, x_vector_only: bool
    ) -> Reference:
        """Return the reference for a request. `words`, such as a style or instructions, select the recording.

        The reference contains the prompt derived for this checkpoint, or the samples if the prompt is not known yet.
        Raises InvalidRequest if the recording is disabled, NotFound if the voice was deleted, Damaged, StoreFailed.
        """
        take = voice.take_for(words)
        if take.disabled:
            message = f"voice: the recording {take.style!r} of {voice.name!r} is disabled, because {take.disabled}."
            raise InvalidRequest(message, "voice", "recording_disabled")
        key = voice.key(take, info.fingerprint or info.name)
        unprepared = Reference(None, take.text, x_vector_only=x_vector_only or take.text is None, key=key)
        reference = clone_prompts.with_prompt(unprepared)
        if reference.prompt is None and (prompt := await self.aside(self.files().derived, voice, key)) is not None:
            clone_prompts.store_clone_prompt(unprepared, prompt)
            reference = clone_prompts.with_prompt(unprepared)
        is_known = reference.prompt is not None
        metrics.record_recording_lookups("prompt", Lookups(hits=int(is_known), misses=int(not is_known)))
        if is_known:
            return reference
        if len(self._underived) >= _MOST_UNDERIVED:  # cancelled streams never return a prompt
            self._underived.pop(next(iter(self._underived)))
        self._underived[key] = voice, unprepared
        store = self.files()
        read = partial(recordings.read_flac, key, lambda: store.recording(voice, take), info.sample_rate)
        return replace(unprepared, audio=await self.aside(read))

    async def _keep_prompts(self) -> None:
        """Store the prompts that replicas have derived from the samples."""
        for key, (voice, unprepared) in list(self._underived.items()):
            prompt = clone_prompts.with_prompt(unprepared).prompt
            if prompt is not None and self._underived.pop(key, None) is not None:
                await self.aside(self.files().keep_derived, voice, key, prompt)

    def files(self) -> VoiceStore:
        """Return the store, which also keeps jobs and usage counts. Raises NoStore if the server has none."""
        if self.store is None:
            raise NoStore(self._why_not)
        return self.store

    async def refresh(self, *, not_before_s: float = float("-inf")) -> None:
        """Read the store, no earlier than `not_before_s` (`time.monotonic()`). Concurrent callers share a read."""
        num_before = self._num_looks
        if (wait_s := not_before_s - time.monotonic()) > 0:
            await asyncio.sleep(wait_s)
        async with self._reading:
            if self._num_looks == num_before:
                try:
                    await self._read_changes()
                except TalkrayError as error:
                    self._failure = error
                else:
                    self._failure, self._read_s = None, time.monotonic()
                self._num_looks += 1
            if self._failure is not None:
                raise self._failure

    def follow(self) -> None:
        """Start a task that reads the store every POLL_S seconds."""
        if self.store is not None and (self._following is None or self._following.done()):
            self._following = asyncio.create_task(self._look_again())

    async def _follow(self) -> None:
        if self.store is None:
            return
        self.follow()
        if self._read_s < 0:
            await self.refresh()

    async def _look_again(self) -> None:
        """Read the store periodically, and sweep old files every hour as soon as the clock is steady."""
        swept_s, failure, clock = float("-inf"), "", SteadyClock(shortest_s=DESIGN_S)
        while True:
            try:
                await self._forget_gone()
                await self._keep_prompts()
                now_s = clock.now()
                if now_s is not None and time.monotonic() - swept_s > _SWEEP_S:
                    swept_s = time.monotonic()
                    store_s = await self.aside(self.files().now_s)
                    await self.aside(self.files().sweep, min(now_s, store_s))
                failure = ""
            except TalkrayError as error:
                if str(error) != failure:
                    logger.error("the store cannot be read, so the server uses the voices of the last read: %s", error)
                failure = str(error)
            await asyncio.sleep(POLL_S)

    async def _read_changes(self) -> None:
        store = self.files()
        marks = await self.aside(store.marks)
        changed = [path for path, mark in marks.items() if self._marks.get(path) != mark]
        read = await asyncio.gather(*(self.aside(tried, partial(store.read, path)) for path in changed))
        records = {path: record for path, record in self._records.items() if path in marks and path not in changed}
        found = zip(changed, read, strict=True)
        records |= {path: each for path, each in found if each is not None and not isinstance(each, Damaged)}
        for path, old in self._records.items():
            if path not in marks:
                self._over.append((old, self._marks[path]["last_modified"]))
            elif path in records and _prefixes([old]) - _prefixes([records[path]]):
                self._over.append((old, None))
        over = _prefixes(self._records.values()) - _prefixes(records.values())
        is_other = records != self._records
        self._records, self._marks = records, marks
        if is_other:
            for_all = [each for each in self._all(StoredLexicon) if each.for_all]
            self._for_all = Lexicon({word: said for each in for_all for word, said in each.words.items()})
        if over:
            self._to_forget |= over
            kept = self._underived.items()
            self._underived = {key: entry for key, entry in kept if entry[0].key_prefix not in over}
            recordings.forget(over)

    async def _forget_gone(self) -> None:
        """Read the store, ask all replicas to forget deleted voices, and delete the files of these voices. The next
        call retries failed steps.
        """
        await self.refresh()
        if over := tuple(self._to_forget):
            try:
                await self._forget(over)
            except NotReady as error:
                logger.warning("some replicas have not removed deleted voices yet: %s", error)
            else:
                self._to_forget.difference_update(over)
        for gone in tuple(self._over):
            with contextlib.suppress(StoreFailed):  # the store has logged the error
                await self.aside(partial(self.files().clear, gone[0], recorded_until=gone[1]))
                self._over = [each for each in self._over if each is not gone]

    async def _recorded(self, sent: SentRecording, field: str) -> tuple[Take, bytes]:
        """Return the recording as a take, with its FLAC file. Raises InvalidRequest with the field name."""
        if not sent.data:
            raise InvalidRequest(f"{field} is empty. Send a recording.", field, "missing_required_parameter")
        return await self.aside(
            Take.of_file, sent.data, text=sent.text, style=sent.style, prepare=sent.prepare, field=field
        )

    async def _keep(self, record: R, files: Mapping[str, bytes]) -> R:
        """Store a record if the checks allow it. Check again after the write, because another process may have written
        at the same time, and undo the write if the second check fails.
        """
        before = next((each for each in self._all(type(record)) if each.id == record.id), None)
        check = partial(check_kept, record, settings=self._settings, before=before)
        check(self._records, marks=self._marks)
        store = self.files()
        await self.aside(store.write, record, files)
        await self.refresh()
        try:
            check(self._records, marks=self._marks)
        except InvalidRequest:  # caches already reject the earlier version, so store it as a new one
            undo = partial(store.remove, record) if before is None else partial(store.write, before.changed(), {})
            await self.aside(undo)
            await self.refresh()
            raise
        return record

    async def _consent(self, consent: str | None) -> dict[str, str]:
        if not consent and self._settings.require_consent:
            message = "consent is required. Send a statement, or the ID of a recording (POST /v1/audio/voice_consents)."
            raise InvalidRequest(message, "consent", "missing_required_parameter")
        if not consent or not consent.startswith("cons_"):
            return {"statement": consent} if consent else {}
        return {"recording": (await self.get_other(StoredConsent, consent)).id}

    def _find(self, kind: type[R], id_or_name: str) -> R | None:
        visible, own = self._visible(kind), VISITOR.get().name
        matches = [each for each in visible if each.id == id_or_name.lower()]
        matches += sorted((each for each in visible if each.is_named(id_or_name)), key=lambda each: each.owner != own)
        return matches[0] if matches else None

    def _visible(self, kind: type[R]) -> list[R]:
        visitor = VISITOR.get()
        return [each for each in self._all(kind) if visitor.sees_all or each.owner == visitor.name]

    def _all(self, kind: type[R]) -> list[R]:
        return sorted(
            (each for each in self._records.values() if isinstance(each, kind)),
            key=lambda each: (each.created_at, each.name.casefold(), each.id),
        )

    async def aside(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the blocking function `work` in a thread and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *args, **kwargs))


def voices_of(service: SpeechService) -> Voices:
    """Return the ingress's voice library."""
    voices: Voices = service.opened_by("voices")
    return voices


def _unknown(noun: str, name: str, field: str) -> NotFound:
    message = f"{noun.capitalize()} {name[:80]!r} is unknown or belongs to another key."
    return NotFound(message, field, f"{noun}_not_found")


def _prefixes(records: Iterable[Record]) -> set[bytes]:
    return {each.key_prefix for each in records if isinstance(each, StoredVoice)}
