import pytest
from starlette.exceptions import HTTPException

from deployments import errors
from deployments.errors import EngineError, InvalidRequest, ModelNotFound, NotReady, Overloaded, StartError, TalkerLost
from serve_app.api.error_replies import translate
from serve_app.extensions.voices.voice_store import NoStore, StoreFailed


class RemoteError(RuntimeError, Overloaded):
    """As a deployment handle raises it: derived from the cause."""

    def __init__(self) -> None:
        Overloaded.__init__(self, "full", 3.0)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidRequest("bad", "top_k"), 400, "invalid_value"), (RemoteError(), 429, "rate_limit_exceeded"),
        (InvalidRequest("bad", "voice", "voice_not_found"), 400, "voice_not_found"),
        (ModelNotFound("which"), 404, "model_not_found"), (errors.PayloadTooLarge("much"), 413, "payload_too_large"),
        (Overloaded("full"), 429, "rate_limit_exceeded"), (NotReady(), 503, "not_ready"),
        (TalkerLost("secret"), 503, "replica_lost"), (errors.CodecLost("gone"), 503, "replica_lost"),
        (StoreFailed("far"), 503, "voice_store_failed"), (NoStore("nowhere"), 503, "voice_store_failed"),
        (EngineError("secret"), 500, "engine_error"), (errors.CheckpointError("where"), 500, "internal_error"),
        (ZeroDivisionError("secret"), 500, "internal_error"), (HTTPException(404), 404, "not_found"),
        (HTTPException(405), 405, "method_not_allowed"),
    ],
)  # fmt: skip
def test_every_error_has_its_status_and_code(error: Exception, status: int, code: str) -> None:
    reply = translate(error)
    assert (reply.status, reply.code) == (status, code)
    assert set(reply.envelope()["error"]) == {"message", "type", "param", "code"}
    assert reply.message
    assert "secret" not in reply.message
    assert reply.param == {"invalid_value": "top_k", "voice_not_found": "voice", "model_not_found": "model"}.get(code)


def test_an_overloaded_server_says_when_to_come_back() -> None:
    headers = translate(Overloaded("full", 1.25)).headers
    assert headers == {"Retry-After": "2", "retry-after-ms": "1250", "x-should-retry": "true"}


@pytest.mark.parametrize(
    "error", [NotReady(), errors.Starting("soon", 1.0), TalkerLost("gone"), StoreFailed("s3://v: no route")]
)
def test_what_may_pass_by_itself_says_when_to_come_back(error: Exception) -> None:
    reply = translate(error)
    assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
    assert reply.message.endswith(". Try again in 1 s.")


@pytest.mark.parametrize("error", [NoStore("set api.voices.store."), StartError("api.default_voice: no such voice")])
def test_what_only_a_setting_changes_asks_nobody_to_come_back(error: Exception) -> None:
    reply = translate(error)
    assert (reply.status, reply.message, reply.headers) == (503, str(error), {})
