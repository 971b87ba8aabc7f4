"""Middleware around an application's others. It assigns request ids, measures time to first byte, and replies to
unexpected errors. `outermost` returns what runs around Ray Serve's own.
"""

import asyncio
import contextlib
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.serving import metrics
from serve_app.api.access.callers import Caller
from serve_app.api.error_replies import translate
from serve_app.api.headers import CLOSE_HEADER, IGNORED_HEADER, REQUEST_ID_HEADER
from serve_app.api.parsing.uploads import Upload
from serve_app.api.request_record import LEFT, RequestRecord

logger = logging.getLogger(__name__)

SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_STATE = "talkray"  # key of the `RequestState`
ENDPOINT_DIALECT = "dialect"  # attribute of an endpoint that holds its dialect's name

# Statuses after which the server closes the connection.
_ENDS_CONNECTION = frozenset({401, 403, 408, 413, 431})
# Seconds for which the server keeps reading a rejected request's body.
_READ_ON_S = 1.0
# Scope key of a function that the application calls after it has consumed part of a body.
_TAKEN = "talkray.taken"
_SLASHES = re.compile(r"/{2,}")


@dataclass(slots=True)
class RequestState:
    """Per-request state, created when the headers arrive. Starlette stores it in `request.state`."""

    record: RequestRecord
    caller: Caller = field(init=False)  # set by AccessControl
    upload: Upload = field(init=False)  # the body; set by AccessControl
    exit_stack: contextlib.ExitStack = field(init=False)  # closed after the complete response has been sent
    repaired: str = ""  # for IGNORED_HEADER: body fields that were not valid text


def state_of(request: Mapping[str, Any]) -> RequestState:
    """Return the state of a request, a WebSocket or an ASGI scope."""
    state: RequestState = request["state"][_STATE]
    return state


def outermost() -> list[Middleware]:
    """Return the middleware that Ray Serve adds around its apps (RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH)."""
    from deployments.serving.ray_private import this_replica

    if this_replica() is None:  # Serve's own proxy, which forwards scopes to other processes
        return [Middleware(with_sane_id)]
    return [Middleware(with_sane_id), Middleware(without_read_ahead)]


def with_sane_id(app: ASGIApp) -> ASGIApp:
    """Wrap an application in middleware that ensures exactly one valid `x-request-id` header: the client's own id, or a
    new id. Ray Serve echoes and logs the header as received, so this middleware runs around Serve's own middleware.
    """

    id_header = REQUEST_ID_HEADER.encode()

    async def named_app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            offered = [value for name, value in scope["headers"] if name == id_header]
            request_id = sane_id(offered[0].decode("latin-1") if len(offered) == 1 else "")
            other_headers = [header for header in scope["headers"] if header[0] != id_header]
            scope["headers"] = [*other_headers, (id_header, request_id.encode())]
        await app(scope, receive, send)

    return named_app


def without_read_ahead(app: ASGIApp) -> ASGIApp:
    """Wrap an application in middleware that receives the next part of a body after RequestContext has consumed the
    previous part. Without this middleware, Ray Serve queues complete bodies before the application reads them
    (`ASGIDIReceiveProxy`).
    """

    async def paced_app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        loop = asyncio.get_running_loop()
        taken = asyncio.Event()
        taken.set()
        # The application may run in its own event loop.
        scope[_TAKEN] = lambda: loop.call_soon_threadsafe(taken.set)

        async def receive_next() -> Message:
            await taken.wait()
            message = await receive()
            if message.get("more_body"):
                taken.clear()
            return message

        await app(scope, receive_next, send)

    return paced_app


class RequestContext:
    """ASGI middleware that creates the `RequestState` of each request and publishes its record when the request ends.

    The request's id is the client's `x-request-id` if that header is valid, otherwise a new id. Set `echo_request_id`
    to False if the server in front adds `x-request-id` to responses. `dialects`: dialect names by path, for requests
    rejected before routing.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        echo_request_id: bool,
        on_end: Callable[[RequestRecord], None],
        dialects: Mapping[str, str],
    ) -> None:
        self._app, self._on_end, self._dialects = app, on_end, dialects
        self._echo_request_id = echo_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request. Other code of the API re-raises unexpected exceptions, and this sends their response."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        # Normalize the path before keys and public paths are checked, so that all later code sees the same path. Base
        # URLs may end in a slash.
        scope["path"] = _SLASHES.sub("/", scope.get("path", ""))
        headers = Headers(scope=scope)
        request_id = sane_id(headers.get(REQUEST_ID_HEADER, ""))
        method = scope.get("method", "WS")
        record = RequestRecord(request_id, time.time_ns(), method=method, path=scope["path"], on_end=self._on_end)
        record.trace = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        scope.setdefault("state", {})[_STATE] = RequestState(record)
        response = _Response(scope, receive, send, request_id if self._echo_request_id else None)
        try:
            await self._app(scope, response.receive, response.send)
        except ClientDisconnect:
            record.error = LEFT
            logger.info("request %s: the client left", request_id)
        except Exception as error:
            # Starlette wraps an error that an application raises after the response has started.
            record.error = translate(error.__cause__ if response.has_started and error.__cause__ else error).code
            logger.exception("request %s failed", request_id)
            if response.has_started or scope["type"] != "http":
                raise
            await translate(error).response()(scope, receive, response.send)
        finally:
            named = getattr(scope.get("endpoint"), ENDPOINT_DIALECT, "") or self._dialects.get(record.path, "")
            record.dialect = record.dialect or named
            record.publish()


class _Response:
    """Response to one request. Adds the request id if configured, and records the time to first byte of speech.

    An error response closes the connection if no request can follow. It also does so if part of the request body is
    still missing, because a stalled client would hold the connection.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, request_id: str | None) -> None:
        self.has_started = False
        self._receive, self._send = receive, send
        self._taken: Callable[[], object] = scope.get(_TAKEN, lambda: None)
        self._request_id, self._state = request_id, state_of(scope)
        self._began_s = time.perf_counter()
        self._is_awaited = scope.get("method") == "POST"  # whether the first byte is still to be sent
        headers = Headers(scope=scope)
        self._is_unread = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers

    async def receive(self) -> Message:
        message = await self._receive()
        if message.get("more_body"):
            self._taken()
        elif message["type"] == "http.request":
            self._is_unread = False
        return message

    async def send(self, message: Message) -> None:
        if message["type"] in ("http.response.start", "websocket.http.response.start"):
            self.has_started = True
            self._is_awaited = self._is_awaited and message["status"] == 200
            if message["status"] >= 400:
                await self._read_on()
            headers = MutableHeaders(scope=message)
            if self._request_id is not None:
                headers[REQUEST_ID_HEADER] = self._request_id
            if self._state.repaired:
                headers[IGNORED_HEADER] = "; ".join([*headers.getlist(IGNORED_HEADER), self._state.repaired])
            if message["status"] in _ENDS_CONNECTION or (message["status"] >= 400 and self._is_unread):
                headers["connection"] = "close"
                headers[CLOSE_HEADER] = "unread" if self._is_unread else "read"
        elif self._is_awaited and message["type"] == "http.response.body" and message.get("body"):
            self._is_awaited = False
            metrics.TTFB.record(time.perf_counter() - self._began_s)
        await self._send(message)

    async def _read_on(self) -> None:
        """Read the rest of the request, if it arrives. A client that is still sending would lose the response if the
        connection closed.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_READ_ON_S):
                while self._is_unread and (await self.receive())["type"] != "http.disconnect":
                    pass


class HeadDone(Exception):
    """The response to a HEAD request has been sent, so the GET handler can stop."""


class HeadAsGet:
    """ASGI middleware that handles HEAD requests as GET requests and stops the handler before the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("method") != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            if message["type"] != "http.response.start":
                raise HeadDone
            await send(message)

        try:
            await self._app({**scope, "method": "GET"}, receive, send_head)
        except HeadDone:
            await send({"type": "http.response.body"})


def sane_id(offered: str) -> str:
    """Return `offered`, or a new id if `offered` is unsafe in a header or log line."""
    return offered if SANE_ID.fullmatch(offered) else secrets.token_hex(16)
