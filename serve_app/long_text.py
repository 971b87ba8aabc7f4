"""Long texts, synthesised in segments that follow each other without a gap."""

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace

from deployments.errors import Overloaded
from deployments.protocol import FinishReason, ModelInfo, PcmChunk, SynthesisRequest
from serve_app.segments import split_text
from serve_app.synthesizer import Synthesizer

_SEED_BYTES = 8


class LongText:
    """A synthesizer for texts of any length, on top of one for texts up to the model's `max_segment_chars`."""

    def __init__(self, synthesizer: Synthesizer, *, patience_s: float = 30.0, pause_s: float = 0.25) -> None:
        """A later segment that is refused is asked for again, every `pause_s`, until it has taken `patience_s`."""
        self._synthesizer = synthesizer
        self._patience_s, self._pause_s = patience_s, pause_s

    async def describe(self) -> ModelInfo:
        """What is loaded."""
        return await self._synthesizer.describe()

    async def synthesize(self, request: SynthesisRequest) -> AsyncGenerator[PcmChunk, None]:
        """The audio of all segments in order. The next segment is asked for as soon as one begins to sound.

        Sampling options hold for each segment on its own: `max_new_tokens` bounds a segment, not the whole.
        `num_text_tokens` counts the segments so far. The finish reason comes with the very last chunk; it is the first
        other than STOP that any segment had.
        """
        info = await self._synthesizer.describe()
        requests = deque(segment_requests(request, info.max_segment_chars))
        tokens_before, cut_short = 0, None
        async with AsyncExitStack() as opened:
            following: _Segment | None = self._begin(requests, opened)
            while following is not None:
                segment, following, tokens = following, None, 0
                while (chunk := await segment.next()) is not None:
                    if following is None and chunk.pcm:
                        following = self._begin(requests, opened)
                    tokens = chunk.num_text_tokens
                    if chunk.finish_reason is not FinishReason.STOP:
                        cut_short = cut_short or chunk.finish_reason
                    is_last = following is None and not requests
                    reason = (cut_short or chunk.finish_reason) if is_last and chunk.finish_reason else None
                    yield replace(chunk, num_text_tokens=tokens_before + tokens, finish_reason=reason)
                tokens_before += tokens
                following = following or self._begin(requests, opened)

    def _begin(self, requests: deque[SynthesisRequest], opened: AsyncExitStack) -> "_Segment | None":
        """Asks for the next segment, if there is one."""
        if not requests:
            return None
        request = requests.popleft()
        ask = self._insist if request.continues else self._synthesizer.synthesize
        segment = _Segment(ask(request))
        opened.push_async_callback(segment.aclose)
        return segment

    async def _insist(self, request: SynthesisRequest) -> AsyncGenerator[PcmChunk, None]:
        """The audio of a segment whose text is being heard: there is the time that the segment before it still plays,
        and even a pause is better than an end in the middle.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._patience_s
        while True:
            begun = False
            try:
                async with aclosing(self._synthesizer.synthesize(request)) as chunks:
                    async for chunk in chunks:
                        begun = True
                        yield chunk
                return
            except Overloaded:
                if begun or loop.time() >= until_s:
                    raise
            await asyncio.sleep(self._pause_s)


class _Segment:
    """One segment's audio. Its first chunk is asked for at once, the others as they are taken."""

    def __init__(self, chunks: AsyncGenerator[PcmChunk, None]) -> None:
        self._chunks = chunks
        self._first = asyncio.create_task(self._advance())
        self._begun = False

    async def next(self) -> PcmChunk | None:
        """The next chunk, None behind the last one."""
        if self._begun:
            return await self._advance()
        self._begun = True
        return await self._first

    async def aclose(self) -> None:
        """Cancels everything behind it."""
        self._first.cancel()
        await asyncio.wait((self._first,))
        if not self._first.cancelled():
            self._first.exception()  # of a segment that nobody waited for: its loss needs no log
        await self._chunks.aclose()

    async def _advance(self) -> PcmChunk | None:
        return await anext(self._chunks, None)


def segment_requests(request: SynthesisRequest, max_chars: int) -> list[SynthesisRequest]:
    """The request itself if its text is short enough; else one for each segment.

    A later segment continues what is being heard. Its id is the request's with its number behind it, its seed follows
    from the request's seed and the number: the same request makes the same segments.
    """
    first, *later = split_text(request.text, max_chars) or [request.text]
    return [replace(request, text=first, following=tuple(later))] + [
        replace(
            request,
            request_id=f"{request.request_id}.{number}",
            text=text,
            seed=_seed(request.seed, number),
            continues=True,
        )
        for number, text in enumerate(later, start=2)
    ]


def _seed(seed: int, number: int) -> int:
    digest = hashlib.blake2b(f"{seed}.{number}".encode(), digest_size=_SEED_BYTES)
    return int.from_bytes(digest.digest())
