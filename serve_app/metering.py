"""What listeners experience, measured where audio leaves: once around the application, once around the synthesizer."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments import metrics
from deployments.protocol import ModelInfo, PcmChunk, SynthesisRequest
from serve_app.synthesizer import Synthesizer

_SAMPLE_BYTES = 2


class FirstByteMeter:
    """ASGI middleware: time to the first byte of every answer that is speech."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the call on."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        began_s, succeeds, begun = time.perf_counter(), False, False

        async def metered_send(message: Message) -> None:
            nonlocal succeeds, begun
            if message["type"] == "http.response.start":
                succeeds = message["status"] == 200
            elif succeeds and not begun and message.get("body"):
                begun = True
                metrics.first_byte(time.perf_counter() - began_s)
            await send(message)

        await self._app(scope, receive, metered_send)


class MeteredSynthesizer:
    """A synthesizer whose streams are compared with a player that has no buffer."""

    def __init__(self, synthesizer: Synthesizer) -> None:
        self._synthesizer = synthesizer

    async def describe(self) -> ModelInfo:
        """What is loaded."""
        return await self._synthesizer.describe()

    async def synthesize(self, request: SynthesisRequest) -> AsyncGenerator[PcmChunk, None]:
        """What the synthesizer yields."""
        sample_rate = (await self._synthesizer.describe()).sample_rate
        meter = metrics.StreamMeter()
        async with aclosing(self._synthesizer.synthesize(request)) as chunks:
            async for chunk in chunks:
                if chunk.pcm:
                    meter.deliver(len(chunk.pcm) / _SAMPLE_BYTES / sample_rate)
                yield chunk
        meter.finish()
