"""Checks of the API key, client address, host, origin and rate. They read a request's headers but never its body."""

import ipaddress
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from urllib.parse import parse_qsl, urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.errors import Overloaded, TalkrayError
from deployments.serving import metrics
from serve_app.api.access.callers import EVERYBODY, STRANGER, VISITOR, Caller, Granted, Meter, Meters, Visitor
from serve_app.api.access.keys import KEY_PREFIX, KeyRecord, Keys
from serve_app.api.context import state_of
from serve_app.api.docs_page import DOCS_PATHS
from serve_app.api.error_replies import (
    POLICY_VIOLATION,
    TRY_AGAIN_LATER,
    Forbidden,
    HeadersTooLarge,
    close_reason,
    translate,
)
from serve_app.api.headers import FORWARDED_FOR_HEADER
from serve_app.api.parsing.uploads import Upload, Uploads
from serve_app.config import ApiSettings
from serve_app.extension import Dialect

# Paths that need no API key: probes send none, Open WebUI requests the two lists without a key, and a browser cannot
# send a key when it loads a page.
EXEMPT = DOCS_PATHS | frozenset({"/health", "/ready", "/v1/audio/voices", "/v1/audio/models"})

_READING = ("GET", "HEAD")
_CHANGING = ("POST", "PUT", "PATCH", "DELETE")

MAX_HEADER_BYTES = 16 << 10  # all header lines together; HAProxy rejects more than about 15,000 bytes

_SCHEMES = ("bearer", "token")

_CLIENT_BITS = 64  # prefix length of the network that counts as one IPv6 client


class AccessControl:
    """ASGI middleware inside RequestContext that sets `caller` and `upload` in each request's state.

    A request that changes data or may start synthesis counts as one request, and as one stream until its response ends.
    Other requests are charged according to `Route.charge`. A WebSocket counts as a stream while it is open, and its
    handler counts each utterance as a request.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: ApiSettings,
        dialects: Sequence[Dialect],
        grants: Sequence[Callable[[str, Scope], Granted | None]],
    ) -> None:
        """Accept keys where the `dialects` have them, in addition to `Authorization`. A WebSocket may also offer its
        key as a subprotocol, alone or after a known prefix. GET requests to EXEMPT and public paths need no key.
        `grants`: see `ExtensionState.grant`.
        """
        self._grants = grants
        self._public = EXEMPT.union(path for dialect in dialects for path in dialect.public_paths)
        self._app = app
        self._key_headers = [name for dialect in dialects for name in dialect.key_headers]
        self._key_parameters = [name for dialect in dialects for name in dialect.key_parameters]
        self._key_protocols = tuple(prefix for dialect in dialects for prefix in dialect.key_protocols)
        self._access, self._admission = settings.access, settings.admission
        self._keys = Keys(settings.access.keys_file) if settings.access.keys_file else None
        self._of_keys = Meters("key", "This API key")
        self._of_addresses = Meters("client", "This client")
        self._uploads = Uploads()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward an admitted request to the application, or reject it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        with ExitStack() as exit_stack:
            try:
                caller = self._admit(scope)
                if scope["type"] == "websocket":
                    exit_stack.enter_context(caller.stream())
                elif scope["method"] in _CHANGING:
                    caller.count_request()
                    exit_stack.enter_context(caller.stream())
                if caller.granted is not None and caller.granted.spend is not None:
                    await caller.granted.spend()
            except TalkrayError as error:
                await self._refuse(error, scope, receive, send)
                return
            upload = Upload(self._uploads, caller.name)
            exit_stack.callback(upload.release)
            state = state_of(scope)
            state.caller, state.upload, state.exit_stack = caller, upload, exit_stack
            VISITOR.set(caller.visitor)
            await self._app(scope, receive, self._naming_a_protocol(scope, send))

    def _admit(self, scope: Scope) -> Caller:
        headers = Headers(scope=scope)
        address = client_address(scope, trusted_proxies=self._admission.trusted_proxies)
        state_of(scope).record.client = address
        _check_size(scope)
        self._check_host(headers.get("host"))
        self._check_origin(headers.get("origin"), headers.get("host"))
        client = one_client(address)
        admission = self._admission
        per_minute, most = admission.client_requests_per_minute, admission.client_streams
        meter = self._of_addresses.of(client, per_minute, max_streams=most)
        if self._keys is None:
            return Caller(f"address {client}", meter, visitor=EVERYBODY)
        keys = self._keys
        key = next(self._offered_keys(scope), None)
        if scope["path"] in self._public and scope.get("method") in _READING and not keys.has(key):
            return Caller(f"address {client}", meter, visitor=STRANGER)
        offers = (grant(key, scope) for grant in self._grants if key)
        granted = next(filter(None, offers), None)
        found = keys.find(key) if granted is None else keys.of_id(granted.key_id)
        state_of(scope).record.key = found.name

        def check() -> None:
            self._meter_of(keys.current_record(found))

        visitor = Visitor(found.name, found.admin)
        caller = Caller(f"key {found.id}", meter, self._meter_of(found), visitor=visitor, check=check)
        caller.key_id, caller.granted = found.id, granted
        return caller

    def _offered_keys(self, scope: Scope) -> Iterator[str]:
        """Yield a request's keys from all headers, query parameters and subprotocols that an API may use. Only the
        first key is checked.
        """
        headers = Headers(scope=scope)
        scheme, _, credentials = headers.get("authorization", "").partition(" ")
        if scheme.lower() in _SCHEMES:
            yield credentials.strip()
        yield from (headers[name] for name in self._key_headers if name in headers)
        if scope["type"] == "websocket":  # browsers cannot set its headers
            query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
            yield from (query[name] for name in self._key_parameters if name in query)
            for protocol in self._with_keys(scope["subprotocols"]):
                prefix = next((known for known in self._key_protocols if protocol.startswith(known)), "")
                yield protocol.removeprefix(prefix)

    def _with_keys(self, protocols: Sequence[str]) -> list[str]:
        """Return the subprotocols that are or contain a key. A key follows a known prefix, or the name of a scheme as
        in `token, KEY`.
        """
        beginnings = (*self._key_protocols, KEY_PREFIX)
        named = [second for first, second in pairwise(protocols) if first.lower() in _SCHEMES]
        return [each for each in protocols if each in named or each.startswith(beginnings)]

    def _naming_a_protocol(self, scope: Scope, send: Send) -> Send:
        """Wrap `send` to select an offered subprotocol that is not a key, including another service's key. Browsers
        drop a WebSocket that offered subprotocols if the server accepts it without selecting one.
        """
        offered = scope["subprotocols"] if scope["type"] == "websocket" else []
        secret = self._with_keys(offered)
        named = next((protocol for protocol in offered if protocol not in secret), None)
        if named is None or not secret:
            return send

        async def send_named(message: Message) -> None:
            if message["type"] == "websocket.accept" and message.get("subprotocol") is None:
                message = {**message, "subprotocol": named}
            await send(message)

        return send_named

    async def _refuse(self, error: TalkrayError, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the error reply over HTTP. If a WebSocket exceeds a limit, accept and then close it, because a failed
        handshake cannot carry a reason.
        """
        reply = translate(error)
        state_of(scope).record.error = reply.code
        if not isinstance(error, Overloaded):  # the meter has already counted an Overloaded error
            metrics.REFUSALS.record(1, reason=reply.code)
        if isinstance(error, Overloaded) and scope["type"] == "websocket":
            await self._naming_a_protocol(scope, send)({"type": "websocket.accept"})
            await send({"type": "websocket.close", "code": TRY_AGAIN_LATER, "reason": close_reason(error)})
        elif scope["type"] == "http" or "websocket.http.response" in scope.get("extensions", {}):
            await reply.response()(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": reply.code})

    def _meter_of(self, record: KeyRecord) -> Meter:
        return self._of_keys.of(record.id, record.requests_per_minute, max_streams=record.max_streams)

    def _check_host(self, host: str | None) -> None:
        allowed = self._access.allowed_hosts
        if allowed is not None and host is not None and _host_name(host) not in allowed:
            raise Forbidden("This host name is not allowed. Add it to access.allowed_hosts.")

    def _check_origin(self, origin: str | None, host: str | None) -> None:
        """Check the `Origin` header, which browsers send even with requests that skip the CORS preflight."""
        allowed = self._access.allowed_origins
        if origin is None or origin in allowed or "*" in allowed:
            return
        if host is None or origin not in (f"http://{host}", f"https://{host}"):
            raise Forbidden("The origin of this web page is not allowed. Add it to access.allowed_origins.")


def _check_size(scope: Scope) -> None:
    if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
        raise HeadersTooLarge(f"The headers are larger than {MAX_HEADER_BYTES} bytes.")


def client_address(scope: Scope, *, trusted_proxies: int) -> str:
    """Return the client's IP address. Each trusted proxy appends its peer's address to X-Forwarded-For, and the client
    can forge all earlier entries. Without trusted proxies, return the peer address of the connection.
    """
    peer: str = (scope.get("client") or ("unknown", 0))[0]
    if not trusted_proxies:
        return peer
    seen = [part.strip() for line in Headers(scope=scope).getlist(FORWARDED_FOR_HEADER) for part in line.split(",")]
    return seen[-trusted_proxies] if len(seen) >= trusted_proxies else peer


def one_client(address: str) -> str:
    """Return the unit that counts as one client: an IPv4 address, or the /64 network of an IPv6 address."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(parsed), _CLIENT_BITS), strict=False))


def _host_name(host: str) -> str | None:
    """Return the host name without its port and any trailing dot, or None if `host` is malformed."""
    try:
        return (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:
        return None
