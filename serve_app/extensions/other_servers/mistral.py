"""Mistral's version of OpenAI's `POST /v1/audio/speech`, which uses `voice_id`."""

import base64
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.context import state_of
from serve_app.api.parsing import field_names
from serve_app.api.parsing.client_input import format_named, switch
from serve_app.api.request_record import Usage
from serve_app.api.resolve.speech_request import EVENT_STREAM, Delivery
from serve_app.api.responses.events import in_parts, named_event
from serve_app.api.responses.respond import respond
from serve_app.api.responses.speech_response import StreamedFormat, WholeFormat
from serve_app.api.responses.whole_audio import AUDIO_HERE, object_with
from serve_app.api.speech_service import SpeechService
from serve_app.audio.formats import AudioFormat
from serve_app.extension import Dialect, JsonRoute

_FORMATS = {name: AudioFormat(name) for name in ("mp3", "wav", "pcm", "flac", "opus")}
_NAMES: field_names.Names = {
    "input": "input",
    "voice_id": "voice",
    "model": "model",
    "ref_audio": "ref_audio",
    "response_format": None,
    "stream": None,
}


async def speak(service: SpeechService, request: Request, fields: Mapping[str, object]) -> Response:
    """Respond with audio in a JSON body, or in server-sent events if `stream` is true. Replace the names of Mistral's
    voices with the default voice.
    """
    audio_format = format_named("response_format", str(fields.get("response_format", "mp3")), _FORMATS)
    speech = await service.resolver.lenient_request(fields, _NAMES, delivery=Delivery(audio_format))
    usage = state_of(request).record.usage
    if switch(fields, "stream"):
        events = StreamedFormat(EVENT_STREAM, lambda audio, _: in_parts(audio, _delta, lambda: _done(usage)))
        return await respond(service, request, speech, events)
    whole = WholeFormat("application/json", lambda audio, _: object_with({"audio_data": AUDIO_HERE}, audio))
    return await respond(service, request, speech, whole)


def _delta(audio: bytes) -> bytes:
    return named_event({"type": "speech.audio.delta", "audio_data": base64.b64encode(audio).decode()})


def _done(usage: Usage) -> bytes:
    tokens = dict(zip(("prompt_tokens", "completion_tokens", "total_tokens"), usage.tokens.values(), strict=True))
    return named_event({"type": "speech.audio.done", "usage": tokens, "finish_reason": usage.finish_reason})


DIALECT = Dialect(
    "Mistral",
    routes=(
        JsonRoute("POST /v1/audio/speech", speak, json_field="voice_id"),
        JsonRoute("POST /openai/v1/audio/speech", speak, json_field="voice_id"),
    ),
)
