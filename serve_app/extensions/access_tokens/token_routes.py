"""Routes that issue access tokens for the APIs of Talkray, OpenAI, ElevenLabs, Deepgram and Cartesia."""

import json
import math
import secrets
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deployments.errors import InvalidRequest
from serve_app.api.context import state_of
from serve_app.api.error_replies import ErrorKind, ExtensionError
from serve_app.api.parsing.client_input import number, object_of, read_body, switch, text_of
from serve_app.api.resolve import ignored_fields
from serve_app.api.speech_service import SpeechService
from serve_app.extension import Dialect, Route
from serve_app.extensions.access_tokens.tokens import MOST_S, AccessTokens, Issued

Json = dict[str, object]

_LEAST_S = 60
_DEFAULT_S, _DEEPGRAM_S, _ELEVENLABS_S = 600, 60, 900
_OWN_PURPOSES = ("speech", "socket")
_LONGEST_SESSION = 4096  # characters of JSON, because browsers send the token in a header


class NoKeys(ExtensionError):
    """This server does not require API keys, so it cannot issue tokens."""

    kind = ErrorKind(403, "permission_error", "tokens_unavailable")


async def issue_own(service: SpeechService, request: Request) -> Response:
    """Issue a token for a browser or an app, with purpose `speech` (POST /v1/audio/speech) or `socket` (WebSockets).

    The token is valid for `expires_in` seconds, from 60 to 3600. If `single_use` is set, it works only once.
    """
    fields = await _fields(request)
    purpose = text_of(fields, "purpose")
    if purpose not in _OWN_PURPOSES:
        raise InvalidRequest(f"purpose: {purpose[:40]!r} is unknown. Use {' or '.join(_OWN_PURPOSES)}.", "purpose")
    once = switch(fields, "single_use")
    lifetime_s = _lifetime(fields, "expires_in", _DEFAULT_S)
    issued = _issue(service, request, purpose, lifetime_s, is_single_use=once)
    about = {"object": "access_token", "token": issued.value, "purpose": purpose, "single_use": once}
    ignored = ignored_fields.with_unknown(fields, ("purpose", "expires_in", "single_use"), {})
    return _answer({**about, "expires_at": issued.expires_at, "expires_in": lifetime_s}, ignored)


async def issue_openai(service: SpeechService, request: Request) -> Response:
    """Issue a client secret for OpenAI's Realtime WebSocket. The secret contains the settings of `session`."""
    fields = await _fields(request)
    expiry, session = _object(fields, "expires_after"), _object(fields, "session")
    if expiry.get("anchor", "created_at") != "created_at":
        raise InvalidRequest("expires_after.anchor must be created_at.", "expires_after.anchor")
    if session.get("type", "realtime") != "realtime":
        raise InvalidRequest("session.type must be realtime. This server does not transcribe.", "session.type")
    if len(json.dumps(session)) > _LONGEST_SESSION:
        message = f"session has more than {_LONGEST_SESSION} characters. Send the rest in session.update."
        raise InvalidRequest(message, "session", "string_above_max_length")
    lifetime_s = _lifetime(expiry, "seconds", _DEFAULT_S, within="expires_after.")
    issued = _issue(service, request, "realtime", lifetime_s, session=session)
    told = {**session, "id": f"sess_{secrets.token_hex(8)}", "object": "realtime.session", "type": "realtime"}
    ignored = ignored_fields.with_unknown(fields, ("expires_after", "session"), {})
    return _answer({"value": issued.value, "expires_at": issued.expires_at, "session": told}, ignored)


async def issue_elevenlabs(service: SpeechService, request: Request, token_type: str) -> Response:
    """Issue a token for one connection to an ElevenLabs WebSocket. The token is valid for 15 minutes."""
    if token_type != "tts_websocket":
        message = f"type: {token_type[:40]!r} is not supported. Use tts_websocket."
        raise InvalidRequest(message, "type")
    issued = _issue(service, request, token_type, _ELEVENLABS_S, is_single_use=True)
    return _answer({"token": issued.value}, {})


async def issue_deepgram(service: SpeechService, request: Request) -> Response:
    """Issue a token for Deepgram's text-to-speech API over HTTP and WebSockets."""
    fields = await _fields(request)
    lifetime_s = _lifetime(fields, "ttl_seconds", _DEEPGRAM_S)
    issued = _issue(service, request, "deepgram", lifetime_s)
    ignored = ignored_fields.with_unknown(fields, ("ttl_seconds",), {})
    return _answer({"access_token": issued.value, "expires_in": lifetime_s}, ignored)


async def issue_cartesia(service: SpeechService, request: Request) -> Response:
    """Issue a token for Cartesia's text-to-speech API over HTTP and WebSockets."""
    fields = await _fields(request)
    grants = _object(fields, "grants")
    if grants and not switch(grants, "tts"):
        raise InvalidRequest("grants.tts must be true. This server supports only text-to-speech.", "grants.tts")
    issued = _issue(service, request, "cartesia", _lifetime(fields, "expires_in", _DEFAULT_S))
    reasons = {f"grants.{name}": "only tts is supported" for name, value in grants.items() if name != "tts" and value}
    return _answer({"token": issued.value}, ignored_fields.with_unknown(fields, ("expires_in", "grants"), reasons))


def _issue(
    service: SpeechService,
    request: Request,
    purpose: str,
    lifetime_s: int,
    *,
    is_single_use: bool = False,
    session: Mapping[str, object] | None = None,
) -> Issued:
    tokens: AccessTokens | None = service.opened_by("access_tokens")
    key_id = state_of(request).caller.key_id
    if tokens is None or key_id is None:
        raise NoKeys(
            "This server does not require API keys, so clients do not need tokens. To issue tokens, start the server "
            "with a key file (`talkray key create`, docs/access-tokens.md)."
        )
    return tokens.issue(key_id, purpose, lifetime_s=lifetime_s, is_single_use=is_single_use, session=session or {})


def _answer(body: Json, ignored: dict[str, str]) -> Response:
    return JSONResponse(body, headers={"cache-control": "no-store", **ignored_fields.as_header(ignored)})


async def _fields(request: Request) -> dict[str, object]:
    """Return the JSON object in the body, or an empty one if there is no body. Raises InvalidRequest."""
    content = await read_body(request)
    return object_of(request, content) if content else {}


def _lifetime(fields: Mapping[str, object], name: str, default_s: int, *, within: str = "") -> int:
    """Return a lifetime as an integer, in seconds. Raises InvalidRequest if the value is out of range."""
    wanted = number(within + name, fields.get(name))
    if wanted is None:
        return default_s
    if not _LEAST_S <= wanted <= MOST_S:
        message = f"{within}{name}: {wanted:g} is out of range. Use {_LEAST_S} to {MOST_S} seconds."
        raise InvalidRequest(message, within + name)
    return math.floor(wanted)


def _object(fields: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = fields.get(name, {})
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{name} must be an object.", name)
    return value


def _body(required: tuple[str, ...] = (), **properties: Json) -> Json:
    schema = {"type": "object", "required": [*required], "properties": properties}
    return {"requestBody": {"required": bool(required), "content": {"application/json": {"schema": schema}}}}


_SECONDS: Json = {"type": "integer", "minimum": _LEAST_S, "maximum": MOST_S}
_SWITCH: Json = {"type": "boolean"}
_PURPOSE: Json = {"type": "string", "enum": [*_OWN_PURPOSES]}
_OBJECT: Json = {"type": "object"}
_OWN = _body(("purpose",), purpose=_PURPOSE, expires_in=_SECONDS, single_use=_SWITCH)
_OPENAI = _body(expires_after={"type": "object", "properties": {"seconds": _SECONDS}}, session=_OBJECT)
_CARTESIA = _body(expires_in=_SECONDS, grants=_OBJECT)
DIALECTS = (
    Dialect("Talkray", (Route("POST /v1/tokens", issue_own, "Issue an access token", _OWN),), heading="This server"),
    Dialect(
        "OpenAI Realtime",
        (
            Route("POST /v1/realtime/client_secrets", issue_openai, "Issue a client secret (OpenAI)", _OPENAI),
            Route("POST /openai/v1/realtime/client_secrets", issue_openai),  # the path that Azure's clients use
        ),
    ),
    Dialect(
        "ElevenLabs",
        (Route("POST /v1/single-use-token/{token_type}", issue_elevenlabs, "Issue a single-use token (ElevenLabs)"),),
    ),
    Dialect(
        "Deepgram",
        (Route("POST /v1/auth/grant", issue_deepgram, "Issue a token (Deepgram)", _body(ttl_seconds=_SECONDS)),),
    ),
    Dialect("Cartesia", (Route("POST /access-token", issue_cartesia, "Issue a token (Cartesia)", _CARTESIA),)),
)
