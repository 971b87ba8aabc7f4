"""DashScope, Alibaba's API for Qwen: `qwen3-tts-flash-realtime` over a WebSocket, and complete texts over HTTP."""

import secrets
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from deployments.errors import InvalidRequest
from serve_app.api.context import state_of
from serve_app.api.parsing import field_names
from serve_app.api.parsing.client_input import format_named, number, switch, text_of
from serve_app.api.request_record import Usage
from serve_app.api.resolve.speech_request import EVENT_STREAM, Delivery, SpeechRequest
from serve_app.api.responses.events import in_parts
from serve_app.api.responses.respond import respond
from serve_app.api.responses.speech_response import StreamedFormat, WholeFormat
from serve_app.api.responses.whole_audio import AUDIO_HERE, object_with
from serve_app.api.speech_service import SpeechService
from serve_app.audio.formats import AudioFormat
from serve_app.extension import Dialect, Route, Sample
from serve_app.extensions.live.connection import ConversationConnection
from serve_app.extensions.live.session import MAX_UNSPOKEN_CHARS, Session
from serve_app.extensions.live.turns import Audio, Cleared, Event, Flushed, Started
from serve_app.extensions.realtime.realtime import ResponseSocket, response
from serve_app.speech.observers import WordSource

Json = dict[str, object]

_FORMATS = {name: AudioFormat(name) for name in ("pcm", "wav", "mp3", "opus")}
_NAMES: field_names.Names = {
    "voice": "voice",
    "language_type": "language",
    "instructions": "instructions",
    "response_format": None,
    "sample_rate": "sample_rate",
    "bit_rate": "bit_rate",
    "speech_rate": "speed",
    "enable_tn": "text_normalization",
}
_SESSION_NAMES: field_names.Names = {**_NAMES, "mode": None}
_REST_NAMES: field_names.Names = {
    "model": "model",
    "input.text": "input",
    **{f"{where}.{name}": ours for where in ("parameters", "input") for name, ours in _NAMES.items()},
}
_MODES = ("server_commit", "commit")


async def speak_text(service: SpeechService, request: Request) -> Response:
    """Speak `input.text` as WAV in a JSON body or, with `X-DashScope-SSE: enable`, as PCM in server-sent events."""
    sent = await read_text(service, request, _REST_NAMES)
    speech = await speech_request(service, sent, _REST_NAMES, default="pcm" if _streams(request) else "wav")
    return await answer(service, request, speech)


async def read_text(service: SpeechService, request: Request, names: field_names.Names) -> Json:
    """Return the flattened fields of a body. Raises InvalidRequest if the text is missing."""
    sent = field_names.flat(await service.read_fields(request), names)
    if not isinstance(sent.get("input.text"), str):
        raise InvalidRequest("input.text is required. Send a string.", "input", "missing_required_parameter")
    return sent


async def answer(
    service: SpeechService, request: Request, speech: SpeechRequest, part: Mapping[str, object] | None = None
) -> Response:
    """Send the audio as one JSON body or as events. `part` adds fields to the `output` of each event with audio."""
    usage = state_of(request).record.usage
    request_id = state_of(request).record.request_id
    characters = len(speech.body.input)

    def output(audio: bytes, *, over: bool = True) -> Iterator[bytes]:
        shown = _output(usage, f"audio_{request_id}", {} if over else part or {}, over=over)
        usages = {"characters": characters, **usage.tokens}
        return object_with({"output": shown, "request_id": request_id, "usage": usages}, audio)

    def events(audio: AsyncGenerator[bytes, None], _: WordSource | None) -> AsyncGenerator[bytes, None]:
        return in_parts(audio, lambda part: _event(output(part, over=False)), lambda: _event(output(b"")))

    if _streams(request):
        return await respond(service, request, speech, StreamedFormat(EVENT_STREAM, events))
    return await respond(service, request, speech, WholeFormat("application/json", lambda audio, _: output(audio)))


def _streams(request: Request) -> bool:
    return request.headers.get("x-dashscope-sse") == "enable"


async def speech_request(
    service: SpeechService,
    sent: Mapping[str, object],
    names: field_names.Names,
    *,
    overrides: Mapping[str, object] | None = None,
    reasons: Mapping[str, str] | None = None,
    default: str = "pcm",
) -> SpeechRequest:
    """Create a request from the settings of a session or from a body. Raises InvalidRequest."""
    flat = {name.rpartition(".")[2]: sent[name] for name in reversed(list(names)) if name in sent}
    bit_rate = number("bit_rate", flat.get("bit_rate"))  # kbit/s
    field = "format" if "format" in flat else "response_format"
    audio_format = format_named(field, str(flat.get(field, default)), _FORMATS)
    delivery = Delivery(audio_format, bit_rate=None if bit_rate is None else int(bit_rate * 1000))
    if "enable_tn" in flat:
        overrides = {**(overrides or {}), "text_normalization": "on" if switch(flat, "enable_tn") else "off"}
    return await service.resolver.lenient_request(sent, names, delivery=delivery, overrides=overrides, reasons=reasons)


class DashScopeSocket(ResponseSocket, ConversationConnection):
    """WebSocket connection of a DashScope client, in one of two modes.

    In `server_commit` mode, the server speaks text as it arrives. In `commit` mode, each commit starts a response that
    speaks the text before it.
    """

    audio_kind = "response.audio"

    def __init__(self, socket: WebSocket, service: SpeechService) -> None:
        super().__init__(socket, service)
        self._model = socket.query_params.get("model")
        self._settings: Json = {"mode": _MODES[0]}
        self._buffer = ""  # text that has not been committed yet
        self._begun: set[int] = set()  # numbers of turns with a `response.created` event
        self._has_sent_notes, self._pending_notes = False, Json()  # results of `SpeechRequest.notes`

    @property
    def owes_speech(self) -> bool:
        return bool(self._buffer) or super().owes_speech

    async def opened(self) -> None:
        await self.send_event("session.created", session=self._shown())

    async def obey(self, fields: dict[str, object]) -> None:
        match fields.get("type"):
            case "session.update":
                await self._update(fields.get("session"))
            case "input_text_buffer.append":
                await self._append(text_of(fields))
            case "input_text_buffer.commit":
                await self._commit()
            case "input_text_buffer.clear":
                self._buffer = ""
                await self.send_event("input_text_buffer.cleared")
            case "response.cancel":
                if self._session is not None:
                    await self._session.clear()
            case "session.finish":
                if self._settings["mode"] == "commit" and self._buffer:
                    await self._commit()
                (await self._opened_session()).close()
            case _:
                raise InvalidRequest(f"type: {str(fields.get('type'))[:40]!r} is not a DashScope message.", "type")

    def _shown(self) -> Json:
        return {"object": "realtime.session", "id": f"sess_{self.request_id}", "model": self._model, **self._settings}

    async def _update(self, settings: object) -> None:
        """Change the settings of the session. Raises InvalidRequest once text has arrived."""
        if not isinstance(settings, Mapping) or settings.get("mode", _MODES[0]) not in _MODES:
            raise InvalidRequest(f"session must be an object with mode {' or '.join(_MODES)}.", "session")
        if self._session is not None:
            raise InvalidRequest("The session has already started. Update it before the first text.", "session")
        updated = field_names.flat({**self._settings, **settings}, _SESSION_NAMES)
        speech = await self._speech_request(updated)
        self._settings = {name: value for name, value in updated.items() if name in _SESSION_NAMES}
        self._has_sent_notes = True
        await self.send_event("session.updated", session=self._shown(), **speech.notes())

    async def _speech_request(self, settings: Json) -> SpeechRequest:
        speech = await speech_request(self.service, settings, _SESSION_NAMES, overrides={"model": self._model})
        return replace(speech, delivery=replace(speech.delivery, files=True))

    async def _opened_session(self) -> Session:
        if self._session is None:
            speech = await self._speech_request(self._settings)
            self._pending_notes = {} if self._has_sent_notes else speech.notes()
            self.converse(speech)
        return self.session

    async def _append(self, text: str) -> None:
        if self._settings["mode"] == "commit":
            if len(self._buffer) + len(text) > MAX_UNSPOKEN_CHARS:
                message = f"More than {MAX_UNSPOKEN_CHARS} characters wait for a commit. Commit or clear them."
                raise InvalidRequest(message, "text", "string_above_max_length")
            self._buffer += text
        else:
            (await self._opened_session()).append(text)

    async def _commit(self) -> None:
        session = await self._opened_session()
        session.append(self._buffer)
        self._buffer = ""
        await self.send_event("input_text_buffer.committed", item_id=f"item_{secrets.token_hex(8)}")
        if session.is_writing:
            session.flush()

    async def say(self, event: Event) -> None:
        match event:
            case Started(turn):
                self._begun.add(turn.number)
                notes, self._pending_notes = self._pending_notes, {}
                await self.send_event("response.created", response=response(turn, "in_progress"), **notes)
                await self.tell_begun(turn)
            case Audio(turn, data):
                await self.tell_audio(turn, data)
            case Flushed(turn):
                self._begun.discard(turn.number)
                await self.tell_spoken(turn)
            case Cleared(turns):
                for turn in turns:
                    if turn.number in self._begun:
                        await self.send_event("response.done", response=response(turn, "cancelled"))
                self._begun.clear()

    async def finish(self) -> None:
        await self.send_event("session.finished")
        await super().finish()


def _output(usage: Usage, audio_id: str, part: Mapping[str, object], *, over: bool) -> Json:
    audio = {"data": AUDIO_HERE, "url": "", "id": audio_id, "expires_at": 0}
    return {**part, "audio": audio, "finish_reason": (usage.finish_reason or "stop") if over else "null"}


def _event(parts: Iterator[bytes]) -> bytes:
    return b"".join((b"event:result\n:HTTP_STATUS/200\ndata:", *parts, b"\n\n"))


DIALECT = Dialect(
    "DashScope",
    routes=(
        Route("POST /api/v1/services/aigc/multimodal-generation/generation", speak_text, "Speak a text (DashScope)"),
    ),
    sockets=(("/api-ws/v1/realtime", DashScopeSocket),),
    sample=Sample(
        "/api-ws/v1/realtime?model=qwen3-tts-flash-realtime",
        audio_field="delta",
        messages=(
            {"type": "session.update", "session": {"voice": "$voice", "mode": "server_commit"}},
            {"type": "input_text_buffer.append", "text": "$text"},
            {"type": "session.finish"},
        ),
        clients=(
            'dashscope:        QwenTtsRealtime(model=..., callback=..., url="$sockets/api-ws/v1/realtime")',
            'dashscope (HTTP): dashscope.base_http_api_url = "$url/api/v1"',
        ),
    ),
)
