"""A custom extension: an in-house API with a route and a WebSocket. docs/extensions.md describes how to load it.

POST /house/say     {"words": "Hello."}                    returns MP3
WS   /house/live    {"words": "Hel"} {"words": "lo."}      streams PCM in binary messages while you write. Send
                    {"over": true} after the text; the server answers {"type": "spoken"} after the last audio
"""

from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from serve_app.api.parsing.client_input import text_of
from serve_app.api.resolve.make_request import lenient_request
from serve_app.api.resolve.speech_request import Delivery, SpeechRequest
from serve_app.api.responses.respond import respond
from serve_app.api.speech_service import SpeechService
from serve_app.audio.formats import AudioFormat
from serve_app.extension import Dialect, Extension, Route
from serve_app.extensions.live.connection import ConversationConnection, HandshakeConnection
from serve_app.extensions.live.turns import Audio, Event, Flushed

NAMES = {"words": "input", "who": "voice"}  # the in-house API's field names, and Talkray's


async def say(service: SpeechService, request: Request) -> Response:
    """Speak `words`."""
    fields = await service.read_fields(request)
    words = {"input": text_of(fields, "words")}
    delivery = Delivery(AudioFormat.MP3)
    return await respond(
        service, request, await lenient_request(service.resolver, fields, NAMES, delivery=delivery, overrides=words)
    )


class HouseSocket(HandshakeConnection, ConversationConnection):
    """Socket that speaks words as they are written."""

    text_fields = ("words",)

    @classmethod
    async def speech_request(cls, socket: WebSocket, service: SpeechService) -> SpeechRequest:
        return await lenient_request(
            service.resolver, dict(socket.query_params), NAMES, delivery=Delivery(AudioFormat.PCM)
        )

    async def opened(self) -> None:
        self.converse(self.speech)

    async def obey(self, fields: dict[str, object]) -> None:
        if fields.get("over"):
            self.session.flush()
        else:
            self.session.append(text_of(fields, "words"))

    async def say(self, event: Event) -> None:
        if isinstance(event, Audio):
            await self.socket.send_bytes(event.data)
        elif isinstance(event, Flushed):
            await self.send("spoken", finish_reason=event.turn.finish_reason, **event.turn.usage.answer)


DIALECT = Dialect("House", routes=(Route("POST /house/say", say, "Say"),), sockets=(("/house/live", HouseSocket),))
EXTENSION = Extension("house", requires=("live",), dialects=(DIALECT,))
