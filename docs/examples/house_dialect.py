"""A custom extension: an in-house API with a route and a WebSocket. docs/extensions.md describes how to load it.

POST /house/say              {"words": "Hello.", "who": "nora", "as": "pcm"} returns audio, or MP3 without `as`
WS   /house/live?who=nora    {"type": "words", "words": "Hello."} streams PCM in binary messages while you write.
                             {"type": "over"} after the text is answered by {"type": "spoken"} after the last audio.
                             {"type": "stop"} stops the speech
"""

from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from serve_app.api.parsing.client_input import format_named, text_of
from serve_app.api.parsing.field_names import Names
from serve_app.api.resolve.speech_request import Delivery, SpeechRequest
from serve_app.api.responses.respond import respond
from serve_app.api.speech_service import SpeechService
from serve_app.audio.formats import AudioFormat
from serve_app.extension import Dialect, Extension, Route, Sample
from serve_app.extensions.live.connection import ConversationConnection, HandshakeConnection, unknown_type
from serve_app.extensions.live.turns import Audio, Cleared, Event, Flushed

NAMES: Names = {"words": "input", "who": "voice", "as": None}  # the in-house API's fields, and Talkray's
FORMATS = {"mp3": AudioFormat.MP3, "wav": AudioFormat.WAV, "pcm": AudioFormat.PCM}


async def say(service: SpeechService, request: Request) -> Response:
    """Speak `words`, as a complete WAV file or as a stream of another format."""
    fields = await service.read_fields(request)
    audio_format = format_named("as", str(fields.get("as", "mp3")), FORMATS)
    delivery = Delivery(audio_format, whole=audio_format is AudioFormat.WAV)
    words = {"input": text_of(fields, "words")}
    return await respond(
        service, request, await service.resolver.lenient_request(fields, NAMES, delivery=delivery, overrides=words)
    )


class HouseSocket(HandshakeConnection, ConversationConnection):
    """Socket that speaks words as they are written."""

    text_fields = ("words",)

    @classmethod
    async def speech_request(cls, socket: WebSocket, service: SpeechService) -> SpeechRequest:
        query = dict(socket.query_params)
        return await service.resolver.lenient_request(query, NAMES, delivery=Delivery(AudioFormat.PCM))

    async def opened(self) -> None:
        self.converse(self.speech)
        await self.send("ready", **self.speech.notes())  # ignored fields, and the voice

    async def obey(self, fields: dict[str, object]) -> None:
        match fields.get("type"):
            case "words":
                self.session.append(text_of(fields, "words"))
            case "over":
                self.session.flush()
            case "stop":
                await self.session.clear()
            case _:
                raise unknown_type("words", "over", "stop")

    async def say(self, event: Event) -> None:
        match event:
            case Audio(_, data):
                await self.socket.send_bytes(data)
            case Flushed(turn):
                await self.send("spoken", finish_reason=turn.finish_reason, **turn.usage.answer)
            case Cleared():
                await self.send("stopped")


DIALECT = Dialect(
    "House",
    routes=(Route("POST /house/say", say, "Say"),),
    sockets=(("/house/live", HouseSocket),),
    key_headers=("x-house-key",),
    sample=Sample("/house/live?who=$voice", messages=({"type": "words", "words": "$text"}, {"type": "over"})),
)
EXTENSION = Extension("house", requires=("live",), dialects=(DIALECT,))
