"""The HTTP response that carries speech: its form, its body cut as the audio comes, its end when the client leaves.

No body yields before there is audio, so that an error before the first bytes can still become a status code.
"""

import asyncio
import base64
import json
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise
from typing import ClassVar, Self

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from deployments.errors import Overloaded, PayloadTooLarge
from deployments.protocol import Mark, Marks, ModelInfo, PcmChunk, SynthesisRequest, with_mark
from deployments.serving import metrics
from serve_app.api.callers import FairShare
from serve_app.api.errors import ErrorReply, translate
from serve_app.api.request import SpeechBody
from serve_app.api.request_log import Usage
from serve_app.api.wish import Delivery
from serve_app.audio.formats import AudioFormat, Rendering
from serve_app.speech.word_times import Word, WordTimes

# Bytes of audio of one answer that is sent whole: 23 minutes at 24 kHz, 16 bits.
MAX_WHOLE_BYTES = 64 << 20
# All such answers of this process share so many bytes; one client has half of them. An ingress replica then has a GB.
MAX_ALL_WHOLE_BYTES = 256 << 20
_PART_BYTES = 96 << 10  # of one message; a multiple of 3, so that parts in base64 follow each other
AUDIO_HERE = "audio-in-base64"  # a placeholder: see `object_with`


class Kept:
    """The audio of a whole answer, from its first sample until it is sent; use as a context manager."""

    _room: ClassVar[FairShare] = FairShare(MAX_ALL_WHOLE_BYTES)

    def __init__(self, caller: str) -> None:
        """`caller` is the client's name."""
        self._caller, self._num_bytes = caller, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.keep(0)

    def keep(self, num_bytes: int) -> None:
        """So much is kept from now on. Raises PayloadTooLarge, and Overloaded where other answers take the room."""
        if num_bytes > MAX_WHOLE_BYTES:
            raise PayloadTooLarge(f"A whole answer has at most {MAX_WHOLE_BYTES} bytes of audio; {_REMEDY}.", "stream")
        if num_bytes <= self._num_bytes:
            self._room.give_back(self._caller, self._num_bytes - num_bytes)
        elif not self._room.take(self._caller, num_bytes - self._num_bytes):
            metrics.refused("whole")
            raise Overloaded(f"Whole answers take all memory that they may have now; {_REMEDY}.")
        self._num_bytes = num_bytes

    def expect(self, body: SpeechBody, delivery: Delivery, info: ModelInfo) -> None:
        """Raises as `keep`, before anything is spoken, where there is no room or the audio is known to be too large."""
        if body.ignore_eos and body.sampling.max_new_tokens is not None:
            samples = (body.sampling.max_new_tokens - 1) * info.frame_samples * delivery.rate(info) / info.sample_rate
            sample_bytes = 4 if delivery.audio_format is AudioFormat.FLOAT else 2
            if (num_bytes := int(samples / delivery.speed * sample_bytes)) > MAX_WHOLE_BYTES:
                message = f"max_new_tokens: with ignore_eos the audio has {num_bytes} bytes, a whole answer at most"
                raise PayloadTooLarge(f"{message} {MAX_WHOLE_BYTES}; {_REMEDY}.", "max_new_tokens")
        self.keep(1)
        self.keep(0)


_REMEDY = "ask for a stream, or for less"


async def audio_body(
    chunks: AsyncGenerator[PcmChunk, None],
    rendering: Rendering,
    usage: Usage,
    times: WordTimes | None = None,
    kept: Kept | None = None,
) -> AsyncGenerator[bytes, None]:
    """Bare audio; `usage` and `times` are kept up to date, and `kept` where the rendering is whole."""
    async with aclosing(chunks):
        async for chunk in chunks:
            usage.add(chunk)
            if times is not None:
                times.feed(chunk)
            audio = await rendering.feed(chunk.pcm)
            if kept is not None:
                kept.keep(rendering.num_kept)
            if audio:
                yield audio
    if audio := await rendering.close():
        yield audio


async def event_body(
    chunks: AsyncGenerator[PcmChunk, None],
    rendering: Rendering,
    usage: Usage,
    times: WordTimes | None = None,
    kept: Kept | None = None,
) -> AsyncGenerator[bytes, None]:
    """Audio as server-sent events, with words where `times` are given. An error after the first one is an event too,
    and raised again.
    """
    has_sent = False
    try:
        async with aclosing(audio_body(chunks, rendering, usage, times, kept)) as body:
            async for audio in body:
                has_sent = True
                for part in _parts(audio):
                    yield _delta(part)
                if times is not None and (words := times.take()):
                    yield _words(words)
    except Exception as error:
        if has_sent:
            yield _failed(translate(error))
        raise
    if times is not None and (words := times.take()):
        yield _words(words)
    yield _done(usage)


def _delta(audio: bytes) -> bytes:
    return b'data: {"type":"speech.audio.delta","audio":"' + base64.b64encode(audio) + b'"}\n\n'


def _words(words: list[Word]) -> bytes:
    return _event({"type": "speech.audio.words", "words": word_entries(words)})


def word_entries(words: Iterable[Word]) -> list[dict[str, object]]:
    """As JSON has them: seconds of the audio."""
    return [{"word": word.text, "start": round(word.start_s, 3), "end": round(word.end_s, 3)} for word in words]


def _done(usage: Usage) -> bytes:
    ignored = {"ignored": usage.ignored} if usage.ignored else {}
    return _event({"type": "speech.audio.done", "usage": usage.tokens, **ignored})


def _failed(reply: ErrorReply) -> bytes:
    """The end of a stream that broke after it had begun."""
    return _event({"type": "speech.audio.error", **reply.envelope()})


def _event(fields: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n"


def named_event(fields: Mapping[str, object]) -> bytes:
    """An event that is named for its type, as clients of other services listen for it."""
    return f"event: {fields['type']}\ndata: {json.dumps(fields)}\n\n".encode()


async def collected(parts: AsyncGenerator[bytes, None], kept: Kept) -> bytes:
    """All of a body, which is closed whether or not it came to its end. Raises as `Kept.keep`."""
    content = bytearray()
    async with aclosing(parts):
        async for part in parts:
            content += part
            kept.keep(len(content))
    return bytes(content)


async def in_parts(
    audio: AsyncGenerator[bytes, None], tell: Callable[[bytes], bytes], last: Callable[[], bytes] = bytes
) -> AsyncGenerator[bytes, None]:
    """A body of `tell(part)` for each part of the audio, and then `last()`."""
    async with aclosing(audio):
        async for part in audio:
            yield tell(part)
    if end := last():
        yield end


async def in_whole(
    audio: AsyncGenerator[bytes, None], kept: Kept, tell: Callable[[bytes], Iterable[bytes]]
) -> AsyncGenerator[bytes, None]:
    """A body of `tell(audio)` for the whole audio."""
    with kept:
        for part in tell(await collected(audio, kept)):
            yield part


def object_with(fields: Mapping[str, object], audio: bytes) -> Iterator[bytes]:
    """The JSON object `fields`, in parts, with the audio in base64 where its first AUDIO_HERE stands."""
    before, _, after = json.dumps(fields).partition(AUDIO_HERE)
    yield before.encode()
    for part in _parts(audio):
        yield base64.b64encode(part)
    yield after.encode()


def _parts(content: bytes) -> Iterator[bytes]:
    """Parts that are sent one by one: the connection to a slow reader holds no more than one."""
    return (content[start : start + _PART_BYTES] for start in range(0, len(content), _PART_BYTES))


def start_marks(request: SynthesisRequest, received_ns: int) -> SynthesisRequest:
    """The request, received at `received_ns` of time.time_ns(): every stage on its way will leave a mark of its own."""
    return with_mark(replace(request, marks=(Mark("received", received_ns),)), "request")


def server_timing(marks: Marks) -> str:
    """Milliseconds from each mark to the next, under the name of the latter; the first is a time of day, in seconds."""
    first = marks[0]
    later = [f"{mark.stage};dur={(mark.at_ns - before.at_ns) / 1e6:.3f}" for before, mark in pairwise(marks)]
    return ", ".join([f'{first.stage};desc="{first.at_ns / 1e9:.6f}"', *later])


class SpeechResponse(Response):
    """Starts with the first bytes of `body`: an error before them is raised before any status has been sent.

    `body` is closed in every case, also when the client leaves while a chunk is awaited or sent, which Starlette's
    own streaming response leaves to the garbage collector. A client that left raises ClientDisconnect. An error after
    the start is raised as well, so that the server breaks the connection off instead of ending the body cleanly.
    """

    def __init__(
        self, body: AsyncGenerator[bytes, None], headers: Mapping[str, str], *, usage: Usage, kept: Kept | None = None
    ) -> None:
        """`usage` is that of `body`. With `kept` it is sent whole, with its length."""
        self.status_code = 200
        self.background = None
        self._body = body
        self._kept = kept
        self._usage = usage
        self.init_headers(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Speaks until the audio ends or the client leaves."""
        speaking = asyncio.create_task(self._send_whole(send, self._kept) if self._kept else self._send_stream(send))
        leaving = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((speaking, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            speaking.cancel()
            leaving.cancel()
            await asyncio.wait((speaking, leaving))
        if speaking.cancelled():
            raise ClientDisconnect from (None if leaving.cancelled() else leaving.exception())
        speaking.result()

    async def _send_stream(self, send: Send) -> None:
        async with aclosing(self._body) as body:
            first = await anext(body, b"")
            await _deliver(send, self._start())
            await _deliver(send, _part(first))
            async for part in body:
                await _deliver(send, _part(part))
        await _deliver(send, _part(b"", more=False))

    async def _send_whole(self, send: Send, kept: Kept) -> None:
        with kept:
            content = await collected(self._body, kept)
            self.headers["content-length"] = str(len(content))
            for name, tokens in self._usage.tokens.items():
                self.headers[f"x-vllm-omni-{name.replace('_', '-')}"] = str(tokens)
            await _deliver(send, self._start())
            for part in _parts(content):
                await _deliver(send, _part(part))
            await _deliver(send, _part(b"", more=False))

    def _start(self) -> Message:
        if self._usage.marks:
            marks = (*self._usage.marks, Mark("response", time.time_ns()))
            self.headers["server-timing"] = server_timing(marks)
            metrics.stages(marks)
        return {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}


def _part(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def _deliver(send: Send, message: Message) -> None:
    """Sends; the OSError by which ASGI servers report a closed connection becomes ClientDisconnect."""
    try:
        await send(message)
    except OSError as error:
        raise ClientDisconnect from error


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
