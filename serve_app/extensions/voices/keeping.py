"""Check the name, the quota and the consent of a record before the store writes it."""

from collections.abc import Iterable, Mapping

import obstore

from deployments.errors import Conflict, InvalidRequest, NotFound
from serve_app.extensions.voices.settings import VoiceSettings
from serve_app.extensions.voices.stored_voice import ID, StoredConsent, StoredDesign, StoredVoice
from serve_app.extensions.voices.voice_store import Record, record_file


def check_kept(
    record: Record,
    known: Mapping[str, Record],
    *,
    marks: "Mapping[str, obstore.ObjectMeta]",
    settings: VoiceSettings,
    before: Record | None,
) -> None:
    """Raise InvalidRequest if the store is not allowed to add `record` to the `known` records.

    `known` and `marks` map paths to records and to metadata of their files. `before` is the earlier version of
    `record`.
    """
    if not isinstance(record, StoredDesign):  # designs expire after an hour
        counted = {path: each for path, each in known.items() if not isinstance(each, StoredDesign)}
        others = {path: each for path, each in counted.items() if each.owner == record.owner and each.id != record.id}
        held = [each.num_bytes + marks[path]["size"] for path, each in others.items()]
        _check_quota(record, before, held=held, settings=settings)
    if isinstance(record, StoredVoice):
        _check_name(record, known.values())
        named, kept = record.consent.recording, [each.id for each in known.values() if isinstance(each, StoredConsent)]
        if named is not None and named not in kept:
            raise NotFound(f"consent: {named} was deleted. Send another one.", "consent", "consent_not_found")


def check_unused(consent: StoredConsent, known: Iterable[Record]) -> None:
    """Raise Conflict if any voice refers to the consent."""
    voices = [each for each in known if isinstance(each, StoredVoice)]
    if users := [each.name for each in voices if each.consent.recording == consent.id]:
        message = f"consent: {consent.id} is in use. Delete these voices first: {', '.join(users[:3])}."
        raise Conflict(message, "consent")


def _check_name(voice: StoredVoice, known: Iterable[Record]) -> None:
    if ID.fullmatch(voice.name.casefold()):
        raise InvalidRequest(f"name: {voice.name!r} looks like the ID of a record. Use another name.", "name")
    others = [each for each in known if isinstance(each, StoredVoice) and each.id != voice.id]
    if any(each.owner == voice.owner and each.is_named(voice.name) for each in others):
        raise Conflict(f"name: a voice is already named {voice.name!r}. Delete it or use another name.", "name")


def _check_quota(record: Record, before: Record | None, *, held: list[int], settings: VoiceSettings) -> None:
    """Raise Conflict if `record` exceeds the quota. Changes that do not add bytes are always allowed.

    `held` lists the bytes of the owner's other records.
    """
    own_bytes, old_bytes = (0 if each is None else each.num_bytes + len(record_file(each)) for each in (record, before))
    message = ""
    if before is None and len(held) >= settings.max_voices:
        allowed = f"api.voices.max_voices allows {settings.max_voices}"
        message = f"You have {len(held)} voices, consents and dictionaries. {allowed}. Delete one of them."
    elif (num_bytes := sum(held) + own_bytes) > settings.max_bytes and own_bytes > old_bytes:
        message = f"You need {num_bytes} bytes. api.voices.max_bytes allows {settings.max_bytes}. Delete a voice."
    if message:
        raise Conflict(message, None, "quota_exceeded")
