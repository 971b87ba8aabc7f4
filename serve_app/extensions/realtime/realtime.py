"""Speech output of OpenAI's Realtime API: clients send text and receive `response.output_audio.delta` events."""

import base64
import json
import secrets
from collections.abc import Iterator, Mapping

from starlette.websockets import WebSocket

from deployments.errors import InvalidRequest
from serve_app.api.context import state_of
from serve_app.api.error_replies import ErrorReply, translate
from serve_app.api.parsing import field_names
from serve_app.api.parsing.client_input import format_named
from serve_app.api.resolve import ignored_fields
from serve_app.api.resolve.speech_request import Delivery, SpeechRequest
from serve_app.api.speech_service import SpeechService
from serve_app.audio.formats import AudioFormat
from serve_app.extension import Dialect, Sample
from serve_app.extensions.live.connection import Connection
from serve_app.extensions.live.session import MAX_UNSPOKEN_CHARS
from serve_app.extensions.live.turns import Audio, Event, Failed, Flushed, Started, Turn

Json = dict[str, object]

_FORMATS = {"audio/pcm": AudioFormat.PCM, "audio/pcmu": AudioFormat.MULAW, "audio/pcma": AudioFormat.ALAW}
_FORMATS |= {"pcm16": AudioFormat.PCM, "g711_ulaw": AudioFormat.MULAW, "g711_alaw": AudioFormat.ALAW}
_TELEPHONE_HZ = 8000
_OUTPUT = {"voice": "voice", "voice.id": "voice", "speed": "speed", "format": None, "format.type": None}
_OUTPUT |= {"format.rate": None}
# Session fields in the current and the previous version of the API.
_NAMES: field_names.Names = {
    **{f"audio.output.{name}": ours for name, ours in _OUTPUT.items()},
    **_OUTPUT,
    **dict.fromkeys(("type", "output_modalities", "modalities", "output_audio_format")),
}
_RESPONSE_NAMES: field_names.Names = {**_NAMES, "input": None, "conversation": None}
_ITEM_NAMES = ("type", "event_id", "item")


class ResponseSocket(Connection):
    """Base class for connections that report turns as responses, in this API and in compatible ones."""

    audio_kind = "response.output_audio"

    async def send_event(self, kind: str, **fields: object) -> None:
        await self.send(kind, event_id=f"event_{secrets.token_hex(8)}", **fields)

    async def tell_error(self, reply: ErrorReply, event_id: object = None) -> None:
        """Send an error. `event_id` identifies the rejected message."""
        await self.send_event("error", error={**reply.envelope()["error"], "event_id": event_id})

    async def tell_begun(self, turn: Turn) -> None:
        place = _place(turn)
        item = {**_item(turn, "in_progress"), "content": []}
        await self.send_event("response.output_item.added", response_id=place["response_id"], output_index=0, item=item)
        await self.send_event("response.content_part.added", **place, part={"type": "audio", "transcript": ""})

    async def tell_audio(self, turn: Turn, data: bytes) -> None:
        await self.send_event(f"{self.audio_kind}.delta", **_place(turn), delta=base64.b64encode(data).decode())

    async def tell_spoken(self, turn: Turn) -> None:
        place, said = _place(turn), turn.text.strip()
        await self.send_event(f"{self.audio_kind}.done", **place)
        await self.send_event(f"{self.audio_kind}_transcript.done", **place, transcript=said)
        await self.send_event("response.content_part.done", **place, part={"type": "audio", "transcript": said})
        item = _item(turn, "completed")
        await self.send_event("response.output_item.done", response_id=place["response_id"], output_index=0, item=item)
        await self.send_event("response.done", response=response(turn, "completed"))


def response(turn: Turn, status: str, details: Mapping[str, object] | None = None) -> Json:
    """Return the response object of `response.created` and `response.done`."""
    shown = {"id": _place(turn)["response_id"], "object": "realtime.response", "status": status}
    if status == "in_progress":
        return {**shown, "status_details": None, "output": [], "usage": None}
    output = [_item(turn, "completed" if status == "completed" else "incomplete")]
    usage = {**turn.usage.tokens, "characters": len(turn.text)}
    ended = {"status_details": details, "finish_reason": turn.usage.finish_reason}
    metadata = {"metadata": {name: str(said) for name, said in turn.usage.answer.items()}}
    return {**shown, **ended, "output": output, "usage": usage, **metadata}


def _item(turn: Turn, status: str) -> Json:
    content = [{"type": "output_audio", "transcript": turn.text.strip()}]
    named = {"id": _place(turn)["item_id"], "object": "realtime.item", "type": "message", "role": "assistant"}
    return {**named, "status": status, "content": content}


def _place(turn: Turn) -> Json:
    own_id = turn.record.request_id
    return {"response_id": f"resp_{own_id}", "item_id": f"item_{own_id}", "output_index": 0, "content_index": 0}


class RealtimeSocket(ResponseSocket):
    """Connection with one response at a time. It ignores `instructions`, which are meant for a language model."""

    def __init__(self, socket: WebSocket, service: SpeechService) -> None:
        super().__init__(socket, service)
        self._model = socket.query_params.get("model") or socket.query_params.get("deployment")
        self._settings: Json = {}  # voice, format, speed
        self._waiting: list[str] = []  # texts of items for which no response has been requested
        self._turn: Turn | None = None  # turn in progress
        self._continuation = self.new_continuation()
        self._event_id: object = None  # ID of the current message

    async def opened(self) -> None:
        await self.send_event("session.created", session=self._session())
        granted = state_of(self.socket).caller.granted
        if granted is not None and granted.session:  # handled like a message from the client
            await self._answer(json.dumps({"type": "session.update", "session": granted.session}))

    async def obey(self, fields: dict[str, object]) -> None:
        self._event_id = fields.get("event_id")
        match fields.get("type"):
            case "session.update":
                await self._update(_object(fields, "session"))
            case "conversation.item.create":
                await self._add_item(_object(fields, "item"), fields)
            case "response.create":
                options = fields.get("response")
                await self._respond(options if isinstance(options, Mapping) else {})
            case "response.cancel":
                await self._cancel()
            case _:
                valid = "session.update, conversation.item.create, response.create or response.cancel"
                raise InvalidRequest(f"type must be {valid}. This server does not accept audio input.", "type")

    async def refuse(self, error: InvalidRequest) -> None:
        event_id, self._event_id = self._event_id, None
        await self.tell_error(translate(error), event_id)

    def _session(self) -> Json:
        shown = {"format": {"type": self._settings.get("format", "audio/pcm"), "rate": _rate(self._settings)}}
        output = {**shown, "voice": self._settings.get("voice"), "speed": self._settings.get("speed", 1.0)}
        named = {"id": f"sess_{self.request_id}", "object": "realtime.session", "type": "realtime"}
        return {**named, "model": self._model, "output_modalities": ["audio"], "audio": {"output": output}}

    async def _update(self, sent: Mapping[str, object]) -> None:
        settings = {**self._settings, **_settings(sent)}
        speech = await self._speech_request(sent, _NAMES, settings)
        self._settings = settings
        await self.send_event("session.updated", session=self._session(), **speech.notes())

    async def _speech_request(
        self, sent: Mapping[str, object], names: field_names.Names, settings: Json
    ) -> SpeechRequest:
        """Create the request for `sent`. `settings` contains all settings collected so far. Raises InvalidRequest."""
        flat = field_names.flat(sent, names)
        rate = _rate(settings)
        reasons = _unspoken("input", flat.get("input"))
        if "instructions" in flat:
            reasons["instructions"] = "text is spoken as written, in the style of the voice"
        for name in ("output_modalities", "modalities"):
            if "audio" not in _list(flat.get(name, ["audio"])):
                reasons[name] = "the output is audio"
        for name in ("audio.output.format.rate", "format.rate"):
            if flat.get(name, rate) != rate:
                reasons[name] = f"the rate of this format is {rate} Hz"
        overrides = {"voice": settings.get("voice"), "speed": settings.get("speed"), "sample_rate": rate}
        delivery = Delivery(_FORMATS[str(settings.get("format", "audio/pcm"))])
        overrides["model"] = self._model
        return await self.service.resolver.lenient_request(
            flat, names, delivery=delivery, overrides=overrides, reasons=reasons
        )

    async def _add_item(self, item: Mapping[str, object], message: Mapping[str, object]) -> None:
        self._waiting += _texts([item])
        if sum(map(len, self._waiting)) > MAX_UNSPOKEN_CHARS:
            self._waiting.clear()
            raise InvalidRequest("Too much text waits. Send response.create first.", "item", "string_above_max_length")
        item_entry = {**item, "id": item.get("id") or f"item_{secrets.token_hex(8)}", "status": "completed"}
        notes = ignored_fields.in_message(ignored_fields.with_unknown(message, _ITEM_NAMES, _unspoken("item", [item])))
        await self.send_event("conversation.item.added", previous_item_id=None, item=item_entry, **notes)
        await self.send_event("conversation.item.done", previous_item_id=None, item=item_entry)

    async def _respond(self, options: Mapping[str, object]) -> None:
        if self._turn is not None:
            code = "conversation_already_has_active_response"
            raise InvalidRequest("Another response is in progress. Cancel it or wait until it ends.", "response", code)
        items = options.get("input")
        text = " ".join(self._waiting if items is None else _texts(items))
        if not text:
            raise InvalidRequest("input_text is missing. Send one.", "response.input", "missing_required_parameter")
        speech = await self._speech_request(options, _RESPONSE_NAMES, {**self._settings, **_settings(options)})
        session = self.new_session(speech, request_id=self.next_id(), live=False, continuation=self._continuation)
        session.append(text)
        self._turn = session.flush()
        session.close()
        self._waiting = self._waiting if items is not None else []
        notes = speech.notes()
        await self.send_event("response.created", response=response(self._turn, "in_progress"), **notes)
        self.start(self.pass_on(session, self._say))

    async def _cancel(self) -> None:
        await self.stop()
        self._continuation.break_off()
        if self._turn is None:
            raise InvalidRequest("There is no response to cancel.", "type", "response_cancel_not_active")
        turn, self._turn = self._turn, None
        details = {"type": "cancelled", "reason": "client_cancelled"}
        await self.send_event("response.done", response=response(turn, "cancelled", details))

    async def _say(self, event: Event) -> None:
        match event:
            case Started(turn):
                await self.tell_begun(turn)
            case Audio(turn, data):
                await self.tell_audio(turn, data)
            case Flushed(turn):
                self._turn = None
                await self.tell_spoken(turn)
            case Failed(error) if self._turn is not None:
                turn, self._turn = self._turn, None
                reply = self.failure(error, turn.record.request_id)
                await self.tell_error(reply)
                details = {"type": "failed", "error": {"type": reply.type, "code": reply.code}}
                await self.send_event("response.done", response=response(turn, "failed", details))


def _object(fields: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = fields.get(name)
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{name} is required. Send an object.", name, "missing_required_parameter")
    return value


def _settings(fields: Mapping[str, object]) -> Json:
    """Return voice, format and speed from fields of the current or previous API version. Raises InvalidRequest."""
    audio = fields.get("audio")
    output = audio.get("output") if isinstance(audio, Mapping) else None
    sent = {**fields, **output} if isinstance(output, Mapping) else dict(fields)
    named, voice = sent.get("format", fields.get("output_audio_format")), sent.get("voice")
    settings: Json = {
        "format": named.get("type") if isinstance(named, Mapping) else named,
        "voice": voice.get("id") if isinstance(voice, Mapping) else voice,
        "speed": sent.get("speed"),
    }
    if (name := settings["format"]) is not None:
        format_named("format", str(name), _FORMATS)
        settings["format"] = str(name).strip().lower()
    return {name: value for name, value in settings.items() if value is not None}


def _rate(settings: Mapping[str, object]) -> int:
    return 24000 if _FORMATS[str(settings.get("format", "audio/pcm"))] is AudioFormat.PCM else _TELEPHONE_HZ


def _texts(items: object) -> list[str]:
    """Return the texts in the user's messages. Raises InvalidRequest if `items` is not a list of objects."""
    if not isinstance(items, list) or not all(isinstance(item, Mapping) for item in items):
        raise InvalidRequest("input must be a list of items.", "response.input")
    return [text for item in items for text in _parts(item) if text]


def _unspoken(where: str, items: object) -> dict[str, str]:
    """Return the ignored fields in messages, and why they are ignored."""
    content = [_list(item.get("content")) if isinstance(item, Mapping) else [] for item in _list(items)]
    spoken = [list(_parts(item)) if isinstance(item, Mapping) else [] for item in _list(items)]
    if all(parts and len(parts) == len(texts) for parts, texts in zip(content, spoken, strict=True)):
        return {}
    return {f"{where}.content": "only input_text is spoken"}


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _parts(item: Mapping[str, object]) -> Iterator[str]:
    for part in _list(item.get("content")):
        if isinstance(part, Mapping) and part.get("type") == "input_text" and isinstance(part.get("text"), str):
            yield part["text"]


_PATHS = ("/v1/realtime", "/openai/v1/realtime", "/openai/realtime")  # the last two are Azure's
_ITEM = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "$text"}]}
DIALECT = Dialect(
    "OpenAI Realtime",
    sockets=tuple((path, RealtimeSocket) for path in _PATHS),
    key_headers=("api-key",),
    key_protocols=("openai-insecure-api-key.",),
    sample=Sample(
        "/v1/realtime?model=gpt-realtime",
        audio_field="delta",
        messages=({"type": "response.create", "response": {"input": [_ITEM]}},),
        clients=('openai (Python):  AsyncOpenAI(websocket_base_url="$sockets/v1", api_key=KEY).realtime.connect(...)',),
    ),
)
