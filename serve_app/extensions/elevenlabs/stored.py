"""ElevenLabs' API for stored voices, and for designing voices with previews."""

from pathlib import PurePath

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deployments.errors import InvalidRequest
from serve_app.api import catalogue
from serve_app.api.parsing import field_names
from serve_app.api.parsing.client_input import parse_object, switch, text_of
from serve_app.api.parsing.forms import SentForm, read_form
from serve_app.api.resolve import ignored_fields
from serve_app.api.resolve.speech_request import Delivery
from serve_app.api.responses.listing import Paging, json_in_thread
from serve_app.api.speech_service import SpeechService
from serve_app.extension import Charge, Dialect, Route
from serve_app.extensions.designs.designs import candidates, find, lock, speech_request
from serve_app.extensions.elevenlabs.elevenlabs import DEFAULT_FORMAT, encoded, output
from serve_app.extensions.voices.library import voices_of
from serve_app.extensions.voices.listing import find_voice
from serve_app.extensions.voices.stored_voice import NEUTRAL, Details, SentRecording

Json = dict[str, object]

_FORM_FIELDS = ("name", "description", "labels", "files", "consent", "ref_text", "reference_text", "prepare")
_DESIGN_NAMES: field_names.Names = {
    "voice_description": "instructions",
    "text": "input",
    "model_id": "model",
    "seed": "seed",
    "output_format": None,
    "auto_generate_text": None,
    "stream_previews": None,
}
_DESIGNED = ("voice_name", "voice_description", "generated_voice_id", "labels", "consent")


async def list_voices(service: SpeechService, page_size: str = "", next_page_token: str = "") -> Response:
    """Return all voices, or one page of them if the client sends a `page_size`."""
    voices = await catalogue.all_voices(await service.models.infos(), voices_of(service))
    paging = Paging(page_size, next_page_token, names=("page_size", "next_page_token"))
    page, more = catalogue.page_of_voices(voices, paging, service.resolver.voices)
    about = {"has_more": more is not None, "total_count": len(voices), "next_page_token": more}
    return await json_in_thread(lambda: {"voices": list(map(voice_entry, page)), **about})


async def show_voice(service: SpeechService, voice_id: str) -> Json:
    """Return one voice. Raises InvalidRequest with the valid names if the voice is unknown."""
    return voice_entry(await find_voice(voice_id, service.models, voices_of(service)))


async def add_voice(service: SpeechService, request: Request) -> Response:
    """Store a voice. The first of `files` is the default recording. The others are takes, named after their files."""
    form = await read_form(request)
    details = Details(
        form.required("name"),
        language=_language(form),
        description=form.text("description") or "",
        consent=form.text("consent"),
        provenance="elevenlabs",
    )
    voice = await voices_of(service).add(details, _takes(form, is_new=True), field="files")
    takes = {"takes": [take.as_json() for take in voice.takes]}
    return _stored({"voice_id": voice.id, "requires_verification": False, **takes}, form)


async def edit_voice(service: SpeechService, request: Request, voice_id: str) -> Response:
    """Change `name`, `description` and the language in `labels`, and add `files` as further takes."""
    form = await read_form(request)
    changes: Json = {name: form.text(name) for name in ("name", "description") if form.text(name)}
    if (language := _language(form)) is not None:
        changes["language"] = language
    voice = await voices_of(service).get(voice_id)
    added = _takes(form, is_new=False)
    changed = await voices_of(service).change_voice(voice, changes, added=added, field="files")
    takes = {"takes": [take.as_json() for take in changed.takes[-len(added) :]]} if added else {}
    return _stored({"status": "ok", **takes}, form)


async def remove_voice(service: SpeechService, voice_id: str) -> Json:
    """Delete a stored voice."""
    await voices_of(service).remove(await voices_of(service).get(voice_id))
    return {"status": "ok"}


def _takes(form: SentForm, *, is_new: bool) -> list[SentRecording]:
    files = form.files_of("files")
    if is_new and not files:
        raise InvalidRequest("files is required. Send recordings.", "files", "missing_required_parameter")
    text = form.text("ref_text", "reference_text")
    prepare = form.preparation()
    main = [SentRecording(file.data, text, style=NEUTRAL, prepare=prepare) for file in files[: int(is_new)]]
    return main + [
        SentRecording(file.data, None, style=PurePath(file.name).stem, prepare=prepare) for file in files[len(main) :]
    ]


def _language(form: SentForm) -> str | None:
    """Return the language in `labels`, which is a JSON string in forms."""
    labels = parse_object(form.text("labels") or "{}") if form.text("labels") != "null" else {}
    language = labels.get("language")
    return language if isinstance(language, str) else None


def _stored(answer: Json, form: SentForm) -> Response:
    sent = [*form.fields, *(file.field.removesuffix("[]") for file in form.files)]
    reasons = {"remove_background_noise": "noise is not removed"}
    unheard = {name: reason for name, reason in reasons.items() if form.fields.get(name) == "true"}
    without_effect = ignored_fields.with_unknown(sent, (*_FORM_FIELDS, *reasons), unheard)
    return JSONResponse(answer, headers=ignored_fields.as_header(without_effect))


async def show_user(_: SpeechService) -> Json:
    """Return a placeholder, because this server does not have accounts."""
    return {"user_id": "talkray", "is_new_user": False, "xi_api_key": "", "subscription": _SUBSCRIPTION}


async def show_subscription(_: SpeechService) -> Json:
    """Return a placeholder, because this server does not have subscriptions."""
    return _SUBSCRIPTION


_SUBSCRIPTION: Json = {
    "tier": "self-hosted",
    "status": "active",
    "character_count": 0,
    "character_limit": 2**31 - 1,
    "can_extend_character_limit": False,
}


def voice_entry(voice: catalogue.Voice) -> Json:
    """Return a voice in ElevenLabs' format."""
    labels = {"language": voice.language, "gender": voice.gender}
    described = {"description": voice.description, "labels": labels}
    category = "cloned" if voice.type == "stored" else "premade"
    return {"voice_id": voice.id, "name": voice.name, "category": category, **described}


async def preview_voices(service: SpeechService, request: Request) -> Response:
    """Speak `text` or a default text in three candidate voices that match a `voice_description`."""
    fields = await service.read_fields(request)
    text_of(fields, "voice_description")
    if switch(fields, "auto_generate_text"):
        fields.pop("text", None)
    streams = switch(fields, "stream_previews")
    audio_format, sample_rate, bit_rate = output(request.query_params.get("output_format", DEFAULT_FORMAT))
    delivery = Delivery(audio_format, whole=True, sample_rate=sample_rate, bit_rate=bit_rate)
    speech = await speech_request(service, {**request.query_params, **fields}, _DESIGN_NAMES, delivery=delivery)
    designed = await candidates(service, request, speech)
    previews = [
        {
            "audio_base_64": "" if streams else encoded(audio),
            "generated_voice_id": design.id,
            "media_type": delivery.content_type(sample_rate),
            "duration_secs": design.take.seconds,
            "language": design.language,
        }
        for design, audio in designed.made
    ]
    return JSONResponse({"previews": previews, "text": designed.text}, headers=ignored_fields.as_header(speech.ignored))


async def hear_preview(service: SpeechService, generated_voice_id: str) -> Response:
    """Return the audio of a preview, as FLAC."""
    design = await find(voices_of(service), generated_voice_id, field="generated_voice_id")
    return Response(await voices_of(service).recording(design, design.take), media_type="audio/flac")


async def create_voice(service: SpeechService, request: Request) -> Response:
    """Store a preview as a voice."""
    form = await read_form(request)
    labels = form.fields.get("labels")
    language = labels.get("language") if isinstance(labels, dict) else None
    details = Details(
        form.required("voice_name"),
        language=language if isinstance(language, str) else None,
        description=form.text("voice_description") or "",
        consent=form.text("consent"),
    )
    voice = await lock(voices_of(service), form.required("generated_voice_id"), details, field="generated_voice_id")
    reasons = {"played_not_selected_voice_ids": "the server does not use feedback"}
    unheard = {name: reason for name, reason in reasons.items() if form.fields.get(name)}
    headers = ignored_fields.as_header(ignored_fields.with_unknown(form.fields, (*_DESIGNED, *reasons), unheard))
    return JSONResponse(voice_entry(catalogue.stored_voice(voice)), headers=headers)


_PATH = "/v1/text-to-voice"
_HEARD = f"{_PATH}/{{generated_voice_id}}/stream"
DIALECT = Dialect(
    "ElevenLabs",
    routes=(
        Route("GET /v1/voices", list_voices, "List voices (ElevenLabs v1)", charge=Charge.NOTHING),
        Route("GET /v2/voices", list_voices, "List voices (ElevenLabs v2)", charge=Charge.NOTHING),
        Route("GET /v1/voices/{voice_id}", show_voice, "Show a voice (ElevenLabs)"),
        Route("POST /v1/voices/add", add_voice, "Store a voice (ElevenLabs)"),
        Route("POST /v1/voices/{voice_id}/edit", edit_voice, "Change a stored voice (ElevenLabs)"),
        Route("DELETE /v1/voices/{voice_id}", remove_voice, "Delete a stored voice (ElevenLabs)"),
        Route("GET /v1/user", show_user, "Show the account"),
        Route("GET /v1/user/subscription", show_subscription, "Show the subscription"),
        Route(f"POST {_PATH}/design", preview_voices, "Design a voice (ElevenLabs)"),
        Route(f"POST {_PATH}/create-previews", preview_voices, "Design a voice (ElevenLabs, previous version)"),
        Route(f"GET {_HEARD}", hear_preview, "Hear a designed voice (ElevenLabs)", charge=Charge.STREAM),
        Route(f"POST {_PATH}", create_voice, "Store a designed voice (ElevenLabs)"),
        Route(f"POST {_PATH}/create-voice-from-preview", create_voice, "Store a designed voice (ElevenLabs, old)"),
    ),
)
