"""Errors that Talkray raises.

Constructors take positional arguments, because Ray drops keyword-only arguments when an error crosses a deployment
handle. A 429 would otherwise become a 500.
"""


class TalkrayError(Exception):
    """Base class for every error that Talkray raises on purpose."""


class StartError(TalkrayError):
    """The application cannot start. The message gives the cause and the remedy."""


class InvalidRequest(TalkrayError):
    """The request or one of its fields is invalid. `param` names the field."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message, param, code)
        self.message, self.param, self.code = message, param, code

    def __str__(self) -> str:
        return self.message


class ModelNotFound(InvalidRequest):
    """The model is unknown."""

    def __init__(self, message: str, param: str | None = "model", code: str = "model_not_found") -> None:
        super().__init__(message, param, code)


class NotFound(InvalidRequest):
    """The stored object does not exist, or it belongs to another owner."""


class Conflict(InvalidRequest):
    """The name is in use, a quota is exhausted, or the object's state does not permit the request."""

    def __init__(self, message: str, param: str | None = None, code: str = "conflict") -> None:
        super().__init__(message, param, code)


class PayloadTooLarge(InvalidRequest):
    """The body, or an upload in it, exceeds its size limit."""

    def __init__(self, message: str, param: str | None = None, code: str = "payload_too_large") -> None:
        super().__init__(message, param, code)


class Overloaded(TalkrayError):
    """A limit has been reached. `retry_after_s` estimates the seconds until capacity is available."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s)
        self.message, self.retry_after_s = message, retry_after_s

    def __str__(self) -> str:
        return self.message


class NotReady(TalkrayError):
    """The model is still loading."""


class Starting(NotReady):
    """The model's talkers are starting or failed to start. `retry_after_s` estimates the seconds until it is ready."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s)
        self.message, self.retry_after_s = message, retry_after_s

    def __str__(self) -> str:
        return self.message


class ReplicaLost(TalkrayError):
    """A replica was lost during the request. `beside` counts the other streams lost with the replica."""

    def __init__(self, message: str, beside: int = 0) -> None:
        super().__init__(message, beside)
        self.message, self.beside = message, beside

    def __str__(self) -> str:
        return self.message


class TalkerLost(ReplicaLost):
    """The talker replica died, or its engine process died."""


class CodecLost(ReplicaLost):
    """The codec replica died."""


class Moved(ReplicaLost):
    """The replica is stopping and hands over its streams, or Serve cancelled the call. Neither is a fault."""


class EngineError(TalkrayError):
    """The engine failed to process this request."""


class CheckpointError(TalkrayError):
    """The checkpoint was not found, or its files do not match the architecture."""
