"""Parrot, which exists nowhere: `POST /parrot` speaks a phrase, `WS /parrot/perch` one after the other."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from serve_app.api import ignored
from serve_app.api.response import Delivery
from serve_app.api.sockets import WishedConnection, unknown_type
from serve_app.api.speech_service import SpeechService, Wish, read_object, text_of
from serve_app.audio.formats import AudioFormat
from serve_app.dialects.table import Dialect, Route, Sample
from serve_app.speech.session import Audio, Cleared, Event, Flushed

_NAMES: ignored.Names = {"phrase": "input", "bird": "voice"}


async def squawk(service: SpeechService, request: Request) -> Response:
    """Speaks `phrase` as WAV."""
    fields = await read_object(request, service)
    wish = await service.wish(
        fields, _NAMES, delivery=Delivery(AudioFormat.WAV), made={"input": text_of(fields, "phrase")}
    )
    return await service.respond(request, wish)


class PerchSocket(WishedConnection):
    """A phrase is spoken as PCM to its end, or until `hush`."""

    @classmethod
    async def wished(cls, socket: WebSocket, service: SpeechService) -> Wish:
        sent = dict(socket.query_params)
        return await service.wish(sent, {"bird": "voice"}, delivery=Delivery(AudioFormat.PCM))

    async def opened(self) -> None:
        session = self.service.session(self.socket, self.wish, request_id=self.request_id)
        self._session = self.converse(session, self.say)

    async def obey(self, fields: dict[str, object]) -> None:
        match fields.get("type"):
            case "phrase":
                self._session.append(text_of(fields, "phrase"))
                self._session.flush()
            case "hush":
                await self._session.clear()
            case "leave":
                self._session.close()
            case _:
                raise unknown_type("phrase", "hush", "leave")

    async def say(self, event: Event) -> None:
        match event:
            case Audio(_, data):
                await self.socket.send_bytes(data)
            case Flushed():
                await self.send("said")
            case Cleared():
                await self.send("hushed")


DIALECT = Dialect(
    "Parrot",
    routes=(Route("POST /parrot", squawk, "Speak a phrase"),),
    sockets=(("/parrot/perch", PerchSocket),),
    key_headers=("x-parrot-key",),
    sample=Sample(
        "/parrot/perch?bird=$voice",
        messages=({"type": "phrase", "phrase": "$text"},),
        clients=("Parrot:           $sockets/parrot/perch, $url/parrot",),
    ),
)
