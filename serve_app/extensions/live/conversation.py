"""What sockets go through to speech."""

from starlette.requests import HTTPConnection

from serve_app.api.context import state_of
from serve_app.api.resolve.speech_request import SpeechRequest
from serve_app.api.speech_service import SpeechService
from serve_app.extensions.continuity.joints import Continuation, Tails
from serve_app.extensions.live.session import Session


def new_continuation(service: SpeechService) -> Continuation:
    """What the utterances of one conversation go on from."""
    tails: Tails = service.opened_by("continuity")
    return Continuation(tails, joins=tails.joins)


def new_session(
    service: SpeechService,
    connection: HTTPConnection,
    speech: SpeechRequest,
    *,
    request_id: str,
    live: bool = True,
    continuation: Continuation | None = None,
) -> Session:
    """Speech of one conversation, while it is written if `live`; see `Session`. `continuation`: of a conversation that
    has several sessions.
    """
    return Session(
        service.offer,
        speech,
        handshake=state_of(connection),
        request_id=request_id,
        continuation=continuation or new_continuation(service),
        live_texts=service.opened_by("live") if live else None,
    )
