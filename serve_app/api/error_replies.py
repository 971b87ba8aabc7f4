"""Translation of errors into HTTP statuses, OpenAI's error envelope and WebSocket close codes. Errors are translated
only here.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from deployments.errors import (
    Conflict,
    EngineError,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    NotReady,
    Overloaded,
    PayloadTooLarge,
    ReplicaLost,
    StartError,
    Starting,
    TalkrayError,
)
from serve_app.api.headers import SHOULD_RETRY_HEADER

Envelope = dict[str, dict[str, str | None]]

RETRY_AFTER_S = 1.0  # a replica is replaced or finishes loading within seconds
POLICY_VIOLATION = 1008  # close code if access is denied or has been revoked
TRY_AGAIN_LATER = 1013  # close code if a limit is reached; `close_reason` states when to retry


class Unauthorized(TalkrayError):
    """The API key is missing, invalid or revoked."""


class Forbidden(TalkrayError):
    """The origin of the web page, or the host name, is not allowed."""


class HeadersTooLarge(TalkrayError):
    """The headers exceed their size limit."""


class BodyTooSlow(TalkrayError):
    """The body did not arrive in time."""


class UnsupportedMedia(TalkrayError):
    """The path does not support the body's content type or encoding."""


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """Reply for one class of errors. An empty `message` means that the error's own text is sent to the client."""

    status: int
    type: str
    code: str
    message: str = ""
    retry: bool = False


class ExtensionError(TalkrayError):
    """Base class for extensions' errors, each of which has its own `kind`."""

    kind: ClassVar[ErrorKind]


_ROUTING = {
    404: ("not_found", ": this path does not exist. See /docs for all paths."),
    405: ("method_not_allowed", ": use {} for this path."),
}
INTERNAL = ErrorKind(500, "server_error", "internal_error", "An internal error occurred.")
KINDS: dict[type[BaseException], ErrorKind] = {
    Unauthorized: ErrorKind(401, "authentication_error", "invalid_api_key"),
    Forbidden: ErrorKind(403, "permission_error", "forbidden"),
    BodyTooSlow: ErrorKind(408, "invalid_request_error", "request_timeout"),
    UnsupportedMedia: ErrorKind(415, "invalid_request_error", "unsupported_media_type"),
    HeadersTooLarge: ErrorKind(431, "invalid_request_error", "headers_too_large"),
    ModelNotFound: ErrorKind(404, "invalid_request_error", "model_not_found"),
    NotFound: ErrorKind(404, "invalid_request_error", "not_found"),
    Conflict: ErrorKind(409, "invalid_request_error", "conflict"),
    PayloadTooLarge: ErrorKind(413, "invalid_request_error", "payload_too_large"),
    InvalidRequest: ErrorKind(400, "invalid_request_error", "invalid_value"),
    Overloaded: ErrorKind(429, "rate_limit_error", "rate_limit_exceeded", retry=True),
    NotReady: ErrorKind(503, "server_error", "not_ready", "The model is still loading.", retry=True),
    Starting: ErrorKind(503, "server_error", "not_ready", retry=True),
    StartError: ErrorKind(503, "server_error", "not_ready"),  # requires a restart with different settings
    ReplicaLost: ErrorKind(503, "server_error", "replica_lost", "The replica failed during this request.", retry=True),
    EngineError: ErrorKind(500, "server_error", "engine_error", "The engine failed during this request."),
}


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """Error in a form that HTTP and WebSocket handlers can send."""

    status: int
    message: str
    type: str
    code: str
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def envelope(self) -> Envelope:
        """Return OpenAI's error object, always with all four keys."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        return JSONResponse(self.envelope(), self.status, self.headers)


def translate(error: BaseException) -> ErrorReply:
    """Return the reply to any error. Unknown errors become a 500 without details."""
    if isinstance(error, HTTPException):
        return _translate_http(error)
    found = (KINDS[cls] for cls in type(error).__mro__ if cls in KINDS)
    kind = error.kind if isinstance(error, ExtensionError) else next(found, INTERNAL)
    headers = {"WWW-Authenticate": "Bearer"} if kind.status == 401 else {}
    message = kind.message or str(error)
    if kind.retry:
        headers |= _retry(error.retry_after_s if isinstance(error, Overloaded | Starting) else RETRY_AFTER_S)
        message = f"{message.rstrip('.')}. Try again in {headers['Retry-After']} s."
    code, param = (error.code, error.param) if isinstance(error, InvalidRequest) else (kind.code, None)
    return ErrorReply(kind.status, message, type=kind.type, code=code, param=param, headers=headers)


def close_reason(error: Overloaded) -> str:
    """Return the close reason (at most 123 bytes) for a WebSocket closed with code 1013."""
    limit = ascii(str(error).partition(";")[0])[1:-1]  # without the remedy, which is for the operator
    return f"overloaded, retry after {max(1, math.ceil(error.retry_after_s))} s: {limit}"[:123]


def _translate_http(error: HTTPException) -> ErrorReply:
    """Return the reply to Starlette's own errors, such as an unknown path or method."""
    code, remedy = _ROUTING.get(error.status_code, ("invalid_request", ""))
    headers = dict(error.headers or {})
    message = error.detail + remedy.format(headers.get("Allow", "other methods"))
    return ErrorReply(error.status_code, message, type="invalid_request_error", code=code, headers=headers)


def _retry(after_s: float) -> dict[str, str]:
    return {
        "Retry-After": str(max(1, math.ceil(after_s))),
        "retry-after-ms": str(max(1, math.ceil(after_s * 1000))),
        SHOULD_RETRY_HEADER: "true",
    }
