"""Parsing of HTTP bodies and JSON, and of the numbers, text and formats in them."""

import asyncio
import json
import re
import zlib
from collections.abc import AsyncGenerator, Mapping, Sequence

from pydantic_core import from_json
from starlette.requests import Request

from deployments.errors import InvalidRequest, PayloadTooLarge
from serve_app.api.context import state_of
from serve_app.api.error_replies import BodyTooSlow, UnsupportedMedia
from serve_app.audio.formats import AudioFormat
from serve_app.text.characters import repair_surrogates

MAX_BODY_BYTES = 16 << 20  # limit of an HTTP body, and of a WebSocket message with reference audio
BODY_TIMEOUT_S = 30.0  # time limit for receiving the complete body
_MOST_VALUES = 1 << 15  # per JSON text; checking this many blocks the event loop for 50 ms
_ABOVE_ALL_NUMBERS = 2**64  # a seed has 64 bits
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,20}(?:\.[0-9]{0,20})?|\.[0-9]{1,20})(?:[eE][+-]?[0-9]{1,2})?")
_SEARCHED = 1 << 20  # bytes to search for an overlong number
_MANY_DIGITS = re.compile(r"[0-9]{4000,}")
_HALF = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")
_ENCODINGS = ("identity", "gzip", "x-gzip", "deflate")
_STEP = 128 << 10  # bytes to decompress at a time
_TOO_LARGE = f"The body is larger than {MAX_BODY_BYTES} bytes."
_FORMS = ("application/x-www-form-urlencoded", "multipart/form-data")
_UNPLAIN = re.compile(r"[^A-Za-z0-9_.:-]")
HALF_REPLACED = "half a surrogate pair, replaced by U+FFFD"
_MOST_REPAIRED = 8  # maximum number of fields named in a header
_SWITCHES = {"true": True, "1": True, "false": False, "0": False}


async def read_body(request: Request) -> bytes:
    """Return the decompressed body. Stops reading as soon as the body exceeds the size or time limit, regardless of
    Content-Length.

    Raises PayloadTooLarge, BodyTooSlow, UnsupportedMedia, InvalidRequest.
    """
    body = bytearray()
    upload = state_of(request).upload
    try:
        async with upload.time_limit(BODY_TIMEOUT_S):
            async for part in _unpacked(request):
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise PayloadTooLarge(_TOO_LARGE)
                await upload.wait_for_slot(len(body))
    except TimeoutError:
        if upload.is_stalled:
            raise BodyTooSlow("The body stalled while other uploads were waiting. Send the request again.") from None
        raise BodyTooSlow(f"The body did not arrive within {BODY_TIMEOUT_S:g} seconds.") from None
    return bytes(body)


async def _unpacked(request: Request) -> AsyncGenerator[bytes, None]:
    """Yield parts of the body, at most _STEP bytes each if compressed. Raises UnsupportedMedia, InvalidRequest."""
    encoding = request.headers.get("content-encoding", "").strip().lower() or "identity"
    if encoding not in _ENCODINGS:
        reason = "is not supported. Send JSON without compression, or with gzip or deflate"
        raise UnsupportedMedia(f"Content-Encoding: {encoding[:40]!r} {reason}.")
    inflating, num_sent = None, 0
    try:
        async for part in request.stream():
            num_sent += len(part)
            if num_sent > MAX_BODY_BYTES:
                raise PayloadTooLarge(_TOO_LARGE)
            if encoding == "identity" or not part:
                yield part
                continue
            # Some clients send deflate data without the zlib header, whose first byte ends in 8.
            bits = 31 if encoding.endswith("gzip") else 15 if part[0] & 15 == 8 else -15
            inflating = inflating or zlib.decompressobj(bits)
            while piece := inflating.decompress(part, _STEP):
                part = inflating.unconsumed_tail
                yield piece
                await asyncio.sleep(0)  # let other requests run
    except zlib.error:
        inflating = zlib.decompressobj()
    if inflating is not None and (not inflating.eof or inflating.unused_data):
        raise InvalidRequest(f"Content-Encoding: the body is not valid {encoding}.", "Content-Encoding")


async def read_object(request: Request) -> dict[str, object]:
    """Read the body as a JSON object. Raises InvalidRequest, UnsupportedMedia."""
    return object_of(request, await read_body(request))


def object_of(request: Request, content: bytes, *, most_values: int = _MOST_VALUES) -> dict[str, object]:
    """Parse `content`, the body of `request`, as a JSON object. Raises InvalidRequest, UnsupportedMedia."""
    repaired: list[str] = []
    try:
        fields = parse_object(content, most_values=most_values, repaired=repaired)
    except InvalidRequest as error:
        check_form(request, error)
        raise
    names = [_UNPLAIN.sub("?", name[:40]) for name in repaired[:_MOST_REPAIRED]]
    state_of(request).repaired = "; ".join(f"{name} ({HALF_REPLACED})" for name in names)
    return fields


def check_form(request: Request, error: InvalidRequest) -> None:
    """Raise UnsupportedMedia if the body is a form and `error` reports invalid JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if error.code == "invalid_json" and kind in _FORMS:
        raise UnsupportedMedia(f"The body is a form ({kind}). Send JSON: Content-Type: application/json.") from None


def text_of(fields: Mapping[str, object], name: str = "text") -> str:
    """Return the text from a message or body. Raises InvalidRequest if the text is missing."""
    text = fields.get(name)
    if not isinstance(text, str):
        raise InvalidRequest(f"{name} is required and must be a string.", name, "missing_required_parameter")
    return text


def format_named(param: str, value: str, choices: Mapping[str, AudioFormat]) -> AudioFormat:
    """Return the audio format that a dialect calls `value`. Raises InvalidRequest listing the valid names."""
    if (known := value.strip().lower()) not in choices:
        raise InvalidRequest(f"{param}: {value[:40]!r} is unknown. Use one of: {', '.join(choices)}.", param)
    return choices[known]


def switch(fields: Mapping[str, object], name: str) -> bool:
    """Parse a boolean that may be sent as a string or as 0 or 1. Return False if the field is absent. Raises
    InvalidRequest.
    """
    value = fields.get(name) or False
    if (known := _SWITCHES.get(str(value).strip().lower())) is None:
        raise InvalidRequest(f"{name}: {str(value)[:40]!r} is not a boolean. Use true or false.", name)
    return known


def parse_object(
    raw: bytes | str,
    *,
    most_values: int = _MOST_VALUES,
    repaired: list[str] | None = None,
    cut_fields: Sequence[str] = (),
) -> dict[str, object]:
    """Parse a JSON object and remove its null fields. If a number is invalid, raises InvalidRequest naming the field.

    `raw` is a body in UTF-8 or UTF-16, with or without a byte order mark, or a message's text. Unpaired surrogates are
    repaired (see `_repaired_json`), and `repaired` receives the names of repaired fields. `cut_fields` are text fields
    that may continue in the next message; nested names are dotted.
    """
    commas = raw.count(b",") if isinstance(raw, bytes) else raw.count(",")
    if commas >= most_values:
        raise InvalidRequest(f"The JSON has more than {most_values} values.", None, "invalid_json")
    try:
        if isinstance(raw, bytes) and (encoding := json.detect_encoding(raw)) != "utf-8":
            raw = raw.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass")
        value = from_json(raw if isinstance(raw, bytes) else raw.removeprefix("\ufeff"))
    except ValueError as error:
        value = _repaired_json(raw, repaired if repaired is not None else [], cut_fields)
        if value is None:
            _check_digits(raw)
            raise InvalidRequest(f"The JSON is invalid: {error}.", None, "invalid_json") from error
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.", None, "invalid_json")
    _check_numbers(value)
    return {key: item for key, item in value.items() if item is not None}


def number(param: str, value: object) -> int | float | None:
    """Parse a number from JSON or from query text. Return None for None and "". Raises InvalidRequest."""
    if value is None or value == "":
        return None
    parsed = plain_number(value) if isinstance(value, str) else value
    if isinstance(parsed, bool) or not isinstance(parsed, int | float) or not _fits_a_field(parsed):
        raise _no_number(param, value)
    return parsed


def plain_number(value: str) -> int | float | str:
    """Parse `value` as a number. Return the text itself if it is not unambiguously a number."""
    if not _NUMBER.fullmatch(text := value.strip()):
        return value
    return int(text) if text.isdigit() else float(text)


def _fits_a_field(value: float) -> bool:
    """Return False for NaN, infinity and integers of more than 64 bits, which no field accepts."""
    return -_ABOVE_ALL_NUMBERS < value < _ABOVE_ALL_NUMBERS


def _no_number(param: str, value: object, *, within: str = "") -> InvalidRequest:
    shown = value if isinstance(value, str) else repr(value) if isinstance(value, float) else type(value).__name__
    path = param if within in ("", param) else f"{within[:80]}.{param}"
    return InvalidRequest(f"{path}: {shown[:40]!r} is not a finite 64-bit number.", param)


def _check_numbers(fields: Mapping[str, object]) -> None:
    """Raise InvalidRequest if any nested number is NaN, infinite or above 64 bits. The message names the field."""
    waiting: list[tuple[str, str, object]] = [(name, name, value) for name, value in fields.items()]
    while waiting:
        top, name, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [(top, key, item) for key, item in value.items()]
        elif isinstance(value, list):
            waiting += [(top, name, item) for item in value]
        elif isinstance(value, int | float) and not _fits_a_field(value):
            raise _no_number(name[:80], value, within=top)


def _check_digits(raw: bytes | str) -> None:
    """Raise InvalidRequest if parsing failed because a number has too many digits. The message names the field."""
    text = raw[:_SEARCHED].decode("utf-8", "replace") if isinstance(raw, bytes) else raw
    if _MANY_DIGITS.search(text):
        try:
            value = from_json(_MANY_DIGITS.sub("1e999", text))
        except ValueError:
            return
        if isinstance(value, dict):
            _check_numbers(value)


def _repaired_json(raw: bytes | str, repaired: list[str], cut_fields: Sequence[str]) -> object:
    """Parse JSON that contains unpaired surrogates. Return None if the text is invalid for another reason.

    JavaScript produces an unpaired surrogate when it cuts a string inside a surrogate pair. Fields of `cut_fields` keep
    surrogates at their start and end, because the other half is in the adjacent message. All other unpaired surrogates
    become U+FFFD.
    """
    try:
        text = raw.decode("utf-8", "surrogatepass") if isinstance(raw, bytes) else raw
        value = json.loads(text) if _HALF.search(text) else None
        if not isinstance(value, dict):
            return None
        whole = {repair_surrogates(name): _repaired(item, _inside(cut_fields, name)) for name, item in value.items()}
    except (ValueError, RecursionError):
        return None
    repaired += [name for name, item in value.items() if name not in whole or whole[name] != item]
    return whole


def _repaired(value: object, cut_fields: Sequence[str] = ()) -> object:
    """Repair `value`. `cut_fields` are paths within `value`; "" means `value` itself."""
    match value:
        case str():
            return _repaired_inside(value) if "" in cut_fields else repair_surrogates(value)
        case list():
            return [_repaired(item) for item in value]
        case dict():
            return {repair_surrogates(name): _repaired(item, _inside(cut_fields, name)) for name, item in value.items()}
    return value


def _inside(cut_fields: Sequence[str], name: str) -> list[str]:
    """Return the paths that begin with the field `name`, with that prefix removed."""
    return [rest for first, _, rest in (path.partition(".") for path in cut_fields) if first == name]


def _repaired_inside(text: str) -> str:
    """Repair `text`, but keep a low surrogate at its start and a high surrogate at its end."""
    start = int("\udc00" <= text[:1] <= "\udfff")
    end = max(start, len(text) - ("\ud800" <= text[-1:] <= "\udbff"))
    return text[:start] + repair_surrogates(text[start:end]) + text[end:]
