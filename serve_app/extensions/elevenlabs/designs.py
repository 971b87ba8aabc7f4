"""ElevenLabs' voices from descriptions: previews to hear, and a voice that is made of one of them."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from serve_app.api import catalogue
from serve_app.api.parsing import field_names
from serve_app.api.parsing.client_input import switch, text_of
from serve_app.api.parsing.forms import read_form
from serve_app.api.resolve import ignored_fields
from serve_app.api.resolve.speech_request import Delivery
from serve_app.api.speech_service import SpeechService
from serve_app.extension import Charge, Dialect, Route
from serve_app.extensions.designs.design_routes import candidates, speech_request
from serve_app.extensions.designs.designs import find, lock
from serve_app.extensions.elevenlabs.elevenlabs import DEFAULT_FORMAT, encoded, output, voice_entry
from serve_app.extensions.voices.opening import voices_of
from serve_app.extensions.voices.stored_voice import Details

_NAMES: field_names.Names = {
    "voice_description": "instructions",
    "text": "input",
    "model_id": "model",
    "seed": "seed",
    "output_format": None,
    "auto_generate_text": None,
    "stream_previews": None,
}
_CREATED = ("voice_name", "voice_description", "generated_voice_id", "labels", "consent")


async def preview_voices(service: SpeechService, request: Request) -> Response:
    """Three voices of one `voice_description`, that speak `text` or a text of ours."""
    fields = await service.read_fields(request)
    text_of(fields, "voice_description")
    if switch(fields, "auto_generate_text"):
        fields.pop("text", None)
    streams = switch(fields, "stream_previews")
    audio_format, sample_rate, bit_rate = output(request.query_params.get("output_format", DEFAULT_FORMAT))
    delivery = Delivery(audio_format, whole=True, sample_rate=sample_rate, bit_rate=bit_rate)
    speech = await speech_request(service, {**request.query_params, **fields}, _NAMES, delivery=delivery)
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
    """A preview's audio, as FLAC."""
    design = await find(voices_of(service), generated_voice_id, field="generated_voice_id")
    return Response(await voices_of(service).recording(design, design.take), media_type="audio/flac")


async def create_voice(service: SpeechService, request: Request) -> Response:
    """Stores a preview as a voice."""
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
    reasons = {"played_not_selected_voice_ids": "nothing learns from it"}
    unheard = {name: reason for name, reason in reasons.items() if form.fields.get(name)}
    headers = ignored_fields.as_header(ignored_fields.with_unknown(form.fields, (*_CREATED, *reasons), unheard))
    return JSONResponse(voice_entry(catalogue.stored_voice(voice)), headers=headers)


_PATH = "/v1/text-to-voice"
_HEARD = f"{_PATH}/{{generated_voice_id}}/stream"
DIALECT = Dialect(
    "ElevenLabs",
    routes=(
        Route(f"POST {_PATH}/design", preview_voices, "Design a voice (ElevenLabs)"),
        Route(f"POST {_PATH}/create-previews", preview_voices, "Design a voice (ElevenLabs, before)"),
        Route(f"GET {_HEARD}", hear_preview, "Hear a designed voice (ElevenLabs)", charge=Charge.STREAM),
        Route(f"POST {_PATH}", create_voice, "Store a designed voice (ElevenLabs)"),
        Route(f"POST {_PATH}/create-voice-from-preview", create_voice, "Store a designed voice (ElevenLabs, before)"),
    ),
)
