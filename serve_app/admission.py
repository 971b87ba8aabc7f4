"""Who is let in: a synthesizer that refuses at once what it could only speak late.

Queues behind it are bounded as well, but they are many and know little of each other. This one sees all requests of its
ingress replica, from their arrival to their first audio, and so knows how long the line in front of the pools takes.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from deployments import metrics
from deployments.errors import NotReady, Overloaded
from deployments.protocol import ModelInfo, PcmChunk, SynthesisRequest
from deployments.rate import Rate
from serve_app.api_settings import AdmissionSettings
from serve_app.synthesizer import Synthesizer

# What a first audio takes without a line: the least of so many latest ones.
_LATEST = 50
# While none is known.
_USUAL_S = 1.0


def always() -> bool:
    """A pool that cannot go to zero."""
    return True


class Admission:
    """Bounds the streams of one ingress replica, and how long any of them waits for its first audio.

    `is_running` says whether there is a talker replica: a pool that has gone to zero takes longer for the first one.
    """

    def __init__(
        self, synthesizer: Synthesizer, settings: AdmissionSettings, *, is_running: Callable[[], bool] = always
    ) -> None:
        self._synthesizer = synthesizer
        self._settings = settings
        self._is_running = is_running
        self._num_streams = 0
        self._waiting: dict[object, float] = {}  # since when, the eldest first
        self._begun = Rate()
        self._waits_s: deque[float] = deque(maxlen=_LATEST)

    async def describe(self) -> ModelInfo:
        """What is loaded."""
        return await self._synthesizer.describe()

    async def synthesize(self, request: SynthesisRequest) -> AsyncGenerator[PcmChunk, None]:
        """Audio of one utterance. Raises Overloaded where it would come late, NotReady where no talker has started."""
        self._check_room()
        self._count(+1)
        try:
            async with aclosing(self._synthesizer.synthesize(request)) as chunks:
                for chunk in await self._begin(chunks):
                    yield chunk
                async for chunk in chunks:
                    yield chunk
        finally:
            self._count(-1)

    async def _begin(self, chunks: AsyncGenerator[PcmChunk, None]) -> list[PcmChunk]:
        """The chunks up to the first one with audio, within the time that is allowed for it."""
        starting = not self._is_running()
        allowed_s = self._settings.start_wait_s if starting else self._settings.max_wait_s
        ticket, joined_s = object(), time.monotonic()
        self._waiting[ticket] = joined_s
        try:
            async with asyncio.timeout(allowed_s):
                begun = await _until_audio(chunks)
        except Overloaded:
            metrics.refused("stage")
            raise
        except TimeoutError:
            raise self._refusal("late" if self._is_running() else "starting") from None
        finally:
            del self._waiting[ticket]
        if not starting:
            self._begun.count(time.monotonic())
            self._waits_s.append(time.monotonic() - joined_s)
        return begun

    def _check_room(self) -> None:
        if self._num_streams >= self._settings.max_streams:
            raise self._refusal("streams")
        eldest_s = next(iter(self._waiting.values()), None)
        if eldest_s is None or not self._is_running():
            return
        if time.monotonic() - eldest_s > min(self._waits_s, default=_USUAL_S) + self._settings.max_line_s:
            raise self._refusal("line")

    def _refusal(self, reason: str) -> Exception:
        metrics.refused(reason)
        if reason == "starting":
            return NotReady()
        after_s = self._begun.retry_after_s(len(self._waiting), time.monotonic())
        return Overloaded(f"The server is at its limit: {len(self._waiting)} requests wait for their turn.", after_s)

    def _count(self, change: int) -> None:
        self._num_streams += change
        metrics.ingress_load(self._num_streams, most=self._settings.max_streams)


async def _until_audio(chunks: AsyncGenerator[PcmChunk, None]) -> list[PcmChunk]:
    read: list[PcmChunk] = []
    async for chunk in chunks:
        read.append(chunk)
        if chunk.pcm:
            break
    return read
