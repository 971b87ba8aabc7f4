"""HTTP responses with speech, as raw audio or events, streamed or complete.

A body yields nothing until the first audio, so an earlier error can still set the status code.
"""

import asyncio
import base64
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from deployments.errors import TalkrayError
from deployments.protocol import Marks, PcmChunk
from serve_app.api.error_replies import ErrorReply, translate
from serve_app.api.headers import FINISH_HEADER, SEED_HEADER, TOKENS_HEADER
from serve_app.api.request_record import Usage
from serve_app.api.resolve.ignored_fields import Reasons, in_message
from serve_app.api.responses.whole_audio import PART_BYTES, ByteQuota, parts_of, read_all
from serve_app.audio.formats import Rendering
from serve_app.speech.observers import Word, WordSource, marked, word_entries

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StreamedFormat:
    """A dialect's response format, built from audio and words as they arrive."""

    content_type: str
    make: Callable[[AsyncGenerator[bytes, None], WordSource | None], AsyncGenerator[bytes, None]]


@dataclass(frozen=True, slots=True)
class WholeFormat:
    """A dialect's response format, built from the complete audio and words."""

    content_type: str
    make: Callable[[bytes, WordSource | None], Iterable[bytes]]


OwnFormat = StreamedFormat | WholeFormat


@dataclass(frozen=True, slots=True)
class WholeAttempt:
    """Attempt to synthesize a complete response. A second attempt uses another seed."""

    body: AsyncGenerator[bytes, None]
    usage: Usage  # updated while `body` is read
    whole: WholeFormat | None = None  # None: the response is the audio itself
    times: WordSource | None = None  # word timestamps for `body`
    discard: Callable[[], None] = lambda: None  # called if the response is not sent

    def parts(self, content: bytes) -> Iterable[bytes]:
        """Return the parts of the response, built from the collected `body`."""
        return parts_of(content) if self.whole is None else self.whole.make(content, self.times)


async def audio_body(
    chunks: AsyncGenerator[PcmChunk, None],
    rendering: Rendering,
    usage: Usage,
    times: WordSource | None = None,
    quota: ByteQuota | None = None,
) -> AsyncGenerator[bytes, None]:
    """Yield raw audio. Each chunk updates `usage` and `times`; `quota` counts the bytes of a complete response."""
    async with aclosing(chunks):
        async for chunk in chunks:
            usage.add(chunk)
            if times is not None:
                times.feed(chunk)
            audio = await rendering.feed(chunk.pcm)
            if quota is not None:
                quota.hold(rendering.num_kept)
            if audio:
                yield audio
    if audio := await rendering.close():
        yield audio


async def event_body(
    chunks: AsyncGenerator[PcmChunk, None],
    rendering: Rendering,
    usage: Usage,
    times: WordSource | None = None,
    quota: ByteQuota | None = None,
    *,
    ignored: Reasons,
) -> AsyncGenerator[bytes, None]:
    """Yield audio as server-sent events, with words if `times` is given. The last event lists the `ignored` fields.

    An error after the first event is sent as an event and raised again.
    """
    has_sent = False
    try:
        async with aclosing(audio_body(chunks, rendering, usage, times, quota)) as body:
            async for audio in body:
                has_sent = True
                for part in parts_of(audio):
                    yield _delta(part)
                if times is not None and (words := times.take()):
                    yield _words(words)
    except Exception as error:
        if has_sent:
            yield _failed(translate(error))
        raise
    if times is not None and (words := times.take()):
        yield _words(words)
    yield _done(usage, ignored)


def _delta(audio: bytes) -> bytes:
    return b'data: {"type":"speech.audio.delta","audio":"' + base64.b64encode(audio) + b'"}\n\n'


def _words(words: list[Word]) -> bytes:
    return _event({"type": "speech.audio.words", "words": word_entries(words), **marked(words)})


def _done(usage: Usage, ignored: Reasons) -> bytes:
    end = {"usage": usage.tokens, "finish_reason": usage.finish_reason, **usage.answer}
    return _event({"type": "speech.audio.done", **end, **in_message(ignored)})


def _failed(reply: ErrorReply) -> bytes:
    return _event({"type": "speech.audio.error", **reply.envelope()})


def _event(fields: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n"


def server_timing(marks: Marks) -> str:
    """Return a Server-Timing header with the milliseconds between consecutive marks, each named after the later one.
    The first entry is the time of day in seconds.
    """
    (first, first_ns), *_ = marks
    later = [f"{stage};dur={(at_ns - before_ns) / 1e6:.3f}" for (_, before_ns), (stage, at_ns) in pairwise(marks)]
    return ", ".join([f'{first};desc="{first_ns / 1e9:.6f}"', *later])


class SpeechResponse(Response):
    """Response that sends its status with the first bytes of `body`, so that an earlier error can still set it.

    An error after the first bytes is raised, and the server then aborts the connection, so the client sees an
    incomplete body. Raises ClientDisconnect if the client disconnects. `body` is always closed; Starlette's
    StreamingResponse would leave this to the garbage collector if the client disconnects early.
    """

    def __init__(self, body: AsyncGenerator[bytes, None], headers: Mapping[str, str], *, usage: Usage) -> None:
        """Create the response. Reading `body` updates `usage`."""
        self.status_code = 200  # Starlette's constructor would render the body
        self.background = None
        self._body, self._usage = body, usage
        self.init_headers(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(self._send(send), receive)

    async def _send(self, send: Send) -> None:
        async with aclosing(self._body) as body:
            first = await anext(body, b"")
            await _deliver(send, self._start())
            await _deliver(send, _part(first))
            async for part in body:
                await _deliver(send, _part(part))
        await _deliver(send, _part(b"", more=False))

    def _start(self) -> Message:
        if SEED_HEADER in self.headers:  # the first chunk may have changed the seed
            self.headers[SEED_HEADER] = str(self._usage.seed)
        self._usage.mark_response()
        if self._usage.marks and self._usage.tells_timing:
            self.headers["server-timing"] = server_timing(self._usage.marks)
        return {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}


class WholeResponse(SpeechResponse):
    """Response that sends speech once it is complete, with headers that report how synthesis ended."""

    def __init__(
        self,
        attempt: WholeAttempt,
        headers: Mapping[str, str],
        *,
        quota: ByteQuota,
        redraw: Callable[[], WholeAttempt | None] = lambda: None,
    ) -> None:
        """Create the response. `quota` counts the bytes in memory. `redraw` makes a second attempt once the first has
        ended, or returns None to send the first.
        """
        super().__init__(attempt.body, headers, usage=attempt.usage)
        self._attempt, self._quota, self._redraw = attempt, quota, redraw

    async def _send(self, send: Send) -> None:
        with self._quota as quota:
            attempt = self._attempt
            content = await read_all(self._body, quota)
            if (second := self._redraw()) is not None:
                attempt, content = await self._read_second(second, content)
            if attempt.whole is None:
                self.headers["content-length"] = str(len(content))
            if self._usage.finish_reason is not None:
                self.headers[FINISH_HEADER] = self._usage.finish_reason
            for name, tokens in self._usage.tokens.items():
                self.headers[TOKENS_HEADER.format(name.replace("_", "-"))] = str(tokens)
            await _deliver(send, self._start())
            for part in attempt.parts(content):
                await _deliver(send, _part(part))
            await _deliver(send, _part(b"", more=False))

    async def _read_second(self, second: WholeAttempt, content: bytes) -> tuple[WholeAttempt, bytes]:
        """Read the second attempt. If it fails, keep the first attempt, which ended badly and has not been sent."""
        try:
            content = await read_all(second.body, self._quota, beside=len(content))
        except TalkrayError as error:
            second.discard()
            logger.warning("the redraw of a bad response (%s) failed: %s", self._usage.finish_reason, error)
            return self._attempt, content
        self._usage.become(second.usage)
        return second, content


async def while_connected(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Return the result of `work`. If the client disconnects, cancel `work` and raise ClientDisconnect."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait((working, leaving))
    if working.cancelled():
        raise ClientDisconnect from (None if leaving.cancelled() else leaving.exception())
    return working.result()


def _part(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def _deliver(send: Send, message: Message) -> None:
    """Send a message. Raises ClientDisconnect instead of the OSError with which ASGI servers report a closed
    connection. Yields to other streams after each large part, because `send` returns immediately if the client reads
    quickly.
    """
    try:
        await send(message)
    except OSError as error:
        raise ClientDisconnect from error
    if len(message.get("body", b"")) >= PART_BYTES:
        await asyncio.sleep(0)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
