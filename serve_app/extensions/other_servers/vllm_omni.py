"""vLLM-Omni's API in addition to `/v1/audio/speech`: utterances over a WebSocket, and batches of texts over HTTP."""

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from deployments.errors import InvalidRequest, NotReady, Overloaded, TalkrayError
from serve_app.api.context import state_of
from serve_app.api.error_replies import ErrorReply, translate
from serve_app.api.parsing.client_input import switch, text_of
from serve_app.api.request_record import Usage
from serve_app.api.resolve.speech_request import CONTENT_TYPES
from serve_app.api.responses.speech_response import SpeechResponse, audio_body
from serve_app.api.responses.whole_audio import AUDIO_HERE, ByteQuota, object_with, read_all
from serve_app.api.speech_service import SpeechService
from serve_app.audio.formats import AudioFormat
from serve_app.extension import Dialect, Route, Sample
from serve_app.extensions.continuity.tails import PREVIOUS
from serve_app.extensions.live.connection import ConversationConnection, always_streamed, unknown_type
from serve_app.extensions.live.turns import Audio, Event, Flushed, Started

Json = dict[str, object]

MAX_ITEMS = 64


async def speak_all(service: SpeechService, request: Request) -> Response:
    """Speak `items` in order. The body's other fields are defaults for each item's fields."""
    fields = await service.read_fields(request)
    items = fields.pop("items", None)
    if not isinstance(items, list) or not 0 < len(items) <= MAX_ITEMS:
        raise InvalidRequest(f"items must be a list of 1 to {MAX_ITEMS} objects.", "items")
    usage = state_of(request).record.usage
    headers = {"content-type": "application/json"}
    return SpeechResponse(_spoken(request, service, fields, items), headers, usage=usage)


async def _spoken(
    request: Request, service: SpeechService, fields: Json, items: Sequence[object]
) -> AsyncGenerator[bytes, None]:
    """Yield the JSON body. The result of a failed item contains its error. If the server has no capacity for the first
    item, reject the entire batch.

    Send each result as soon as it is ready, so that only one item is in memory.
    """
    num_failed = 0
    for index, item in enumerate(items):
        with ByteQuota(state_of(request).caller.name) as quota:
            result: Json = {"index": index}
            audio = b""
            try:
                if index:
                    state_of(request).caller.count_request()
                item_fields = {**fields, **_fields(item)}
                spoken, audio = await _speak_item(request, service, item_fields, quota, number=index + 1)
                result |= {"status": "success", **spoken}
            except TalkrayError as error:
                if not index and isinstance(error, Overloaded | NotReady):
                    raise
                num_failed += 1
                result |= {"status": "error", "error": translate(error).message}
            if index:
                yield b", "
            else:
                yield json.dumps({"id": state_of(request).record.request_id, "results": []}).removesuffix("]}").encode()
            for part in object_with(result, audio):
                yield part
    counts = {"total": len(items), "succeeded": len(items) - num_failed, "failed": num_failed}
    yield b"], " + json.dumps(counts).removeprefix("{").encode()


def _fields(item: object) -> Json:
    if not isinstance(item, Mapping):
        raise InvalidRequest("items must be a list of objects.", "items")
    overrides = item.get("overrides")
    own = {**item, **(overrides if isinstance(overrides, Mapping) else {})}
    return {name: value for name, value in own.items() if value is not None and name != "overrides"}


async def _speak_item(
    request: Request, service: SpeechService, fields: Json, quota: ByteQuota, *, number: int
) -> tuple[Json, bytes]:
    """Speak an item. Return its result, with AUDIO_HERE instead of the audio, and the audio."""
    wants_stream = {"stream": fields.get("stream") is True, "stream_format": fields.get("stream_format") == "sse"}
    reasons = {name: "batch items are not streamed" for name, is_asked in wants_stream.items() if is_asked}
    if fields.get(PREVIOUS) is not None:
        reasons[PREVIOUS] = "batch items do not continue other requests"
    speech = await service.resolver.strict_request(
        fields, default=AudioFormat.WAV, reasons=reasons, overrides={PREVIOUS: None}
    )
    utterance = await service.prepare_utterance(request, speech)
    utterance = utterance.changed(request_id=f"{utterance.synthesis.request_id}-{number}")
    usage = Usage()
    rendering = replace(speech.delivery, whole=True).rendering(speech.info)
    quota.expect(speech.body, speech.delivery, speech.info)
    content = await read_all(
        audio_body(service.models.of(utterance).speak(utterance, speech.info), rendering, usage, quota=quota), quota
    )
    state_of(request).record.usage.include(usage)
    audio_fields = {"audio_data": AUDIO_HERE, "media_type": CONTENT_TYPES[speech.delivery.audio_format]}
    return {**audio_fields, "usage": usage.tokens, **speech.notes()}, content


class OmniSocket(ConversationConnection):
    """Connection that speaks the text before each `input.done` as one utterance, reported as one sentence."""

    takes_recordings = True
    first_message = "session.config"

    def __init__(self, socket: WebSocket, service: SpeechService) -> None:
        super().__init__(socket, service)
        self._format: Json = {}
        self._num_bytes = self._num_done = 0

    async def obey(self, fields: dict[str, object]) -> None:
        match fields.get("type"):
            case "session.config":
                await self._configure(fields)
            case "input.text":
                text = text_of(fields)
                self.session.append(text)
            case "input.done":
                self.session.flush()
            case "session.close":
                if self._session is None:
                    await self.end()
                else:
                    self._session.close()
            case _:
                raise unknown_type("session.config", "input.text", "input.done", "session.close")

    async def tell_error(self, reply: ErrorReply) -> None:
        details = {"message": reply.message, "code": reply.code, "partial_audio": self._num_bytes > 0}
        await self.send("error", **details, action="discard")

    async def _configure(self, fields: Json) -> None:
        if self._session is not None:
            raise InvalidRequest("session.config is allowed only once. Open another socket.", "type")
        sent = {name: value for name, value in fields.items() if name != "type"}
        reasons = always_streamed(sent)
        if sent.get("stream_audio") is True:
            del sent["stream_audio"]
        if switch(sent, "word_timestamps"):
            reasons["word_timestamps"] = "not supported by this protocol"
        overrides = {"input": "", "word_timestamps": False}
        speech = await self.service.resolver.strict_request(
            sent, default=AudioFormat.WAV, overrides=overrides, reasons=reasons
        )
        self._format = {"format": speech.delivery.audio_format, "sample_rate": speech.delivery.rate(speech.info)}
        self._format |= speech.notes()
        self.converse(replace(speech, delivery=replace(speech.delivery, files=True)))

    async def say(self, event: Event) -> None:
        number = {"utterance_index": self._num_done}
        match event:
            case Started(turn):
                text = turn.text.strip() if turn.is_complete else ""
                await self.send("audio.start", **number, sentence_index=0, sentence_text=text, **self._format)
            case Audio(_, data):
                self._num_bytes += len(data)
                await self.socket.send_bytes(data)
            case Flushed(turn):
                num_bytes, self._num_bytes = self._num_bytes, 0
                self._num_done += 1
                await self.send("audio.done", **number, sentence_index=0, total_bytes=num_bytes, error=False)
                tokens = {"input_tokens": turn.usage.input_tokens, "output_tokens": turn.usage.frames}
                notes = {"usage": tokens, "finish_reason": turn.finish_reason, **turn.usage.answer}
                await self.send("session.done", **number, total_sentences=1, **notes)


DIALECT = Dialect(
    "vLLM-Omni",
    routes=(Route("POST /v1/audio/speech/batch", speak_all, "Speak several texts"),),
    sockets=(("/v1/audio/speech/stream", OmniSocket),),
    sample=Sample(
        "/v1/audio/speech/stream",
        messages=(
            {"type": "session.config", "voice": "$voice", "response_format": "pcm"},
            {"type": "input.text", "text": "$text"},
            {"type": "input.done"},
        ),
        clients=("vLLM-Omni:        $sockets/v1/audio/speech/stream, $url/v1/audio/speech/batch",),
    ),
)
