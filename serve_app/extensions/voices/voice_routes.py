"""Routes for stored voices and consent recordings: OpenAI's `/v1/audio/voices` and `/v1/audio/voice_consents`.

`/v1/audio/voices` also accepts the form of vLLM-Omni. The dialects of ElevenLabs and Cartesia have their own routes.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from deployments.errors import InvalidRequest
from serve_app.api.context import state_of
from serve_app.api.parsing.client_input import parse_object
from serve_app.api.parsing.forms import SentForm, read_form
from serve_app.api.resolve import ignored_fields
from serve_app.api.responses.listing import json_in_thread
from serve_app.api.responses.whole_audio import ByteQuota
from serve_app.api.speech_service import SpeechService
from serve_app.audio.recordings import PREPARATIONS
from serve_app.extension import Charge, Dialect, Route
from serve_app.extensions.voices.library import voices_of
from serve_app.extensions.voices.listing import page_of, prefetch_first
from serve_app.extensions.voices.stored_voice import (
    FILE_SUFFIX,
    NEUTRAL,
    Details,
    SentRecording,
    StoredConsent,
    StoredVoice,
    packed,
)

Json = dict[str, object]

_TEXT = ("ref_text", "reference_text")
_DESCRIPTION = ("speaker_description", "description")
_DETAILS = ("name", "language", *_DESCRIPTION)
_RECORDING = ("audio_sample", *_TEXT, "prepare")
_PROMPT = ("prompt", "script_hint", "model")
_CREATED = (*_DETAILS, *_RECORDING, *_PROMPT, "consent", "type", "design")
_KINDS = ("audio_sample", "prompt")
_CHANGED = (*_DETAILS, *_RECORDING, "style", "sampling", "lexicon")


async def add_voice(service: SpeechService, request: Request) -> Response:
    """Store a named voice from a recording, preferably with its transcript, from a `design` or from a `prompt`."""
    form = await read_form(request)
    is_prompt = _check_kind(form) == "prompt"
    reasons: dict[str, str] = {}
    details = Details(
        form.required("name"),
        language=form.text("language"),
        description=form.text(*_DESCRIPTION) or "",
        consent=form.text("consent"),
        provenance="openai",
    )
    designs, design = service.opened_by("designs"), form.text("design")
    if design is None and not is_prompt:
        voice = await voices_of(service).add(details, _recordings(form, style=NEUTRAL), field="audio_sample")
    elif form.files or form.text(*_TEXT, "prepare"):
        message = "design: a design already contains a recording and its text. Remove audio, text and prepare."
        raise InvalidRequest(message, "design")
    elif designs is None:
        field = "design" if design else "prompt"
        raise InvalidRequest(f"{field}: this server does not design voices. Send a recording.", field)
    elif design is not None:
        voice = await designs.lock(design, details)
    else:
        prompt, script = form.required("prompt"), form.text("script_hint")
        voice = await designs.create(service, request, details, prompt=prompt, script=script)
        reasons = {} if form.text("model") in (None, "auto") else {"model": "the VoiceDesign model here makes voices"}
    return _answer({**described(voice), "success": True, "voice": _omni(voice)}, form, _CREATED, reasons)


async def show_voice(service: SpeechService, voice_id: str) -> Json:
    """Return a stored voice, by its ID or name."""
    return described(await voices_of(service).get(voice_id))


async def change_voice(service: SpeechService, request: Request, voice_id: str) -> Response:
    """Change name, language, description, sampling or lexicon of a voice, or add an `audio_sample` with a `style`."""
    form = await read_form(request)
    changes: Json = {name: form.text(name) for name in ("name", "language") if name in form.fields}
    if description := form.text(*_DESCRIPTION):
        changes["description"] = description
    for name in ("sampling", "lexicon"):
        if (sent := form.fields.get(name)) is not None:
            changes[name] = parse_object(sent) if isinstance(sent, str) else sent
    added = _recordings(form, style=form.required("style")) if form.files else ()
    voice = await voices_of(service).get(voice_id)
    changed = await voices_of(service).change_voice(voice, changes, added=added, field="audio_sample")
    of_recording = [name for name in ("style", *_TEXT, "prepare") if name in form.fields and not added]
    return _answer(described(changed), form, _CHANGED, dict.fromkeys(of_recording, "requires an audio_sample"))


async def remove_voice(service: SpeechService, voice_id: str) -> Json:
    """Delete a voice and all data derived from it, on every replica."""
    voice = await voices_of(service).get(voice_id)
    await voices_of(service).remove(voice)
    deleted = {"id": voice.id, "object": "audio.voice.deleted", "deleted": True}
    return {**deleted, "success": True, "message": f"Voice {voice.name!r} deleted"}


async def export_voice(service: SpeechService, request: Request, voice_id: str) -> Response:
    """Return the voice as a file for `talkray voice import`."""
    voice = await voices_of(service).get(voice_id)
    headers = {"content-disposition": f'attachment; filename="{voice.id}{FILE_SUFFIX}"'}
    store, state = voices_of(service).files(), state_of(request)
    quota = state.exit_stack.enter_context(ByteQuota(state.caller.name))
    quota.hold(max(take.num_bytes for take in voice.takes))
    parts = packed(voice, partial(store.recording, voice))

    async def content() -> AsyncGenerator[bytes, None]:
        while part := await voices_of(service).aside(partial(next, parts, b"")):
            yield part

    return StreamingResponse(await prefetch_first(content()), media_type="application/zip", headers=headers)


async def add_consent(service: SpeechService, request: Request) -> Response:
    """Store a recording of a speaker's consent."""
    form = await read_form(request)
    name, language = form.required("name"), form.required("language")
    sent = _first(form, "recording")
    consent = await voices_of(service).add_consent(name, language, sent, field="recording")
    return _answer(_consent(consent), form, ("name", "language", "recording"))


async def list_consents(service: SpeechService, after: str = "", limit: str = "20") -> Response:
    """Return a page of consents, newest first."""
    consents = await voices_of(service).consents()
    return await json_in_thread(page_of, consents[::-1], _consent, after, limit)


async def show_consent(service: SpeechService, consent_id: str) -> Json:
    """Return the consent with this ID."""
    return _consent(await voices_of(service).get_other(StoredConsent, consent_id))


async def rename_consent(service: SpeechService, request: Request, consent_id: str) -> Response:
    """Change the `name` of a consent."""
    form = await read_form(request)
    consent = await voices_of(service).get_other(StoredConsent, consent_id)
    name = form.required("name")
    changed = await voices_of(service).change(consent, lambda present: present.changed(name=name))
    return _answer(_consent(changed), form, ("name",))


async def remove_consent(service: SpeechService, consent_id: str) -> Json:
    """Delete a consent. Fails with 409 if a voice refers to the consent."""
    consent = await voices_of(service).get_other(StoredConsent, consent_id)
    await voices_of(service).remove(consent)
    return {"id": consent.id, "object": "audio.voice_consent", "deleted": True}


def described(voice: StoredVoice) -> Json:
    """Return OpenAI's voice object, with all details that the voice's owner may see."""
    prompt = {"type": "prompt", "prompt": voice.description} if voice.provenance.startswith("design:") else {}
    return {
        "id": voice.id,
        "object": "audio.voice",
        "created_at": voice.created_at,
        "name": voice.name,
        "type": "audio_sample",
        "language": voice.language,
        "description": voice.description,
        "sampling": voice.sampling,
        "lexicon": voice.lexicon,
        "consent": voice.consent.recording or voice.consent.statement,
        "provenance": voice.provenance,
        "cloned_by": voice.takes[0].cloned_by,
        "takes": [take.as_json() for take in voice.takes],
        **prompt,
    }


def _omni(voice: StoredVoice) -> Json:
    take = voice.takes[0]
    fields = {"name": voice.name, "consent": voice.consent.statement or voice.consent.recording}
    file = {"created_at": voice.created_at, "mime_type": "audio/flac", "file_size": take.num_bytes}
    return {**fields, **file, "ref_text": take.text, "speaker_description": voice.description}


def _consent(consent: StoredConsent) -> Json:
    named = {"id": consent.id, "object": "audio.voice_consent", "name": consent.name}
    return {**named, "language": consent.language, "created_at": consent.created_at}


def _check_kind(form: SentForm) -> str:
    if (kind := form.text("type") or _KINDS[0]) not in _KINDS:
        raise InvalidRequest(f"type: {kind[:40]!r} is unknown. Use one of: {', '.join(_KINDS)}.", "type")
    if "speaker_embedding" in form.fields:
        reason = "a speaker vector works with one checkpoint only. Send the recording as audio_sample"
        raise InvalidRequest(f"speaker_embedding is not supported: {reason}.", "speaker_embedding")
    return kind


def _recordings(form: SentForm, *, style: str) -> Sequence[SentRecording]:
    audio, text = _first(form, "audio_sample").data, form.text(*_TEXT)
    return [SentRecording(audio, text, style=style, prepare=form.preparation())]


def _first(form: SentForm, field: str) -> SentRecording:
    files = form.files_of(field)
    if not files:
        reason = "Send the recording as a file of multipart/form-data"
        raise InvalidRequest(f"{field} is required. {reason}.", field, "missing_required_parameter")
    if len(files) > 1:
        raise InvalidRequest(f"{field} contains {len(files)} files. Send one recording.", field)
    return SentRecording(files[0].data)


def _answer(
    content: Mapping[str, object], form: SentForm, known: Sequence[str], reasons: Mapping[str, str] | None = None
) -> Response:
    ignored = ignored_fields.with_unknown([*form.fields, *(file.field for file in form.files)], known, reasons or {})
    return JSONResponse(dict(content), headers=ignored_fields.as_header(ignored))


_SAMPLE = {"type": "string", "format": "binary"}
_PREPARE = {"type": "string", "enum": PREPARATIONS}
_PROPERTIES = {name: {"type": "string"} for name in _CREATED} | {"audio_sample": _SAMPLE, "prepare": _PREPARE}
_SCHEMA = {"type": "object", "required": ["name"], "properties": _PROPERTIES}
_DOCS = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _SCHEMA}}}}
_VOICES, _CONSENTS = "/v1/audio/voices", "/v1/audio/voice_consents"
DIALECT = Dialect(
    "Stored voices",
    routes=(
        Route(f"POST {_VOICES}", add_voice, "Store a voice", docs=_DOCS),
        Route(f"GET {_VOICES}/{{voice_id}}", show_voice, "Show a stored voice"),
        Route(f"POST {_VOICES}/{{voice_id}}", change_voice, "Change a stored voice, or add a recording"),
        Route(f"DELETE {_VOICES}/{{voice_id}}", remove_voice, "Delete a stored voice"),
        Route(f"GET {_VOICES}/{{voice_id}}/file", export_voice, "Export a stored voice", charge=Charge.STREAM),
        Route(f"POST {_CONSENTS}", add_consent, "Store a consent recording"),
        Route(f"GET {_CONSENTS}", list_consents, "List consent recordings"),
        Route(f"GET {_CONSENTS}/{{consent_id}}", show_consent, "Show a consent recording", charge=Charge.STREAM),
        Route(f"POST {_CONSENTS}/{{consent_id}}", rename_consent, "Rename a consent recording"),
        Route(f"DELETE {_CONSENTS}/{{consent_id}}", remove_consent, "Delete a consent recording"),
    ),
)
