"""Kokoro-FastAPI besides `/v1/audio/speech`: `/dev/captioned_speech`, audio with the time of each word."""

import base64
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from serve_app.dialects.openai_speech import spelled, wished
from serve_app.speaker import Speaker, read_object
from serve_app.word_times import WordTimes

_KNOWN = ("return_timestamps", "return_timing")  # they always come


def routes(speaker: Speaker) -> APIRouter:
    """`POST /dev/captioned_speech`."""
    router = APIRouter()

    @router.post("/dev/captioned_speech", summary="Speak a text, with times of its words", response_class=Response)
    async def speak(request: Request) -> Response:
        """Speaks `input` as lines of JSON, one line with `stream` false; a word stands in the line where it ends."""
        fields = {**spelled(await read_object(request, speaker)), "word_timestamps": True, "stream_format": "audio"}
        wish = await wished(speaker, {name: fields[name] for name in fields if name not in _KNOWN}, words=True)
        audio_format = wish.delivery.audio_format

        def as_lines(audio: AsyncGenerator[bytes, None], times: WordTimes | None) -> AsyncGenerator[bytes, None]:
            return _lines(audio, times, audio_format)

        kind = "application/json" if wish.delivery.whole else "application/x-ndjson"
        return await speaker.respond(request, wish, as_body=as_lines, content_type=kind)

    return router


async def _lines(
    audio: AsyncGenerator[bytes, None], times: WordTimes | None, audio_format: str
) -> AsyncGenerator[bytes, None]:
    async with aclosing(audio):
        async for part in audio:
            yield _line(part, times, audio_format)
    if times is not None and times.has_told:
        yield _line(b"", times, audio_format)


def _line(audio: bytes, times: WordTimes | None, audio_format: str) -> bytes:
    timestamps = [
        {"word": word.text, "start_time": round(word.start_s, 3), "end_time": round(word.end_s, 3)}
        for word in (times.take() if times is not None else ())
    ]
    told = {"audio": base64.b64encode(audio).decode(), "audio_format": audio_format, "timestamps": timestamps}
    return json.dumps(told).encode() + b"\n"
