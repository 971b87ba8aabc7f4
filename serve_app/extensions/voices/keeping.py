"""Checks before a record is stored: names, quotas, and consents that voices name."""

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
    """Raises InvalidRequest if `record` may not be stored in addition to the `known` ones, by path, with their `marks`.
    `before`: its earlier version.
    """
    if not isinstance(record, StoredDesign):  # those expire after an hour
        counted = {path: each for path, each in known.items() if not isinstance(each, StoredDesign)}
        others = {path: each for path, each in counted.items() if each.owner == record.owner and each.id != record.id}
        held = [each.num_bytes + marks[path]["size"] for path, each in others.items()]
        _check_quota(record, before, held=held, settings=settings)
    if isinstance(record, StoredVoice):
        _check_name(record, known.values())
        named, kept = record.consent.recording, [each.id for each in known.values() if isinstance(each, StoredConsent)]
        if named is not None and named not in kept:
            raise NotFound(f"consent: {named} was deleted.", "consent", "consent_not_found")


def check_unused(consent: StoredConsent, known: Iterable[Record]) -> None:
    """Raises Conflict if a voice names the consent."""
    voices = [each for each in known if isinstance(each, StoredVoice)]
    if users := [each.name for each in voices if each.consent.recording == consent.id]:
        message = f"consent: the voice {', '.join(users[:3])} names it. Delete that voice first."
        raise Conflict(message, "consent")


def _check_name(voice: StoredVoice, known: Iterable[Record]) -> None:
    if ID.fullmatch(voice.name.casefold()):
        raise InvalidRequest(f"name: {voice.name!r} looks like an id.", "name")
    others = [each for each in known if isinstance(each, StoredVoice) and each.id != voice.id]
    if any(each.owner == voice.owner and each.is_named(voice.name) for each in others):
        raise Conflict(f"name: a voice is already named {voice.name!r}. Delete it or use another name.", "name")


def _check_quota(record: Record, before: Record | None, *, held: list[int], settings: VoiceSettings) -> None:
    """`held`: bytes of each other record of its owner. Changes that add no bytes are allowed even over the quota."""
    own_bytes, old_bytes = (0 if each is None else each.num_bytes + len(record_file(each)) for each in (record, before))
    message = ""
    if before is None and len(held) >= settings.max_voices:
        allowed = f"api.voices.max_voices allows {settings.max_voices}"
        message = f"You keep {len(held)} voices, consents and dictionaries. {allowed}. Delete one."
    elif (num_bytes := sum(held) + own_bytes) > settings.max_bytes and own_bytes > old_bytes:
        message = f"You would keep {num_bytes} bytes. api.voices.max_bytes allows {settings.max_bytes}. Delete a voice."
    if message:
        raise Conflict(message, None, "quota_exceeded")
