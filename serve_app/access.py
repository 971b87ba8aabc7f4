"""The door: who may come in, from where, and with how much. Decided from the request's head alone."""

from collections.abc import Iterator
from contextlib import ExitStack
from urllib.parse import parse_qsl, urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.errors import TalkrayError
from serve_app.api_settings import ApiSettings
from serve_app.auth import KEY_PREFIX, Caller, Keys
from serve_app.errors import translate
from serve_app.refusals import Forbidden, HeadersTooLarge

# Probes have no key, and Open WebUI asks for these two lists without one.
EXEMPT = frozenset({"/health", "/ready", "/v1/audio/voices", "/v1/audio/models"})

_SCHEMES = ("bearer", "token")
_KEY_HEADERS = ("xi-api-key", "x-api-key")
# A browser cannot set the headers of a WebSocket: there, a key may stand in the query or among the subprotocols.
_KEY_PARAMETERS = ("api_key", "token")
_KEY_PROTOCOL = "openai-insecure-api-key."
_POLICY_VIOLATION = 1008


class Access:
    """ASGI middleware. `scope["state"]["caller"]` is the `Caller` behind a request that is let in.

    A request that may cost speech counts as a stream of its caller while it lasts, a WebSocket while it is open.
    """

    def __init__(self, app: ASGIApp, *, settings: ApiSettings) -> None:
        self._app = app
        self._max_header_bytes = settings.max_header_bytes
        self._access = settings.access
        self._keys = Keys(settings.access.keys_file) if settings.access.keys_file else None
        self._anyone = Caller()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the call on, or answers it with a refusal."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        with ExitStack() as streams:
            try:
                caller = self._admit(scope)
                if _may_speak(scope):
                    streams.enter_context(caller.stream())
            except TalkrayError as error:
                await _refuse(error, scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = caller
            await self._app(scope, receive, _naming_a_protocol(scope, send))

    def _admit(self, scope: Scope) -> Caller:
        _check_size(scope, self._max_header_bytes)
        headers = Headers(scope=scope)
        self._check_host(headers.get("host"))
        self._check_origin(headers.get("origin"), headers.get("host"))
        if self._keys is None or scope["path"] in EXEMPT:
            return self._anyone
        caller = self._keys.caller(next(offered_keys(scope), None))
        if scope["type"] == "http":  # a WebSocket counts what is asked over it
            caller.request()
        return caller

    def _check_host(self, host: str | None) -> None:
        allowed = self._access.allowed_hosts
        if allowed is not None and host is not None and _host_name(host) not in allowed:
            raise Forbidden("This host name is not allowed; access.allowed_hosts lists those that are.")

    def _check_origin(self, origin: str | None, host: str | None) -> None:
        """Browsers name the page behind a request, also of those that they send whatever CORS says."""
        allowed = self._access.allowed_origins
        if origin is None or origin in allowed or "*" in allowed:
            return
        if origin.partition("://")[2] != host:
            raise Forbidden("This web page is not allowed; access.allowed_origins lists those that are.")


def offered_keys(scope: Scope) -> Iterator[str]:
    """What the request offers as its key, wherever one of the APIs puts it; the first one counts."""
    headers = Headers(scope=scope)
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    if scheme.lower() in _SCHEMES:
        yield credentials.strip()
    yield from (headers[name] for name in _KEY_HEADERS if name in headers)
    if scope["type"] == "websocket":
        query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        yield from (query[name] for name in _KEY_PARAMETERS if name in query)
        yield from (protocol.removeprefix(_KEY_PROTOCOL) for protocol in scope["subprotocols"] if _is_key(protocol))


def _is_key(protocol: str) -> bool:
    return protocol.startswith((_KEY_PROTOCOL, KEY_PREFIX))


def _may_speak(scope: Scope) -> bool:
    return bool(scope["type"] == "websocket" or scope["method"] == "POST")


def _check_size(scope: Scope, max_bytes: int) -> None:
    if sum(len(name) + len(value) for name, value in scope["headers"]) > max_bytes:
        raise HeadersTooLarge(f"The headers are larger than {max_bytes} bytes.")


def _host_name(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def _naming_a_protocol(scope: Scope, send: Send) -> Send:
    """Browsers drop a WebSocket that offered subprotocols and was accepted without one: name one that is no key."""
    offered = scope["subprotocols"] if scope["type"] == "websocket" else []
    named = next((protocol for protocol in offered if not _is_key(protocol)), None)
    if named is None or not any(map(_is_key, offered)):
        return send

    async def send_named(message: Message) -> None:
        if message["type"] == "websocket.accept" and message.get("subprotocol") is None:
            message = {**message, "subprotocol": named}
        await send(message)

    return send_named


async def _refuse(error: TalkrayError, scope: Scope, receive: Receive, send: Send) -> None:
    reply = translate(error)
    if scope["type"] == "http" or "websocket.http.response" in scope.get("extensions", {}):
        await reply.response()(scope, receive, send)
    else:
        await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": reply.code})
