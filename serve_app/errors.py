"""Every error as an HTTP status and OpenAI's envelope: the only translation table."""

import math
from dataclasses import dataclass, field

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from deployments.errors import (
    EngineError,
    InvalidRequest,
    ModelNotFound,
    NotReady,
    Overloaded,
    PayloadTooLarge,
    ReplicaLost,
)
from serve_app.refusals import BodyTooSlow, Forbidden, HeadersTooLarge, Refusal, Unauthorized

Envelope = dict[str, dict[str, str | None]]

RETRY_AFTER_S = 1.0  # a lost replica is replaced, a loading one becomes ready, in seconds


@dataclass(frozen=True, slots=True)
class Kind:
    """How one class of errors is answered. Errors without a message of their own get `message`: nothing else leaks."""

    status: int
    type: str
    code: str
    message: str = ""
    retry: bool = False


INTERNAL = Kind(500, "server_error", "internal_error", "The server failed on this request.")
KINDS: dict[type[BaseException], Kind] = {
    Unauthorized: Kind(401, "authentication_error", "invalid_api_key"),
    Forbidden: Kind(403, "permission_error", "forbidden"),
    BodyTooSlow: Kind(408, "invalid_request_error", "request_timeout"),
    HeadersTooLarge: Kind(431, "invalid_request_error", "headers_too_large"),
    ModelNotFound: Kind(404, "invalid_request_error", "model_not_found"),
    PayloadTooLarge: Kind(413, "invalid_request_error", "payload_too_large"),
    InvalidRequest: Kind(400, "invalid_request_error", "invalid_value"),
    Overloaded: Kind(429, "rate_limit_error", "rate_limit_exceeded", retry=True),
    NotReady: Kind(503, "server_error", "not_ready", "The model is still loading.", retry=True),
    ReplicaLost: Kind(503, "server_error", "replica_lost", "A replica was lost while it served this.", retry=True),
    EngineError: Kind(500, "server_error", "engine_error", "The engine failed on this request."),
}


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """One error, ready for any transport."""

    status: int
    message: str
    type: str
    code: str
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def envelope(self) -> Envelope:
        """OpenAI's error object, always with its four keys."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        """The reply over HTTP."""
        return JSONResponse(self.envelope(), self.status, self.headers)


def translate(error: BaseException) -> ErrorReply:
    """The reply to any error; one that nobody raised on purpose becomes a bare 500."""
    if isinstance(error, HTTPException):
        return _translate_http(error)
    kind = next((KINDS[cls] for cls in type(error).__mro__ if cls in KINDS), INTERNAL)
    match error:
        case InvalidRequest():
            return ErrorReply(kind.status, error.message, kind.type, error.code, error.param)
        case Refusal():
            headers = {"WWW-Authenticate": "Bearer"} if kind.status == 401 else {}
            return ErrorReply(kind.status, str(error), kind.type, kind.code, headers=headers)
        case Overloaded():
            return ErrorReply(kind.status, error.message, kind.type, kind.code, headers=_retry(error.retry_after_s))
    return ErrorReply(
        kind.status, kind.message, kind.type, kind.code, headers=_retry(RETRY_AFTER_S) if kind.retry else {}
    )


def _translate_http(error: HTTPException) -> ErrorReply:
    """Starlette's own: no such route, no such method."""
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    headers = dict(error.headers or {})
    return ErrorReply(error.status_code, error.detail, "invalid_request_error", code, headers=headers)


def _retry(after_s: float) -> dict[str, str]:
    return {
        "Retry-After": str(max(1, math.ceil(after_s))),
        "retry-after-ms": str(max(1, math.ceil(after_s * 1000))),
        "x-should-retry": "true",
    }
