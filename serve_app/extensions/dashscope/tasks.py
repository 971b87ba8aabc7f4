"""Alibaba's SpeechSynthesizer API for CosyVoice and Qwen-Audio: tasks on a WebSocket, or one text over HTTP."""

from collections.abc import Mapping
from typing import ClassVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from deployments.errors import InvalidRequest
from deployments.protocol import FinishReason
from serve_app.api.error_replies import ErrorReply, translate
from serve_app.api.parsing import field_names
from serve_app.api.parsing.client_input import switch, text_of
from serve_app.api.resolve.speech_request import SpeechRequest
from serve_app.api.speech_service import SpeechService
from serve_app.extension import Dialect, Route, Sample
from serve_app.extensions.dashscope.dashscope import answer, read_text, speech_request
from serve_app.extensions.live.connection import Connection, unknown_type
from serve_app.extensions.live.contexts import MAX_NAME_CHARS
from serve_app.extensions.live.session import Session
from serve_app.extensions.live.turns import Audio, Done, Event, Failed, Flushed, Rest, Turn

Json = dict[str, object]

_PLACES = ("parameters", "input")
_NAMES: field_names.Names = {
    "voice": "voice",
    "instruction": "instructions",
    "language_hints": "language",
    "language_type": "language",
    "sample_rate": "sample_rate",
    "rate": "speed",
    "seed": "seed",
    **dict.fromkeys(("format", "bit_rate", "text_type", "enable_ssml")),
}
_UNHEARD = {"volume": 50, "pitch": 1, "type": 0, "word_timestamp_enabled": False}  # and the values that SDKs send
_ALL_NAMES: field_names.Names = {
    "model": "model",
    "input.text": "input",
    **dict.fromkeys(("task_group", "task", "function")),
    **{f"{where}.{name}": ours for where in _PLACES for name, ours in {**_NAMES, **dict.fromkeys(_UNHEARD)}.items()},
}
_PART: Json = {"type": "sentence-synthesis", "sentence": {}}  # without it, clients skip the event's audio


async def speak_text(service: SpeechService, request: Request) -> Response:
    """Speak `input.text` as MP3 in a JSON body or, with `X-DashScope-SSE: enable`, in server-sent events."""
    sent = await read_text(service, request, _ALL_NAMES)
    return await answer(service, request, await _speech_request(service, sent, str(sent["input.text"])), _PART)


async def _speech_request(service: SpeechService, sent: Mapping[str, object], text: str) -> SpeechRequest:
    """Create the request for a task or a body. The SDK always sends `enable_ssml`, so only `<speak>` marks SSML.

    Raises InvalidRequest.
    """
    known: Json = dict(sent)
    reasons: dict[str, str] = {}
    is_ssml = False
    for name in [name for name in sent if name.partition(".")[0] in _PLACES]:
        short, value = name.partition(".")[2], sent[name]
        if short in _UNHEARD and value != _UNHEARD[short]:
            reasons[name] = "it has no effect here"
        elif short == "language_hints" and isinstance(value, list):
            known[name] = value[0] if value else None
        elif short == "enable_ssml":
            is_ssml = switch({short: value}, short) and _is_ssml(text)
        elif (short in ("sample_rate", "bit_rate") and value == 0) or str(value).lower() == "default":
            del known[name]
    overrides = {"markup": "ssml"} if is_ssml else {}
    return await speech_request(service, known, _ALL_NAMES, overrides=overrides, reasons=reasons, default="mp3")


def _is_ssml(text: str) -> bool:
    return text.lstrip().startswith("<speak")


class TaskSocket(Connection):
    """One task at a time: `run-task`, its texts, `finish-task`. All audio of a task is one stream of binary messages,
    which do not contain the task's ID.
    """

    text_fields: ClassVar[tuple[str, ...]] = ("payload.input.text",)

    def __init__(self, socket: WebSocket, service: SpeechService) -> None:
        super().__init__(socket, service)
        self._named: str | None = None  # ID in the last message
        self._task: str | None = None  # ID of the running task
        self._sent: Json = {}  # fields of its run-task message
        self._speech: SpeechRequest | None = None  # built from these fields
        self._session: Session | None = None  # opened by its first text
        self._samples_per_s, self._num_chars = 1.0, 0

    @property
    def is_busy(self) -> bool:
        return self._session is not None and self._session.is_speaking

    async def obey(self, fields: dict[str, object]) -> None:
        header, payload = _object(fields, "header"), fields.get("payload")
        payload = payload if isinstance(payload, Mapping) else {}
        self._named = text_of(header, "task_id")[:MAX_NAME_CHARS]
        if (action := header.get("action")) == "run-task":
            await self._begin(payload, is_whole=header.get("streaming") == "out")
        elif action not in ("continue-task", "finish-task"):
            raise unknown_type("run-task", "continue-task", "finish-task")
        elif action == "continue-task":
            self._check_task()
            await self._write(_object(payload, "input"))
        elif payload.get("input") != {"directive": "cancel"}:
            self._check_task()
            await self._end_text()
        elif self._task == self._named:  # otherwise, its final message is already on its way
            await self.stop()
            await self._tell_finished("cancelled", {})

    async def refuse(self, error: InvalidRequest) -> None:
        """End the task with an error, as clients expect. The WebSocket then accepts another task."""
        if self._named in (None, self._task):
            await self.stop()
            self._task = self._session = None
        await self._tell_failed(self._named, translate(error))

    async def tell_error(self, reply: ErrorReply) -> None:
        await self._tell_failed(self._task or self._named, reply)

    async def _begin(self, payload: Mapping[str, object], *, is_whole: bool) -> None:
        if self._task is not None:
            raise InvalidRequest("task_id: another task is running. Finish it, or open another WebSocket.", "task_id")
        sent = field_names.flat(payload, _ALL_NAMES)
        text = sent.pop("input.text", None)
        self._speech = await _speech_request(self.service, sent, "")
        self._task, self._sent, self._session, self._num_chars = self._named, sent, None, 0
        await self._tell("task-started", self._task, {}, **self._speech.notes())
        if isinstance(text, str):
            await self._write({"text": text})
        if is_whole:
            await self._end_text()

    async def _write(self, sent: Mapping[str, object]) -> None:
        if "text" in sent or "flush" not in sent:
            text = text_of(sent)
            if self._session is None:
                speech = self._speech
                if speech is None or _is_ssml(text):  # `enable_ssml` then applies
                    speech = await _speech_request(self.service, self._sent, text)
                self._session = self.new_session(speech, request_id=self.next_id())
                self._samples_per_s = speech.info.sample_rate * speech.body.speed
                self.start(self._speak(self._session))
            self._session.append(text)
        if switch(sent, "flush") and self._session is not None and self._session.is_writing:
            self._session.flush()

    def _check_task(self) -> None:
        if self._task != self._named:
            raise InvalidRequest("task_id: this task is not running. Send run-task first.", "task_id")

    async def _end_text(self) -> None:
        if self._session is None:
            await self._tell_finished(FinishReason.STOP, {})
        else:
            self._session.close()

    async def _speak(self, session: Session) -> None:
        try:
            await self.pass_on(session, self._say)
        except InvalidRequest as error:
            task, self._task, self._session = self._task, None, None
            await self._tell_failed(task, translate(error))

    async def _say(self, event: Event) -> None:
        match event:
            case Audio(_, data) | Rest(data):
                await self.socket.send_bytes(data)
            case Flushed(turn):
                self._num_chars += len(turn.text)
                await self._tell("result-generated", self._task, self._payload(self._sentence(turn)))
            case InvalidRequest() as refused:
                raise refused
            case Failed(error):
                await self.tell_error(self.failure(error, self.request_id))
                await self.end_for(error)
            case Done(reason, answer):
                await self._tell_finished(reason, answer)

    async def _tell_finished(self, reason: str, answer: Mapping[str, object]) -> None:
        task, self._task, self._session = self._task, None, None
        await self._tell("task-finished", task, self._payload(None), finish_reason=reason, **answer)

    async def _tell_failed(self, task: str | None, reply: ErrorReply) -> None:
        named = {"error_code": reply.code, "error_message": reply.message}
        await self._tell("task-failed", task, {}, named, **reply.envelope())

    async def _tell(
        self, kind: str, task: str | None, payload: Json, named: Mapping[str, object] | None = None, /, **more: object
    ) -> None:
        header = {"task_id": task or "", "event": kind, "attributes": {}, **(named or {})}
        await self.send(kind, header=header, payload=payload, **more)

    def _payload(self, output: Json | None) -> Json:
        return {"output": output, "usage": {"characters": self._num_chars}}

    def _sentence(self, turn: Turn) -> Json:
        """Describe a spoken turn. Times are in milliseconds from the start of the task's audio."""
        begin_s = turn.start_s or 0.0
        end_s = begin_s + turn.usage.samples / self._samples_per_s
        times = {"begin_time": round(1000 * begin_s), "end_time": round(1000 * end_s)}
        return {"type": "sentence-end", "original_text": turn.text, "sentence": {"index": turn.number - 1, **times}}


def _object(fields: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = fields.get(name)
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{name} is required, as an object.", name, "missing_required_parameter")
    return value


def task_message(action: str, **payload: object) -> Json:
    """Message from a client."""
    return {"header": {"action": action, "task_id": "check", "streaming": "duplex"}, "payload": payload}


_PARAMETERS = {"voice": "$voice", "format": "pcm", "sample_rate": 24000, "text_type": "PlainText"}
DIALECT = Dialect(
    "DashScope, SpeechSynthesizer",
    routes=(Route("POST /api/v1/services/audio/tts/SpeechSynthesizer", speak_text, "Speak a text (CosyVoice)"),),
    sockets=(("/api-ws/v1/inference", TaskSocket),),
    sample=Sample(
        "/api-ws/v1/inference",
        messages=(
            task_message("run-task", model="cosyvoice-v3-flash", input={}, parameters=_PARAMETERS),
            task_message("continue-task", input={"text": "$text"}),
            task_message("finish-task", input={}),
        ),
        clients=('dashscope:        SpeechSynthesizer(model=..., voice=..., url="$sockets/api-ws/v1/inference")',),
    ),
)
