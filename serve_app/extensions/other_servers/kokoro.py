"""Kokoro-FastAPI's `/dev/captioned_speech`, which returns audio with word times."""

import base64
import json
from collections.abc import AsyncGenerator
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.context import state_of
from serve_app.api.responses.events import in_parts
from serve_app.api.responses.respond import respond
from serve_app.api.responses.speech_response import StreamedFormat, WholeFormat
from serve_app.api.speech_service import SpeechService
from serve_app.extension import Dialect, Route, Sample
from serve_app.speech.observers import WordSource, marked

# Fields for parts that every response contains, with the only value that each supports.
_ALWAYS = {"word_timestamps": True, "return_timestamps": True, "return_timing": True, "stream_format": "audio"}


async def speak(service: SpeechService, request: Request) -> Response:
    """Speak `input`, and respond with lines of JSON, or with one line if `stream` is false.

    Each line contains the words that end in its audio. The last line contains the finish reason.
    """
    fields = await service.read_fields(request)
    for name in [name for name, value in _ALWAYS.items() if fields.get(name) == value]:
        del fields[name]
    reasons = {name: "the response is always JSON lines with times" for name in _ALWAYS if name in fields}
    overrides = {"word_timestamps": True, "stream_format": "audio"}
    speech = await service.resolver.strict_request(fields, overrides=overrides, reasons=reasons)
    audio_format = speech.delivery.audio_format
    usage = state_of(request).record.usage

    def as_lines(audio: AsyncGenerator[bytes, None], times: WordSource | None) -> AsyncGenerator[bytes, None]:
        line = partial(_line, times=times, audio_format=audio_format)
        return in_parts(audio, line, lambda: line(b"", finish_reason=usage.finish_reason))

    if speech.delivery.whole:
        one_line = WholeFormat("application/json", lambda audio, times: [_line(audio, times, audio_format)])
        return await respond(service, request, speech, one_line)
    return await respond(service, request, speech, StreamedFormat("application/x-ndjson", as_lines))


def _line(audio: bytes, times: WordSource | None, audio_format: str, **more: object) -> bytes:
    words = [] if times is None else times.take()
    timestamps = [
        {"word": word.text, "start_time": round(word.start_s, 3), "end_time": round(word.end_s, 3)} for word in words
    ]
    fields = {"audio": base64.b64encode(audio).decode(), "audio_format": audio_format, "timestamps": timestamps}
    return json.dumps({**fields, **marked(words), **more}).encode() + b"\n"


DIALECT = Dialect(
    "Kokoro-FastAPI",
    routes=(Route("POST /dev/captioned_speech", speak, "Speak a text with word times"),),
    sample=Sample(
        "/dev/captioned_speech",
        body={"input": "$text", "voice": "$voice"},
        clients=("Kokoro-FastAPI:   $url/dev/captioned_speech, $url/v1",),
    ),
)
