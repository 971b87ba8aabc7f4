"""The outermost layer of the API: names every request, and answers what nobody expected."""

import logging
import re
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.errors import translate

logger = logging.getLogger(__name__)

SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class RequestBoundary:
    """ASGI middleware. `scope["state"]["request_id"]` is the client's own `x-request-id` if it is sane, else a new one;
    `received_ns`, of time.time_ns(), is when the request came.

    `echo_request_id` is False where the server in front adds `x-request-id` to responses.
    """

    def __init__(self, app: ASGIApp, *, echo_request_id: bool) -> None:
        self._app = app
        self._echo_request_id = echo_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the call on; the only `except Exception` of the HTTP surface that does not raise again is here."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        request_id = choose_request_id(Headers(scope=scope).get("x-request-id", ""))
        scope.setdefault("state", {}).update(request_id=request_id, received_ns=time.time_ns())
        started = False

        async def named_send(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if self._echo_request_id:
                    MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, named_send)
        except ClientDisconnect:
            logger.info("request %s: the client left", request_id)
        except Exception as error:
            logger.exception("request %s failed", request_id)
            if started or scope["type"] != "http":
                raise
            await translate(error).response()(scope, receive, named_send)


def choose_request_id(offered: str) -> str:
    """`offered`, unless it could not safely stand in a header or a log line."""
    return offered if SANE_ID.fullmatch(offered) else secrets.token_hex(16)
