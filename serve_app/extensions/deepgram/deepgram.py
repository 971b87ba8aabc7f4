"""Deepgram's `/v1/speak`: words over a WebSocket, spoken as they come until `Clear`, or one text over HTTP."""

import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from deployments.errors import InvalidRequest
from serve_app.api.error_replies import ErrorReply
from serve_app.api.parsing import field_names
from serve_app.api.parsing.client_input import format_named, number, text_of
from serve_app.api.resolve.make_request import lenient_request
from serve_app.api.resolve.speech_request import Delivery, SpeechRequest
from serve_app.api.responses.respond import respond
from serve_app.api.speech_service import SpeechService
from serve_app.audio.formats import AudioFormat
from serve_app.extension import Dialect, Route, Sample
from serve_app.extensions.live.connection import HandshakeConnection, unknown_type
from serve_app.extensions.live.conversation import new_session
from serve_app.extensions.live.turns import Audio, Cleared, Event, Flushed

RAW = {"linear16": AudioFormat.PCM, "mulaw": AudioFormat.MULAW, "alaw": AudioFormat.ALAW}
FILES = {name: AudioFormat(name) for name in ("mp3", "opus", "flac", "aac")}
# Names a word together with how to say it.
_PRONUNCIATION = re.compile(r'\\?\{\s*"word"\s*:\s*"((?:[^"\\]++|\\.)*+)"\s*,\s*"pronounce"\s*:\s*"[^"]*"\s*\\?\}')
_PAUSE = re.compile(r"\\?\{\s*pause\s*:\s*(\d{1,5}\s*m?s)\s*\\?\}")
_MOST_CHARS = 1 << 17  # that are searched: longer texts are refused anyway
_MODEL = re.compile(r"(?:aura(?:-\d+)?|flux)-(.+)-[a-z]{2}")
_TELEPHONE_HZ = 8000  # the rate of mu-law and A-law unless the client asks for another one
_CONTAINERS = ("none", "wav", "ogg")
_NAMES: field_names.Names = {  # of the query, but for the text
    "text": "input",
    "model": "voice",
    "sample_rate": "sample_rate",
    "speed": "speed",
    "bit_rate": "bit_rate",
    "encoding": None,
    "container": None,
}


async def speech_request(
    service: SpeechService, query: Mapping[str, str], *, body: Mapping[str, object] | None = None, words: bool = False
) -> SpeechRequest:
    """The request of a query, over HTTP with a `body`; `words`: with the time of each word. Raises InvalidRequest."""
    choices, default = (RAW, "linear16") if body is None else (RAW | FILES, "mp3")
    encoding, container = query.get("encoding", default).strip().lower(), query.get("container", "").strip().lower()
    audio_format = format_named("encoding", encoding, choices)
    is_raw = encoding in RAW
    in_wav = is_raw and body is not None and container != "none"
    bit_rate = number("bit_rate", query.get("bit_rate"))
    delivery = Delivery(
        audio_format,
        bit_rate=None if bit_rate is None else int(bit_rate),
        sample_rate=_TELEPHONE_HZ if audio_format in (AudioFormat.MULAW, AudioFormat.ALAW) else None,
        in_wav=in_wav,
    )
    overrides = {
        "input": "" if body is None else plain(text_of(body)),
        "voice": voice_of(query.get("model")),
        "sample_rate": number("sample_rate", query.get("sample_rate")),
        "speed": number("speed", query.get("speed")),
        "word_timestamps": words,
    }
    reasons = {name: "it counts in the query" for name in _NAMES if name in (body or {}) and name != "text"}
    comes_in = "wav" if in_wav else "ogg" if audio_format is AudioFormat.OPUS else "none"
    if container not in ("", comes_in):
        reasons["container"] = "a WebSocket has none" if body is None else f"{encoding} has {comes_in}"
    if body is not None and _PRONUNCIATION.search(text_of(body)[:_MOST_CHARS]):
        reasons["pronounce"] = "no model here reads phonemes: the word is spoken"
    if _MODEL.fullmatch(query.get("model", "")):
        reasons.setdefault("model", "it names a voice here, and no language")
    return await lenient_request(
        service.offer, {**(body or {}), **query}, _NAMES, delivery=delivery, overrides=overrides, reasons=reasons
    )


async def speak_text(service: SpeechService, request: Request) -> Response:
    """Speaks `text` of a JSON body, MP3 unless the query says otherwise."""
    speech = await speech_request(service, request.query_params, body=await service.read_fields(request))
    return await respond(service, request, speech)


def voice_of(model: str | None) -> str | None:
    """Their models are named for a voice and a language: aura-2-thalia-en, flux-alexis-en."""
    named = _MODEL.fullmatch(model or "")
    return named[1] if named else model


def plain(text: str) -> str:
    """Words in place of their inline pronunciations, which are phonemes, and pauses as all other texts have them."""
    return _PAUSE.sub(r"[pause:\1]", _PRONUNCIATION.sub(r"\1", text)) if len(text) <= _MOST_CHARS else text


class TurnSocket(HandshakeConnection):
    """One session, whose settings came with the handshake; with `words` it is known when each is heard."""

    reason_header = "dg-error"
    words: ClassVar[bool] = False

    @classmethod
    async def speech_request(cls, socket: WebSocket, service: SpeechService) -> SpeechRequest:
        return await speech_request(service, socket.query_params, words=cls.words)

    async def opened(self) -> None:
        session = new_session(self.service, self.socket, self.speech, request_id=self.request_id)
        self._session = self.converse(session, self.say)

    @abstractmethod
    async def say(self, event: Event) -> None:
        """Tell the client an event that is not the session's end."""


class AuraSocket(TurnSocket):
    """`WS /v1/speak`."""

    async def opened(self) -> None:
        await super().opened()
        self._num_flushed = self._num_cleared = 0
        name = self.speech.info.name
        notes = {"model_version": "1", "model_uuid": self.request_id, **self.speech.notes()}
        await self.send("Metadata", request_id=self.request_id, model_name=name, **notes)

    async def obey(self, fields: dict[str, object]) -> None:
        match fields.get("type"):
            case "Speak":
                self._session.append(plain(text_of(fields)))
            case "Flush":
                self._session.flush()
            case "Clear":
                await self._session.clear()
            case "Close":
                self._session.close()
            case _:
                raise unknown_type("Speak", "Flush", "Clear", "Close")

    async def refuse(self, error: InvalidRequest) -> None:
        # LiveKit shows warn_msg, others the description.
        code, said = error.code, error.message
        await self.send("Warning", code=code, description=said, warn_code=code, warn_msg=said)

    async def tell_error(self, reply: ErrorReply) -> None:
        await self.send("Error", code=reply.code, description=reply.message, message=reply.message)

    async def say(self, event: Event) -> None:
        match event:
            case Audio(_, data):
                await self.socket.send_bytes(data)
            case Flushed(turn):
                notes = {"finish_reason": turn.finish_reason, **turn.usage.answer}
                await self.send("Flushed", sequence_id=self._num_flushed, **notes)
                self._num_flushed += 1
            case Cleared():
                await self.send("Cleared", sequence_id=self._num_cleared)
                self._num_cleared += 1


DIALECT = Dialect(
    "Deepgram",
    routes=(Route("POST /v1/speak", speak_text, "Speak a text (Deepgram Aura)"),),
    sockets=(("/v1/speak", AuraSocket),),
    sample=Sample(
        "/v1/speak?model=$voice&encoding=linear16&sample_rate=24000",
        messages=({"type": "Speak", "text": "$text"}, {"type": "Flush"}),
        clients=(
            'LiveKit:          deepgram.TTS(base_url="$url/v1/speak", api_key=KEY, model="$voice")',
            (
                'Pipecat:          DeepgramTTSService(base_url="$sockets", api_key=KEY, '
                'settings=DeepgramTTSService.Settings(voice="$voice"))'
            ),
            (
                'deepgram-sdk:     DeepgramClientEnvironment(base="$url", production="$sockets", '
                'agent="$sockets", agent_rest="$url")'
            ),
        ),
    ),
)
