"""The error tree.

Positional arguments only: keyword-only ones do not survive a deployment handle, and a 429 would become a 500.
"""


class TalkrayError(Exception):
    """Base of every error Talkray raises on purpose."""


class StartError(TalkrayError):
    """The application did not come up; the message says what failed and what to do."""


class InvalidRequest(TalkrayError):
    """The request cannot be served as it is: `param` names the offending field."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message, param, code)
        self.message, self.param, self.code = message, param, code

    def __str__(self) -> str:
        return self.message


class ModelNotFound(InvalidRequest):
    """The request names a model that is not loaded."""

    def __init__(self, message: str, param: str | None = "model", code: str = "model_not_found") -> None:
        super().__init__(message, param, code)


class NotFound(InvalidRequest):
    """The request names something stored that is not there, or belongs to another caller."""


class Conflict(InvalidRequest):
    """What is stored does not allow this: the name is taken, or a quota is used up."""

    def __init__(self, message: str, param: str | None = None, code: str = "conflict") -> None:
        super().__init__(message, param, code)


class PayloadTooLarge(InvalidRequest):
    """The body, or an upload inside it, is over its byte limit."""

    def __init__(self, message: str, param: str | None = None, code: str = "payload_too_large") -> None:
        super().__init__(message, param, code)


class Overloaded(TalkrayError):
    """Every queue that could take the request is full; `retry_after_s` estimates when one will not be."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s)
        self.message, self.retry_after_s = message, retry_after_s

    def __str__(self) -> str:
        return self.message


class NotReady(TalkrayError):
    """The replicas are still loading."""


class Starting(NotReady):
    """The talkers of the model are starting, or failed to; `retry_after_s` is when they should be there."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s)
        self.message, self.retry_after_s = message, retry_after_s

    def __str__(self) -> str:
        return self.message


class ReplicaLost(TalkrayError):
    """A replica died while it served the stream. `beside`: other streams that are known to be lost with it."""

    def __init__(self, message: str, beside: int = 0) -> None:
        super().__init__(message, beside)
        self.message, self.beside = message, beside

    def __str__(self) -> str:
        return self.message


class TalkerLost(ReplicaLost):
    """The talker replica, or the engine process inside it, died."""


class CodecLost(ReplicaLost):
    """The codec replica died."""


class Moved(ReplicaLost):
    """The replica is being taken away and hands its streams over, or Serve took the call back: nothing is wrong."""


class EngineError(TalkrayError):
    """The engine failed on this request for a reason of its own."""


class CheckpointError(TalkrayError):
    """A checkpoint cannot be found, or its files do not fit the architecture."""
