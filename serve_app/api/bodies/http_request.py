"""From a client's HTTP request to what dialects work with: its body, JSON, a text, a format."""

from collections.abc import Mapping

from starlette.requests import Request

from deployments.errors import InvalidRequest, PayloadTooLarge
from serve_app.api.bodies.client_json import MAX_BODY_BYTES, parse_object
from serve_app.api.context import state_of
from serve_app.api.error_replies import BodyTooSlow
from serve_app.client_audio.formats import AudioFormat

_LONGEST_KEY = 255  # of an Idempotency-Key
BODY_TIMEOUT_S = 30.0  # for a whole body to arrive


def idempotency_key(request: Request) -> str | None:
    """Raises InvalidRequest."""
    key = request.headers.get("idempotency-key")
    if key is not None and not 0 < len(key) <= _LONGEST_KEY:
        raise InvalidRequest(f"Idempotency-Key has 1 to {_LONGEST_KEY} characters.", "Idempotency-Key")
    return key


async def read_body(request: Request) -> bytes:
    """The body, given up as soon as it is too large or too slow, whatever its Content-Length says."""
    body = bytearray()
    upload = state_of(request).upload
    try:
        async with upload.arriving(BODY_TIMEOUT_S):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise PayloadTooLarge(f"The body is larger than {MAX_BODY_BYTES} bytes.")
                await upload.grow(len(body))
    except TimeoutError:
        if upload.is_stalled:
            raise BodyTooSlow("The body stalled while others waited to send theirs: send it again.") from None
        raise BodyTooSlow(f"The body did not arrive within {BODY_TIMEOUT_S:g} seconds.") from None
    return bytes(body)


async def read_object(request: Request) -> dict[str, object]:
    """The JSON object that is the body. Raises InvalidRequest."""
    return parse_object(await read_body(request))


def text_of(fields: Mapping[str, object], name: str = "text") -> str:
    """The text of a message or a body. Raises InvalidRequest."""
    text = fields.get(name)
    if not isinstance(text, str):
        raise InvalidRequest(f"{name} is required, as a string.", name, "missing_required_parameter")
    return text


def format_named(param: str, value: str, choices: Mapping[str, AudioFormat]) -> AudioFormat:
    """The format that a dialect names `value`. Raises InvalidRequest with the valid names."""
    if value not in choices:
        raise InvalidRequest(f"{param}: {value[:40]!r} is none of {', '.join(choices)}.", param)
    return choices[value]
