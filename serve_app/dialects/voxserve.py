"""VoxServe: `POST /generate`, a form whose text is answered with WAV as it comes."""

import base64
from collections.abc import AsyncGenerator, Mapping
from urllib.parse import parse_qsl

from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import Response

from deployments.errors import InvalidRequest
from serve_app.api import ignored
from serve_app.api.context import state_of
from serve_app.api.request import MAX_BODY_BYTES, parse_object
from serve_app.api.speech_service import SpeechService, read_body, text_of
from serve_app.api.wish import Delivery, Wish
from serve_app.audio.formats import AudioFormat
from serve_app.dialects.table import Dialect, Route, Sample

_NAMES: ignored.Names = {
    "text": "input",
    "speaker": "voice",
    "language": "language",
    "instruct": "instructions",
    "audio": "ref_audio",
    "ref_text": "ref_text",
    "x_vector_only_mode": "x_vector_only_mode",
    "streaming": None,
}
_MOST_FIELDS = 32


async def generate(service: SpeechService, request: Request) -> Response:
    """Speaks `text` of a form, or of JSON; `audio` is a recording to clone."""
    content = await read_body(request)
    service.admission.check_room(state_of(request).caller.name)
    return await service.respond(request, await wished(service, await _form_fields(content, request.headers)))


async def wished(service: SpeechService, fields: Mapping[str, object]) -> Wish:
    """`fields` as VoxServe calls them. Raises InvalidRequest."""
    return await service.wish(
        fields,
        _NAMES,
        delivery=Delivery(AudioFormat.WAV, whole=_switch(fields.get("streaming")) is False),
        made={"input": text_of(fields), "x_vector_only_mode": _switch(fields.get("x_vector_only_mode"))},
    )


async def _form_fields(content: bytes, headers: Headers) -> dict[str, object]:
    """Of a body in any of the three forms that clients send, or of none; a file becomes base64. Raises
    InvalidRequest.
    """
    if not content:
        return {}
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/x-www-form-urlencoded":
        try:
            return dict(parse_qsl(content.decode("utf-8", "replace"), max_num_fields=_MOST_FIELDS))
        except ValueError as error:
            raise InvalidRequest(f"Not a valid form: {error}.", None, "invalid_form") from error
    if kind != "multipart/form-data":
        return parse_object(content)
    return await _form(content, headers)


async def _form(content: bytes, headers: Headers) -> dict[str, object]:
    async def parts() -> AsyncGenerator[bytes, None]:
        yield content

    parser = MultiPartParser(headers, parts(), max_files=1, max_fields=_MOST_FIELDS, max_part_size=MAX_BODY_BYTES)
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError) as error:
        raise InvalidRequest(f"Not a valid form: {error}.", None, "invalid_form") from error
    try:
        return {name: await _value(value) for name, value in form.items()}
    finally:
        await form.close()


async def _value(value: UploadFile | str) -> str:
    return value if isinstance(value, str) else base64.b64encode(await value.read()).decode()


def _switch(value: object) -> object:
    """A boolean, which forms have as text. Another value stays, and is refused where it matters."""
    if not isinstance(value, str):
        return value
    return {"true": True, "1": True, "false": False, "0": False}.get(value.lower(), value)


DIALECT = Dialect(
    "VoxServe",
    routes=(Route("POST /generate", generate, "Speak a text (VoxServe)"),),
    sample=Sample(
        "/generate", body={"text": "$text", "speaker": "$voice"}, clients=("VoxServe:         $url/generate",)
    ),
)
