"""Limits for each client address, so that one of them cannot take the whole server."""

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments import metrics
from deployments.errors import Overloaded
from serve_app.api_settings import AdmissionSettings
from serve_app.errors import translate

_MINUTE_S = 60.0
# A client that holds a stream is asked to come back when it may have ended.
_STREAM_S = 2.0
TRY_AGAIN_LATER = 1013
# Addresses remembered; beyond them the one that was seen first is forgotten.
_MOST_CLIENTS = 10_000


class ClientLimits:
    """ASGI middleware. A request that may cost speech counts while it lasts, a WebSocket while it is open."""

    def __init__(self, app: ASGIApp, *, settings: AdmissionSettings) -> None:
        self._app = app
        self._settings = settings
        self._streams: dict[str, int] = {}
        self._buckets: dict[str, Bucket] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the call on, or answers it with 429, a WebSocket with close code 1013."""
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["method"] != "POST"):
            await self._app(scope, receive, send)
            return
        address = client_address(scope, trusted_proxies=self._settings.trusted_proxies)
        with ExitStack() as streams:
            try:
                self._take_token(address)
                streams.enter_context(self._stream(address))
            except Overloaded as error:
                metrics.refused("client")
                await _refuse(error, scope, receive, send)
                return
            await self._app(scope, receive, send)

    @contextmanager
    def _stream(self, address: str) -> Iterator[None]:
        limit = self._settings.client_streams
        if limit is not None and self._streams.get(address, 0) >= limit:
            raise Overloaded(f"{limit} streams of this client are open, its limit is {limit}.", _STREAM_S)
        self._streams[address] = self._streams.get(address, 0) + 1
        try:
            yield
        finally:
            self._streams[address] -= 1
            if not self._streams[address]:
                del self._streams[address]

    def _take_token(self, address: str) -> None:
        per_minute = self._settings.client_requests_per_minute
        if per_minute is None:
            return
        bucket = self._buckets.get(address)
        if bucket is None:
            if len(self._buckets) >= _MOST_CLIENTS:
                del self._buckets[next(iter(self._buckets))]
            bucket = self._buckets[address] = Bucket(per_minute, now_s=time.monotonic())
        wait_s = bucket.take(time.monotonic())
        if wait_s:
            raise Overloaded(f"This client may make {per_minute:g} requests a minute.", wait_s)


class Bucket:
    """Tokens that come back steadily, up to as many as a minute brings. Times come from one monotonic clock."""

    def __init__(self, per_minute: float, *, now_s: float) -> None:
        self._per_s = per_minute / _MINUTE_S
        self._most = max(1.0, per_minute)
        self._tokens = self._most
        self._counted_s = now_s

    def take(self, now_s: float) -> float:
        """0.0 with a token taken, or how many seconds later there will be one."""
        self._tokens = min(self._most, self._tokens + (now_s - self._counted_s) * self._per_s)
        self._counted_s = now_s
        if self._tokens < 1.0:
            return (1.0 - self._tokens) / self._per_s
        self._tokens -= 1.0
        return 0.0


def client_address(scope: Scope, *, trusted_proxies: int) -> str:
    """Who asks. Each trusted proxy added the address that it saw at the end of X-Forwarded-For; what stands before
    these was written by the client and proves nothing. Without such a proxy it is the peer of the connection.
    """
    peer: str = (scope.get("client") or ("unknown", 0))[0]
    if not trusted_proxies:
        return peer
    seen = [part.strip() for line in Headers(scope=scope).getlist("x-forwarded-for") for part in line.split(",")]
    return seen[-trusted_proxies] if len(seen) >= trusted_proxies else peer


async def _refuse(error: Overloaded, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        await translate(error).response()(scope, receive, send)
        return
    await send({"type": "websocket.accept"})  # a handshake that fails tells a client neither code nor reason
    await send({"type": "websocket.close", "code": TRY_AGAIN_LATER, "reason": close_reason(error)})


def close_reason(error: Overloaded) -> str:
    """What a WebSocket that is closed with 1013 says: at most 123 bytes."""
    return f"overloaded, retry after {max(1, math.ceil(error.retry_after_s))} s"
