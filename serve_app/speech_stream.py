"""The body of a speech response, cut as the audio comes.

Nothing is yielded before there is audio: whoever awaits the first bytes can still answer an error with a status code.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from deployments.protocol import FinishReason, PcmChunk
from serve_app import sse
from serve_app.errors import translate
from serve_app.rendering import Rendering


@dataclass(slots=True)
class Usage:
    """What a stream has consumed and produced so far."""

    input_tokens: int = 0
    frames: int = 0
    finish_reason: FinishReason | None = None

    def add(self, chunk: PcmChunk) -> None:
        """Counts one more chunk."""
        self.input_tokens = chunk.num_text_tokens
        self.frames += len(chunk.codes)
        self.finish_reason = chunk.finish_reason


async def audio_body(
    chunks: AsyncGenerator[PcmChunk, None], rendering: Rendering, usage: Usage
) -> AsyncGenerator[bytes, None]:
    """Bare audio; `usage` is kept up to date."""
    async with aclosing(chunks):
        async for chunk in chunks:
            usage.add(chunk)
            if audio := await rendering.feed(chunk.pcm):
                yield audio
    if audio := await rendering.close():
        yield audio


async def event_body(chunks: AsyncGenerator[PcmChunk, None], rendering: Rendering) -> AsyncGenerator[bytes, None]:
    """Audio as server-sent events. An error after the first one is an event too, and raised again."""
    begun, usage = False, Usage()
    try:
        async with aclosing(audio_body(chunks, rendering, usage)) as body:
            async for audio in body:
                begun = True
                yield sse.delta(audio)
    except Exception as error:
        if begun:
            yield sse.failed(translate(error))
        raise
    yield sse.done(usage.input_tokens, usage.frames)
