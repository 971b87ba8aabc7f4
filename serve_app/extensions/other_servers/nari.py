"""nari's protocol `nari.speech.v1`, on the same path as the native WebSocket.

Each socket speaks one utterance, whose text arrives in numbered pieces.
"""

from typing import ClassVar

from starlette.websockets import WebSocket

from deployments.errors import InvalidRequest
from serve_app.api.error_replies import ErrorReply
from serve_app.api.parsing.client_input import switch, text_of
from serve_app.api.resolve.speech_request import Delivery, SpeechRequest
from serve_app.api.speech_service import SpeechService
from serve_app.audio.formats import AudioFormat
from serve_app.extension import Dialect, Sample
from serve_app.extensions.live.connection import (
    ConversationConnection,
    HandshakeConnection,
    always_streamed,
    unknown_type,
)
from serve_app.extensions.live.turns import Audio, Event, Flushed, Started

PROTOCOL = "nari.speech.v1"


class NariSocket(HandshakeConnection, ConversationConnection):
    """Connection on the native path whose client offers the subprotocol `PROTOCOL`."""

    subprotocol: ClassVar[str | None] = PROTOCOL
    takes_recordings = True
    first_message = "request.start"

    @classmethod
    async def speech_request(cls, socket: WebSocket, service: SpeechService) -> SpeechRequest:
        return await service.resolver.lenient_request({}, {}, delivery=Delivery(AudioFormat.PCM))

    async def opened(self) -> None:
        rate = self.speech.info.sample_rate
        self._audio: dict[str, object] = {"encoding": "pcm_s16le", "sample_rate": rate, "channels": 1}
        self._sequence = -1  # number of the last message with text
        self._num_chunks = 0
        self._stop_reason = "stop"
        self._spoke: dict[str, object] = {}
        await self.send("session.created", protocol=PROTOCOL, audio=self._audio)

    async def obey(self, fields: dict[str, object]) -> None:
        match fields.get("type"):
            case "request.start":
                await self._start(fields)
            case "input_text.append":
                self.session.append(self._text(fields))
                await self._acknowledge(fields)
            case "input_text.end":
                self.session.close()
                await self._acknowledge(fields)
            case "response.cancel":
                await self.stop()
                self._stop_reason = "cancelled"
                await self.finish()
            case _:
                raise unknown_type("request.start", "input_text.append", "input_text.end", "response.cancel")

    async def tell_error(self, reply: ErrorReply) -> None:
        await self.send("error", request_id=self.request_id, **reply.envelope())

    async def _start(self, fields: dict[str, object]) -> None:
        if self._session is not None:
            raise InvalidRequest("The request has already started. Open a socket for each one.", "type", "busy")
        sent = {name: value for name, value in fields.items() if name != "type"}
        reasons = always_streamed(sent)
        if str(sent.get("response_format", "pcm")).strip().lower() != AudioFormat.PCM:
            reasons["response_format"] = "the format is always pcm"
        if switch(sent, "word_timestamps"):
            reasons["word_timestamps"] = "not supported by this protocol"
        overrides = {"input": "", "response_format": AudioFormat.PCM, "word_timestamps": False}
        speech = await self.service.resolver.strict_request(sent, overrides=overrides, reasons=reasons)
        self._audio["sample_rate"] = speech.delivery.rate(speech.info)
        self.converse(speech)
        await self.send("request.configured", request_id=self.request_id, **speech.notes())

    def _text(self, fields: dict[str, object]) -> str:
        text = text_of(fields)
        sequence = fields.get("sequence", self._sequence + 1)
        if not isinstance(sequence, int) or sequence <= self._sequence:
            raise InvalidRequest(f"sequence must be an integer above {self._sequence}.", "sequence")
        self._sequence = sequence
        return text

    async def _acknowledge(self, fields: dict[str, object]) -> None:
        answer = {"event": fields["type"], "sequence": fields.get("sequence", self._sequence)}
        await self.send("input_text.ack", request_id=self.request_id, **answer)

    async def say(self, event: Event) -> None:
        match event:
            case Started():
                await self.send("response.started", request_id=self.request_id, audio=self._audio)
            case Audio(_, data):
                self._num_chunks += 1
                await self.socket.send_bytes(data)
            case Flushed(turn):
                self._stop_reason, self._spoke = turn.finish_reason, turn.usage.answer

    async def finish(self) -> None:
        done = {"stop_reason": self._stop_reason, "audio_chunks": self._num_chunks, **self._spoke}
        await self.send("response.done", request_id=self.request_id, **done)
        await super().finish()


DIALECT = Dialect(
    "nari",
    sockets=(("/v1/audio/speech/ws", NariSocket),),
    sample=Sample(
        "/v1/audio/speech/ws",
        protocols=(PROTOCOL,),
        messages=(
            {"type": "request.start", "voice": "$voice"},
            {"type": "input_text.append", "sequence": 0, "text": "$text"},
            {"type": "input_text.end", "sequence": 1},
        ),
        clients=(f"nari:             $sockets/v1/audio/speech/ws with the subprotocol {PROTOCOL}",),
    ),
)
