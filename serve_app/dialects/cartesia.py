"""Cartesia: contexts over a WebSocket, one transcript as bytes or as events, and its list of voices."""

import base64
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from deployments.errors import InvalidRequest
from serve_app import voices
from serve_app.audio import AudioFormat
from serve_app.connection import Connection, Contexts
from serve_app.errors import ErrorReply, translate
from serve_app.session import Audio, Done, Event, Failed, Mark, Session, Words
from serve_app.speaker import Speaker, Wish, choice, read_object, text_of
from serve_app.speech_response import EVENT_STREAM, Delivery, named_event
from serve_app.word_times import Word, WordTimes

RAW = {
    "pcm_s16le": AudioFormat.PCM,
    "pcm_f32le": AudioFormat.FLOAT,
    "pcm_mulaw": AudioFormat.MULAW,
    "pcm_alaw": AudioFormat.ALAW,
}
_CONTAINERS = {"wav": AudioFormat.WAV, "mp3": AudioFormat.MP3}
_KNOWN = (
    *("model_id", "transcript", "voice", "output_format", "language", "context_id", "continue", "flush", "cancel"),
    *("add_timestamps", "max_buffer_delay_ms", "generation_config", "speed"),
)
_LANGUAGE = {"english": "en", "chinese": "zh", "german": "de", "french": "fr", "spanish": "es", "italian": "it"}
_LANGUAGE |= {"portuguese": "pt", "russian": "ru", "japanese": "ja", "korean": "ko"}


def routes(speaker: Speaker) -> APIRouter:
    """`WS /tts/websocket`, `POST /tts/bytes`, `POST /tts/sse` and `GET /voices`."""
    router = APIRouter()

    @router.websocket("/tts/websocket")
    async def speak(socket: WebSocket) -> None:
        await _Socket(socket, speaker).serve()

    @router.post("/tts/bytes", summary="Speak a text (Cartesia)", response_class=Response)
    async def speak_bytes(request: Request) -> Response:
        """Speaks `transcript`."""
        fields = await read_object(request, speaker)
        return await speaker.respond(request, await _wished(speaker, fields, text=text_of(fields, "transcript")))

    @router.post("/tts/sse", summary="Speak a text as events (Cartesia)", response_class=Response)
    async def speak_events(request: Request) -> Response:
        """Speaks `transcript` as the messages that a WebSocket would have."""
        fields = await read_object(request, speaker)
        wish = await _wished(speaker, fields, text=text_of(fields, "transcript"))
        return await speaker.respond(request, wish, as_body=_events, content_type=EVENT_STREAM)

    @router.get("/voices", summary="List voices (Cartesia)")
    @router.get("/voices/", include_in_schema=False)
    async def list_voices(starting_after: str = "") -> dict[str, object]:
        """All of them on one page."""
        info = await speaker.describe()
        known = [] if starting_after else [_voice(voice) for voice in voices.voice_list(info)]
        return {"data": known, "has_more": False, "next_page": None}

    @router.get("/voices/{voice_id}", summary="Show a voice (Cartesia)")
    async def show_voice(voice_id: str) -> dict[str, object]:
        """One voice. Raises InvalidRequest with the valid names."""
        info = await speaker.describe()
        known = {voice.id: voice for voice in voices.voice_list(info)}
        return _voice(known[voice_id] if voice_id in known else known[voices.resolve(voice_id, info.voices)])

    return router


def _voice(voice: voices.Voice) -> dict[str, object]:
    return {
        "id": voice.id,
        "name": voice.name,
        "language": _LANGUAGE.get(voice.language, "en"),
        "description": voice.description,
        "gender": {"female": "feminine", "male": "masculine"}.get(voice.gender, "gender_neutral"),
        "tagline": "",
        "locales": [],
        "access": "public",
        "visibility": "all",
        "is_owner": False,
        "is_public": True,
        "created_at": "1970-01-01T00:00:00Z",
    }


async def _wished(speaker: Speaker, fields: Mapping[str, object], *, text: str = "") -> Wish:
    """Raises InvalidRequest."""
    voice, wanted, generation = fields.get("voice"), fields.get("output_format"), fields.get("generation_config")
    output = wanted if isinstance(wanted, Mapping) else {}
    controls = generation if isinstance(generation, Mapping) else {}
    container = str(output.get("container") or "raw")
    encoding = str(output.get("encoding") or "pcm_s16le")
    audio_format = choice("output_format.encoding", encoding, RAW)
    if container != "raw":
        audio_format = choice("output_format.container", container, _CONTAINERS)
    bit_rate = output.get("bit_rate")
    asked = {
        "input": text,
        "voice": voice.get("id") if isinstance(voice, Mapping) else voice,
        "language": fields.get("language"),
        "sample_rate": output.get("sample_rate"),
        "speed": controls.get("speed"),
        "instructions": controls.get("emotion"),
        "word_timestamps": fields.get("add_timestamps") is True,
    }
    return await speaker.wish(
        asked,
        delivery=Delivery(audio_format, bit_rate=bit_rate if isinstance(bit_rate, int) else None),
        other=(name for name in fields if name not in _KNOWN),
        model=fields.get("model_id"),
    )


def _chunk(context_id: str, audio: bytes) -> dict[str, object]:
    data = base64.b64encode(audio).decode()
    step = {"status_code": 206, "done": False, "step_time": 0.0}
    return {"type": "chunk", "context_id": context_id, "data": data, **step}


def _done(context_id: str) -> dict[str, object]:
    return {"type": "done", "context_id": context_id, "status_code": 200, "done": True}


def _error(context_id: str | None, reply: ErrorReply) -> dict[str, object]:
    said = {"title": reply.code, "error_code": reply.code, "message": reply.message, "error": reply.message}
    return {"type": "error", "context_id": context_id, "status_code": reply.status, "done": True, **said}


def _timestamps(context_id: str, words: Sequence[Word]) -> dict[str, object]:
    entries = {
        "words": [word.text for word in words],
        "start": [round(word.start_s, 3) for word in words],
        "end": [round(word.end_s, 3) for word in words],
    }
    step = {"status_code": 206, "done": False}
    return {"type": "timestamps", "context_id": context_id, "word_timestamps": entries, **step}


async def _events(audio: AsyncGenerator[bytes, None], times: WordTimes | None) -> AsyncGenerator[bytes, None]:
    context_id, begun = secrets.token_hex(8), False
    try:
        async with aclosing(audio):
            async for data in audio:
                begun = True
                yield named_event(_chunk(context_id, data))
                if times is not None and (words := times.take()):
                    yield named_event(_timestamps(context_id, words))
    except Exception as error:
        if begun:
            yield named_event(_error(context_id, translate(error)))
        raise
    if times is not None and (words := times.take()):
        yield named_event(_timestamps(context_id, words))
    yield named_event(_done(context_id))


class _Socket(Connection):
    def __init__(self, socket: WebSocket, speaker: Speaker) -> None:
        super().__init__(socket)
        self._speaker = speaker
        self._contexts = Contexts(self)
        self._flushes: dict[str, set[int]] = {}  # turns whose end was asked for, by context

    @property
    def is_busy(self) -> bool:
        return self._contexts.is_speaking

    async def obey(self, fields: dict[str, object]) -> None:
        named = fields.get("context_id")
        name = named if isinstance(named, str) and named else secrets.token_hex(8)
        if fields.get("cancel"):
            await self._contexts.cancel(name)
            self._flushes.pop(name, None)
            return
        try:
            await self._write(name, fields)
        except InvalidRequest as error:
            await self.socket.send_json(_error(name, translate(error)))

    async def refuse(self, error: InvalidRequest) -> None:
        await self.socket.send_json(_error(None, translate(error)))

    async def _write(self, name: str, fields: dict[str, object]) -> None:
        text = text_of(fields, "transcript")
        session = self._contexts.find(name) or await self._open(name, fields)
        session.append(text)
        if fields.get("flush"):
            self._flushes.setdefault(name, set()).add(session.flush().number)
        if not fields.get("continue"):
            session.close()

    async def _open(self, name: str, fields: dict[str, object]) -> Session:
        session = self._speaker.session(
            self.socket, await _wished(self._speaker, fields), request_id=f"{self.request_id}-{name[:40]}"
        )

        async def say(event: Event) -> None:
            await self._say(name, event)

        added = self._contexts.add(name, session, say)
        self._flushes[name] = set()
        return added

    async def _say(self, name: str, event: Event) -> None:
        match event:
            case Audio(_, data):
                await self.socket.send_json(_chunk(name, data))
            case Words():
                await self.socket.send_json(_timestamps(name, event.in_session()))
            case Mark(turn) if turn.number in self._flushes.get(name, ()):
                self._flushes[name].discard(turn.number)
                flushed = {"type": "flush_done", "flush_done": True, "flush_id": turn.number}
                await self.socket.send_json({**flushed, "context_id": name, "status_code": 206, "done": False})
            case Failed(error):
                self._flushes.pop(name, None)
                await self.socket.send_json(_error(name, self.failure(error, self.request_id)))
            case Done():
                self._flushes.pop(name, None)
                await self.socket.send_json(_done(name))
