"""The checks before a body is read: key, address, host, origin, rate. The request's head alone decides."""

import asyncio
import contextlib
import ipaddress
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from urllib.parse import parse_qsl, urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.errors import Overloaded, TalkrayError
from deployments.serving import metrics
from serve_app.api.errors import POLICY_VIOLATION, TRY_AGAIN_LATER, Forbidden, HeadersTooLarge, close_reason, translate
from serve_app.api.keys import KEY_PREFIX, KeyRecord, Keys
from serve_app.api.web_pages import PATHS
from serve_app.config import ApiSettings
from serve_app.voices.record import EVERYBODY, STRANGER, VISITOR, Visitor

# To be read without a key: probes have none, Open WebUI asks for these two lists without one, and a browser cannot send
# one with a page.
EXEMPT = frozenset({"/health", "/ready", "/v1/audio/voices", "/v1/audio/models"}) | PATHS

_READING = ("GET", "HEAD")
_CHANGING = ("POST", "PUT", "PATCH", "DELETE")

MAX_HEADER_BYTES = 16 << 10  # all header lines together; HAProxy refuses more than about 15,000 bytes

_SCHEMES = ("bearer", "token")
# A browser cannot set the headers of a WebSocket: there, a key may stand in the query or among the subprotocols.
_KEY_PARAMETERS = ("api_key", "token")
_KEY_PROTOCOL = "openai-insecure-api-key."

_MINUTE_S = 60.0
# Bodies that may hold a recording: so many are taken in at once, each until it is decoded; the others wait.
MAX_UPLOADS = 3  # each takes up to 100 MB
_SMALL_BYTES = 128 << 10  # of a body without one
_UPLOAD_WAIT_S = 10.0
# A body has stalled where less than this comes in this time: 16 MiB would take eight minutes.
_LEAST_BYTES, _STALL_S = 64 << 10, 2.0
_LOOK_S = 0.25  # how often a waiting body looks whether another has stalled
# Settings that raise a limit, by the reason of a refusal.
_REMEDIES = {
    "key": "a key with higher limits (`talkray key create`) has more",
    "client": "api.admission has the limits (client_requests_per_minute, client_streams)",
}
_CLIENT_BITS = 64  # of an IPv6 address, that are one client's
# A client that holds a stream is asked to come back when it may have ended.
_STREAM_S = 1.0
# Keys, and addresses, that are remembered; beyond them the one that was seen first and has no stream is forgotten.
_MOST_METERS = 10_000


class Meter:
    """The use of one key or one address. `reason` names its refusals in metrics, `holder` names it in messages."""

    def __init__(self, reason: str, holder: str) -> None:
        self.requests_per_minute: float | None = None  # in bursts of as many; None: as many as the server can do
        self.max_streams: int | None = None
        self.num_streams = 0
        self._reason, self._holder = reason, holder
        self._tokens = math.inf  # requests that may be made at once; they come back steadily, up to a minute's worth
        self._counted_s = time.monotonic()

    def request(self) -> None:
        """Count a request. Raises Overloaded where it is one too many in this minute."""
        per_minute = self.requests_per_minute
        if per_minute is None:
            return
        now_s, per_s = time.monotonic(), per_minute / _MINUTE_S
        self._tokens = min(max(1.0, per_minute), self._tokens + (now_s - self._counted_s) * per_s)
        self._counted_s = now_s
        if self._tokens < 1.0:
            raise self._refusal(f"may make {per_minute:g} requests per minute", (1.0 - self._tokens) / per_s)
        self._tokens -= 1.0

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Count a stream for as long as this holds. Raises Overloaded where it is one too many at once."""
        most = self.max_streams
        if most is not None and self.num_streams >= most:
            raise self._refusal(f"may have {most} streams open at once", _STREAM_S)
        self.num_streams += 1
        try:
            yield
        finally:
            self.num_streams -= 1

    def _refusal(self, limit: str, retry_after_s: float) -> Overloaded:
        metrics.refused(self._reason)
        return Overloaded(f"{self._holder} {limit}; {_REMEDIES[self._reason]}.", retry_after_s)


class Meters:
    """The meters of all keys, or of all addresses."""

    def __init__(self, reason: str, holder: str) -> None:
        self._reason, self._holder = reason, holder
        self._meters: dict[str, Meter] = {}

    def of(self, name: str, requests_per_minute: float | None, *, max_streams: int | None) -> Meter:
        """The meter of one of them, with its present limits; what has been counted stays."""
        meter = self._meters.get(name)
        if meter is None:
            if len(self._meters) >= _MOST_METERS:
                idle = next((known for known, each in self._meters.items() if not each.num_streams), "")
                self._meters.pop(idle, None)
            meter = self._meters[name] = Meter(self._reason, self._holder)
        meter.requests_per_minute, meter.max_streams = requests_per_minute, max_streams
        return meter


class Room:
    """Places or bytes that the requests of a process share. One caller gets no more than it leaves to all others."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: Counter[str] = Counter()  # by the callers that hold any

    def has(self, caller: str, amount: int) -> bool:
        """Whether there is so much for this caller."""
        return self._held[caller] + amount <= self._size - self._held.total()

    def take(self, caller: str, amount: int) -> bool:
        """Whether there was so much for this caller, which holds it from now on."""
        if not self.has(caller, amount):
            return False
        self._held[caller] += amount
        return True

    def give_back(self, caller: str, amount: int) -> None:
        self._held[caller] -= amount
        if not self._held[caller]:
            del self._held[caller]


class Pace:
    """Whether a body still comes, or has stalled."""

    def __init__(self) -> None:
        self._num_bytes, self._since_s = 0, time.monotonic()

    def come(self, num_bytes: int) -> None:
        """So much is there in all."""
        if num_bytes - self._num_bytes >= _LEAST_BYTES:
            self._num_bytes, self._since_s = num_bytes, time.monotonic()

    @property
    def is_stalled(self) -> bool:
        return time.monotonic() - self._since_s > _STALL_S


class Uploads:
    """Places for large bodies. One that stalls while others wait is ended: its sender may hold a place for nothing."""

    def __init__(self) -> None:
        self._room = Room(MAX_UPLOADS)
        self._taken: list[Upload] = []
        self._waiting: list[Upload] = []
        self._changed = asyncio.Event()

    async def take(self, upload: "Upload") -> None:
        """A place for it, in turn. Raises Overloaded where that takes long."""
        self._waiting.append(upload)
        try:
            async with asyncio.timeout(_UPLOAD_WAIT_S):
                while self._next() is not upload:
                    for other in self._taken:
                        other.end_if_stalled()
                    self._changed.clear()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), _LOOK_S)
            self._room.take(upload.caller, 1)
            self._taken.append(upload)
        except TimeoutError:
            metrics.refused("uploads")
            raise Overloaded(f"{MAX_UPLOADS} large bodies are being taken in already.", _STREAM_S) from None
        finally:
            self._waiting.remove(upload)
            self._changed.set()

    def give_back(self, upload: "Upload") -> None:
        self._taken.remove(upload)
        self._room.give_back(upload.caller, 1)
        self._changed.set()

    def _next(self) -> "Upload | None":
        return next((upload for upload in self._waiting if self._room.has(upload.caller, 1)), None)


class Upload:
    """The body of one request. A large one takes one of the places for bodies."""

    def __init__(self, uploads: Uploads, caller: str) -> None:
        """`caller` is the name of its sender."""
        self.caller = caller
        self.is_stalled = False  # and was ended, as others waited
        self._uploads, self._is_large = uploads, False
        self._pace = Pace()
        self._limit: asyncio.Timeout | None = None

    @asynccontextmanager
    async def arriving(self, within_s: float) -> AsyncIterator[None]:
        """The parts as they come. Raises TimeoutError after `within_s`, or as soon as it stalls while others wait."""
        async with asyncio.timeout(within_s) as self._limit:
            try:
                yield
            finally:
                self._limit = None

    async def grow(self, num_bytes: int) -> None:
        """`num_bytes` of the body have come: return once more may come. Raises Overloaded where that takes long."""
        self._pace.come(num_bytes)
        if self._is_large or num_bytes <= _SMALL_BYTES:
            return
        await self._uploads.take(self)
        self._is_large, self._pace = True, Pace()

    def end_if_stalled(self) -> None:
        if self._limit is not None and not self.is_stalled and self._pace.is_stalled:
            self.is_stalled = True
            self._limit.reschedule(asyncio.get_running_loop().time())

    def release(self) -> None:
        if self._is_large:
            self._is_large = False
            self._uploads.give_back(self)


class Caller:
    """The address behind a request, and the key where keys are asked for. A request counts for both.

    `name` tells callers apart: by the key, without one by the address.
    """

    def __init__(self, name: str, *meters: Meter, visitor: Visitor, check: Callable[[], None] = lambda: None) -> None:
        """`visitor` says whose voices it may see. `check` raises where the caller may not ask any more."""
        self.name, self.visitor = name, visitor
        self._meters = meters
        self._check = check

    def request(self) -> None:
        """Count a request. Raises Overloaded, and Unauthorized where the key has been revoked since."""
        self._check()
        for meter in self._meters:
            meter.request()

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Count a stream for as long as this holds. Raises Overloaded."""
        with ExitStack() as streams:
            for meter in self._meters:
                streams.enter_context(meter.stream())
            yield


class Door:
    """ASGI middleware, inside RequestContext. `scope["state"]["caller"]` is the `Caller` that is let in, `upload` the
    `Upload` that its body is.

    A request that may cost speech counts as a request, and as a stream while it lasts. A WebSocket counts as a stream
    while it is open; its handler counts each utterance as a request.
    """

    def __init__(self, app: ASGIApp, *, settings: ApiSettings, key_headers: Sequence[str]) -> None:
        """A key may stand in one of `key_headers` instead of `Authorization`."""
        self._app, self._key_headers = app, key_headers
        self._access, self._admission = settings.access, settings.admission
        self._keys = Keys(settings.access.keys_file) if settings.access.keys_file else None
        self._of_keys = Meters("key", "This API key")
        self._of_addresses = Meters("client", "This client")
        self._uploads = Uploads()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the call on, or answers it with a refusal."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        with ExitStack() as streams:
            try:
                caller = self._admit(scope)
                if scope["type"] == "websocket":
                    streams.enter_context(caller.stream())
                elif scope["method"] in _CHANGING:
                    caller.request()
                    streams.enter_context(caller.stream())
            except TalkrayError as error:
                await _refuse(error, scope, receive, send)
                return
            upload = Upload(self._uploads, caller.name)
            streams.callback(upload.release)
            scope["state"].update(caller=caller, upload=upload)
            VISITOR.set(caller.visitor)
            await self._app(scope, receive, _naming_a_protocol(scope, send))

    def _admit(self, scope: Scope) -> Caller:
        headers = Headers(scope=scope)
        address = client_address(scope, trusted_proxies=self._admission.trusted_proxies)
        scope["state"]["record"].client = address
        _check_size(scope)
        self._check_host(headers.get("host"))
        self._check_origin(headers.get("origin"), headers.get("host"))
        client, admission = one_client(address), self._admission
        per_minute, most = admission.client_requests_per_minute, admission.client_streams
        meter = self._of_addresses.of(client, per_minute, max_streams=most)
        if self._keys is None:
            return Caller(f"address {client}", meter, visitor=EVERYBODY)
        keys, key = self._keys, next(_offered_keys(scope, self._key_headers), None)
        if scope["path"] in EXEMPT and scope.get("method") in _READING and not keys.has(key):
            return Caller(f"address {client}", meter, visitor=STRANGER)
        record = keys.find(key)
        scope["state"]["record"].key = record.name

        def check() -> None:
            self._meter_of(keys.still(record))

        visitor = Visitor(record.name, record.admin)
        return Caller(f"key {record.id}", meter, self._meter_of(record), visitor=visitor, check=check)

    def _meter_of(self, record: KeyRecord) -> Meter:
        return self._of_keys.of(record.id, record.requests_per_minute, max_streams=record.max_streams)

    def _check_host(self, host: str | None) -> None:
        allowed = self._access.allowed_hosts
        if allowed is not None and host is not None and _host_name(host) not in allowed:
            raise Forbidden("This host name is not allowed; access.allowed_hosts lists those that are.")

    def _check_origin(self, origin: str | None, host: str | None) -> None:
        """Browsers name the page behind a request, also where they send the request without asking CORS."""
        allowed = self._access.allowed_origins
        if origin is None or origin in allowed or "*" in allowed:
            return
        if host is None or origin not in (f"http://{host}", f"https://{host}"):
            raise Forbidden("This web page is not allowed; access.allowed_origins lists those that are.")


def _check_size(scope: Scope) -> None:
    if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
        raise HeadersTooLarge(f"The headers are larger than {MAX_HEADER_BYTES} bytes.")


def client_address(scope: Scope, *, trusted_proxies: int) -> str:
    """The client's address. Each trusted proxy added the address that it saw at the end of X-Forwarded-For. Entries
    before these were written by the client and prove nothing. Without such a proxy it is the peer of the connection.
    """
    peer: str = (scope.get("client") or ("unknown", 0))[0]
    if not trusted_proxies:
        return peer
    seen = [part.strip() for line in Headers(scope=scope).getlist("x-forwarded-for") for part in line.split(",")]
    return seen[-trusted_proxies] if len(seen) >= trusted_proxies else peer


def one_client(address: str) -> str:
    """Whom `address` stands for where clients are told apart: an IPv6 client has a /64 of its own, 2**64 addresses."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(parsed), _CLIENT_BITS), strict=False))


def _offered_keys(scope: Scope, key_headers: Sequence[str]) -> Iterator[str]:
    """What the request offers as its key, wherever one of the APIs puts it; the first one counts."""
    headers = Headers(scope=scope)
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    if scheme.lower() in _SCHEMES:
        yield credentials.strip()
    yield from (headers[name] for name in key_headers if name in headers)
    if scope["type"] == "websocket":
        query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        yield from (query[name] for name in _KEY_PARAMETERS if name in query)
        yield from (protocol.removeprefix(_KEY_PROTOCOL) for protocol in scope["subprotocols"] if _is_key(protocol))


def _is_key(protocol: str) -> bool:
    return protocol.startswith((_KEY_PROTOCOL, KEY_PREFIX))


def _host_name(host: str) -> str | None:
    """Without its port, and without the dot that may end a full name."""
    try:
        return (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:
        return None


def _naming_a_protocol(scope: Scope, send: Send) -> Send:
    """Browsers drop a WebSocket that offered subprotocols and was accepted without one: name one that is no key. Behind
    the name of a scheme, as in `token, KEY`, stands a key, also one of another service: this one may ask for none.
    """
    offered = scope["subprotocols"] if scope["type"] == "websocket" else []
    named = next((protocol for protocol in offered if not _is_key(protocol)), None)
    has_scheme = len(offered) > 1 and offered[0].lower() in _SCHEMES
    if named is None or not (has_scheme or any(map(_is_key, offered))):
        return send

    async def send_named(message: Message) -> None:
        if message["type"] == "websocket.accept" and message.get("subprotocol") is None:
            message = {**message, "subprotocol": named}
        await send(message)

    return send_named


async def _refuse(error: TalkrayError, scope: Scope, receive: Receive, send: Send) -> None:
    """Over HTTP its reply. A WebSocket too many is accepted and closed: a handshake that fails says no reason."""
    reply = translate(error)
    scope["state"]["record"].error = reply.code
    if not isinstance(error, Overloaded):  # its meter has counted that one
        metrics.refused(reply.code)
    if isinstance(error, Overloaded) and scope["type"] == "websocket":
        await _naming_a_protocol(scope, send)({"type": "websocket.accept"})
        await send({"type": "websocket.close", "code": TRY_AGAIN_LATER, "reason": close_reason(error)})
    elif scope["type"] == "http" or "websocket.http.response" in scope.get("extensions", {}):
        await reply.response()(scope, receive, send)
    else:
        await send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": reply.code})
