"""The wait for first audio: within a time limit, once more with another seed if speech ends badly with it."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace

from deployments.errors import Overloaded
from deployments.protocol import FinishReason, ModelInfo, PcmChunk
from deployments.serving import metrics
from serve_app.speech.live_text import LiveText
from serve_app.speech.long_text import LongText
from serve_app.speech.redraw import draw_seed, ended_badly, report_redraw
from serve_app.speech.room import Room
from serve_app.speech.segments import UtteranceRequest
from serve_app.speech.synthesizer import Synthesizer

logger = logging.getLogger(__name__)

_TOLD_S = 5.0  # between two lines in the log about a start that a request waits for


class PeekedSpeech:
    """Speech that was read as far as its first samples. `next` gives all of its chunks, these first."""

    def __init__(self, chunks: AsyncGenerator[PcmChunk, None], *, seed: int | None = None) -> None:
        """The chunks of the start get the `seed`, if it is not the request's."""
        self._chunks, self._seed = chunks, seed
        self._read: deque[PcmChunk] = deque()

    @property
    def has_failed(self) -> bool:
        """Whether chunks were read, and the last of them ended speech: before any samples, or badly."""
        return ended_badly(self.reason) or (bool(self._read) and not self._read[-1].pcm)

    @property
    def reason(self) -> FinishReason | None:
        return self._read[-1].finish_reason if self._read else None

    async def peek(self) -> None:
        """Read up to the first samples."""
        while not (self._read and self._read[-1].pcm) and (chunk := await anext(self._chunks, None)) is not None:
            self._read.append(chunk if self._seed is None else replace(chunk, seed=self._seed))

    async def next(self) -> PcmChunk | None:
        return self._read.popleft() if self._read else await anext(self._chunks, None)


class SpeechStart:
    """Asks for the speech of requests, and waits for the first audio of each."""

    def __init__(self, synthesizer: Synthesizer, room: Room) -> None:
        self._long_text, self._room = LongText(synthesizer, model=room.model), room

    async def await_first_audio(
        self, request: UtteranceRequest, info: ModelInfo, opened: AsyncExitStack
    ) -> PeekedSpeech:
        """Speech whose first samples have come, which they have to within a time limit. `opened` closes its calls.

        Raises Overloaded, NotReady.
        """
        room, settings = self._room, self._room.settings
        is_starting = not room.is_running()
        is_in_line = request.reference is None and not is_starting
        allowed_s = settings.start_wait_s if is_starting else settings.max_wait_s
        ticket = object()
        came_s = time.monotonic()

        def join_line() -> None:
            if is_in_line:
                room.join_line(ticket, request.client)

        try:
            async with _limited(allowed_s, request.writing, join_line), self._start_told(request, is_starting):
                speech = await self._until_audio(request, info, opened)
        except Overloaded:
            metrics.refused("stage", model=room.model)
            raise
        except TimeoutError:
            raise room.refusal("late" if room.has_run_since(came_s) else "starting") from None
        finally:
            room.leave_line(ticket)
        if is_in_line:
            room.count_start(time.monotonic() - came_s if request.writing is None else None)
        return speech

    async def _until_audio(self, request: UtteranceRequest, info: ModelInfo, opened: AsyncExitStack) -> PeekedSpeech:
        """Speech with its first samples. What ends badly with them is made again, once, if the request allows it:
        nothing of it was sent.
        """
        seed = None  # the request's
        while True:
            audio = await opened.enter_async_context(aclosing(self._long_text.speak(request, info)))
            speech = PeekedSpeech(audio, seed=seed)
            await speech.peek()
            if not (request.redraws and speech.has_failed):
                return speech
            report_redraw(request.request_id, speech.reason, model=self._room.model)
            seed = draw_seed()
            request = replace(request, seed=seed, redraws=False)

    @asynccontextmanager
    async def _start_told(self, request: UtteranceRequest, is_starting: bool) -> AsyncIterator[None]:
        """If the model `is_starting`, logs every _TOLD_S seconds how far its start is."""

        async def tell() -> None:
            room = self._room
            while not room.is_running():
                logger.info("request %s waits for %s: %s", request.request_id, room.model or "the model", room.state())
                await asyncio.sleep(_TOLD_S)

        telling = asyncio.create_task(tell()) if is_starting else None
        try:
            yield
        finally:
            if telling is not None:
                telling.cancel()


@asynccontextmanager
async def _limited(allowed_s: float, live: LiveText | None, on_start: Callable[[], None]) -> AsyncIterator[None]:
    """Raises TimeoutError if the block takes longer than `allowed_s` seconds.

    The time begins at once, or with a `live` text as soon as the client has written enough of it to be spoken. Then
    `on_start` is called.
    """
    if live is None:
        on_start()
        async with asyncio.timeout(allowed_s):
            yield
        return
    is_plenty, loop = live.is_plenty, asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:

        async def start_once_written() -> None:
            await is_plenty()
            limit.reschedule(loop.time() + allowed_s)
            on_start()

        starting = asyncio.create_task(start_once_written())
        try:
            yield
        finally:
            starting.cancel()
