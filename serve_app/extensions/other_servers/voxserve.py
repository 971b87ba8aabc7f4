"""VoxServe's `POST /generate`, which speaks the text of a form as streamed WAV."""

import base64
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.parsing import field_names
from serve_app.api.parsing.client_input import switch, text_of
from serve_app.api.parsing.forms import parse_form
from serve_app.api.resolve.speech_request import Delivery, SpeechRequest
from serve_app.api.responses.respond import respond
from serve_app.api.speech_service import SpeechService
from serve_app.audio.formats import AudioFormat
from serve_app.extension import Dialect, Route, Sample

_NAMES: field_names.Names = {
    "text": "input",
    "speaker": "voice",
    "language": "language",
    "instruct": "instructions",
    "audio": "ref_audio",
    "ref_text": "ref_text",
    "x_vector_only_mode": "x_vector_only_mode",
    "streaming": None,
}


async def generate(service: SpeechService, request: Request) -> Response:
    """Speak the `text` of a form or a JSON body. `audio` is an optional recording to clone."""
    form = await parse_form(request, await service.read_body(request))
    files = {file.field: base64.b64encode(file.data).decode() for file in form.files}
    return await respond(service, request, await speech_request(service, form.fields | files))


async def speech_request(service: SpeechService, fields: Mapping[str, object]) -> SpeechRequest:
    """Create a request from `fields` with VoxServe's names. Raises InvalidRequest."""
    is_whole = "streaming" in fields and not switch(fields, "streaming")
    return await service.resolver.lenient_request(
        fields,
        _NAMES,
        delivery=Delivery(AudioFormat.WAV, whole=is_whole),
        overrides={"input": text_of(fields), "x_vector_only_mode": switch(fields, "x_vector_only_mode") or None},
    )


DIALECT = Dialect(
    "VoxServe",
    routes=(Route("POST /generate", generate, "Speak a text (VoxServe)"),),
    sample=Sample(
        "/generate", body={"text": "$text", "speaker": "$voice"}, clients=("VoxServe:         $url/generate",)
    ),
)
