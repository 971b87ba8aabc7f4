"""Rules for all WebSockets: the maximum message size, and how to refuse a handshake."""

from starlette.websockets import WebSocket

from serve_app.api.context import state_of
from serve_app.api.error_replies import translate

MAX_MESSAGE_BYTES = 128 << 10  # of messages without reference audio
# Scope key of a function, set if the client's connection ends in this process. The function registers a callback, which
# is called from any thread when the server stops.
LEAVING = "talkray.leaving"


async def refuse_handshake(socket: WebSocket, error: Exception, *, reason_header: str | None = None) -> None:
    """Refuse a WebSocket handshake with an HTTP status. Some clients read the message from `reason_header`."""
    reply = translate(error)
    state_of(socket).record.error = reply.code
    response = reply.response()
    if reason_header is not None:
        response.headers[reason_header] = reply.message.encode("ascii", "replace").decode().replace("\n", " ")
    await socket.send_denial_response(response)
