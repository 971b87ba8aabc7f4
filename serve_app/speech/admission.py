"""Admission: a synthesizer that refuses a request whose audio would come late, and that measures the audio it sends.

The queues of the replicas are bounded too, but no replica knows the queue of another. Admission sees all requests of
its ingress replica from arrival to first audio, so it knows how long a request waits for a replica.
"""

import asyncio
import logging
import math
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace

import numpy as np

from deployments.audio.listening import FirstSound
from deployments.errors import NotReady, Overloaded, Starting
from deployments.limits import Rate, StreamLimit
from deployments.listener import Listener, ReaderWatch
from deployments.protocol import FinishReason, ModelInfo, PcmChunk, SynthesisRequest
from deployments.serving import metrics
from serve_app.config import AdmissionSettings
from serve_app.speech.live_text import LiveText, LiveTexts, without_clicks
from serve_app.speech.models import ModelState, ModelStatus, ready
from serve_app.speech.segments import LongText
from serve_app.speech.synthesizer import Synthesizer

logger = logging.getLogger(__name__)

_ATTEMPTS = 3  # seeds that are tried while speech ends before any sound
_SEED_BITS = 53  # JavaScript's numbers keep so many, and a client may send the seed back
# The usual time to first audio is the least of the latest _LATEST times, and _USUAL_S before the first of them.
_LATEST = 50
_USUAL_S = 1.0
_TOLD_S = 5.0  # between two lines in the log about a start that a request waits for
_SAMPLE_BYTES = 2
# What raises the limit, by the reason of a refusal.
_MORE_REPLICAS = "more or faster replicas raise the limit"
_REMEDIES = {
    "streams": "api.admission.max_streams ({settings.max_streams}) raises the limit",
    "pauses": f"more would be heard with pauses, so {_MORE_REPLICAS}",
    "line": f"{_MORE_REPLICAS}, api.admission.max_line_s ({{settings.max_line_s:g}}) lets more of them wait",
    "late": f"{_MORE_REPLICAS}, api.admission.max_wait_s ({{settings.max_wait_s:g}}) lets them wait longer",
}


def _percent(state: ModelState) -> str:
    return "" if state.percent is None else f", {state.percent} %"


def always() -> bool:
    """Whether replicas run, of a pool that never has none."""
    return True


class Admission:
    """Bounds the streams of one model at one ingress replica and their wait for first audio, and measures them.

    `is_running` says whether replicas run; a pool at zero first has to start one. `state` says how far that start is.
    `model` is the name of one of several models.
    """

    def __init__(
        self,
        synthesizer: Synthesizer,
        settings: AdmissionSettings,
        *,
        is_running: Callable[[], bool] = always,
        live_texts: LiveTexts | None = None,
        state: Callable[[], ModelState] = ready,
        model: str = "",
    ) -> None:
        """`live_texts`: the texts that clients are still writing, if there may be any."""
        self._synthesizer, self._long_text, self._live_texts = synthesizer, LongText(synthesizer), live_texts
        self._settings = settings
        self._is_running, self.state, self._model = is_running, state, model
        self._num_streams = self._num_speaking = 0
        # When each waiting request came, and its client, the oldest first. Two kinds are left out, because their wait
        # is not the pools': a recording has to be read, and a client that writes its text may take its time.
        self._waiting: dict[object, tuple[float, str]] = {}
        self._limit = StreamLimit(least=settings.min_streams)
        self._starts = Rate()
        self._waits_s: deque[float] = deque(maxlen=_LATEST)

    async def describe(self) -> ModelInfo:
        return await self._synthesizer.describe()

    async def synthesize(self, request: SynthesisRequest) -> AsyncGenerator[PcmChunk, None]:
        """Audio of one utterance. Raises Overloaded where it would come late, NotReady while no talker has started."""
        if not request.is_underway:
            self.check_room(request.client)
        came_s, listener = time.monotonic(), Listener()
        live = self._live_text(request)
        is_speaking = False
        was_held_up = False  # whether the client was slow, to read the last chunk or to write its text
        reason: FinishReason | None = None
        self._count(+1)
        try:
            info = await self.describe()
            sound = FirstSound(info.sample_rate)
            async with AsyncExitStack() as opened, ReaderWatch(self._give_place_back, self._take_place_again) as reader:
                chunks, opening = await self._begin(request, info, opened)
                is_speaking = True
                self._num_speaking += 1
                while (chunk := opening.popleft() if opening else await anext(chunks, None)) is not None:
                    is_being_written = live is not None and not live.is_over
                    if was_held_up or is_being_written:
                        listener.wait(now_s=time.monotonic())
                    if chunk.pcm:
                        self._judge(listener, len(chunk.pcm) / _SAMPLE_BYTES / info.sample_rate, came_s=came_s)
                        if (onset_s := sound.feed(np.frombuffer(chunk.pcm, "<i2"))) is not None:
                            metrics.ttfa(time.monotonic() - came_s, onset_s=onset_s, model=self._model)
                    given_s, reason = time.monotonic(), chunk.finish_reason
                    reader.offer()
                    yield chunk
                    listener.pause(time.monotonic() - given_s)
                    was_held_up = await reader.taken() or is_being_written
            metrics.finished(time.monotonic() - came_s, audio_s=listener.audio_s, reason=reason, model=self._model)
        finally:
            self._num_speaking -= is_speaking
            self._count(-1)

    def check_room(self, client: str) -> None:
        """Raises Overloaded or NotReady where a request of this client would be refused now."""
        reason = self.would_refuse(client)
        if reason is not None:
            raise self._refusal(reason)

    def would_refuse(self, client: str) -> str | None:
        """Why a request of this client would be refused now; None where it would be let in."""
        if self._num_streams >= self._settings.max_streams:
            return "streams"
        if not self._is_running():
            self._waiting.clear()  # these requests wait for a start, not for a free replica
            return "starting" if self.state().status is ModelStatus.FAILED else None
        if not self._limit.has_room(self._num_streams):
            return "pauses"
        is_long = self._line_s(client) > self._usual_s + self._settings.max_line_s
        return "line" if is_long else None

    def _line_s(self, client: str) -> float:
        """How long the oldest waiting request that counts for this client has waited, in seconds.

        The client's own requests count. Of the other clients the one that waits longest does not, because its text
        alone may be the reason. In a line that is too long for all, the next client waits nearly as long.
        """
        oldest: dict[str, float] = {}
        for since_s, whose in self._waiting.values():
            oldest.setdefault(whose, since_s)
        own_s = oldest.pop(client, math.inf)
        others_s = sorted(oldest.values())[1:2]
        return time.monotonic() - min(own_s, *others_s, math.inf)

    @property
    def _usual_s(self) -> float:
        """The time to first audio when nothing waits."""
        return min(self._waits_s, default=_USUAL_S)

    def _judge(self, listener: Listener, audio_s: float, *, came_s: float) -> None:
        """Count audio that is sent now. A chunk is late once the listener's pauses add up to more than `max_late_s`."""
        now_s, is_first = time.monotonic(), not listener.has_begun
        late_s = listener.deliver(audio_s, now_s=now_s)
        metrics.audio(audio_s, late_s=late_s, model=self._model)
        if is_first:
            metrics.ttfp(now_s - came_s, model=self._model)
            return
        is_late = late_s > 0 and listener.stalled_s > self._settings.max_late_s
        self._limit.delivered(late=is_late, streams=self._num_streams, now_s=now_s)

    async def _begin(
        self, request: SynthesisRequest, info: ModelInfo, opened: AsyncExitStack
    ) -> tuple[AsyncGenerator[PcmChunk, None], deque[PcmChunk]]:
        """The request's audio, and the chunks up to the first one with samples, which have to come within a time limit.

        `opened` closes the calls.
        """
        live, in_line = self._live_text(request), request.reference is None
        starting = not self._is_running()
        allowed_s = self._settings.start_wait_s if starting else self._settings.max_wait_s
        ticket, came_s = object(), time.monotonic()

        def wait() -> None:
            limit.reschedule(asyncio.get_running_loop().time() + allowed_s)
            if in_line and not starting:
                self._waiting[ticket] = time.monotonic(), request.client

        try:
            async with asyncio.timeout(None) as limit, _once_written(live, wait), self._start_told(request, starting):
                spoken = await self._until_audio(request, info, opened)
        except Overloaded:
            metrics.refused("stage", model=self._model)
            raise
        except TimeoutError:
            raise self._refusal("late" if self._is_running() else "starting") from None
        finally:
            self._waiting.pop(ticket, None)
        if in_line and not starting:
            self._starts.count(time.monotonic())
        if in_line and not starting and live is None:
            self._waits_s.append(time.monotonic() - came_s)
        return spoken

    async def _until_audio(
        self, request: SynthesisRequest, info: ModelInfo, opened: AsyncExitStack
    ) -> tuple[AsyncGenerator[PcmChunk, None], deque[PcmChunk]]:
        """The result of `_begin`. Speech that ends before any sound is made again if the request allows it."""
        for attempt in range(_ATTEMPTS):
            seed = draw_seed() if attempt else None
            redraws = request.redraws and attempt < _ATTEMPTS - 1
            asked = replace(request, seed=request.seed if seed is None else seed, redraws=redraws)
            live = self._live_text(asked)
            speech = self._long_text.synthesize(asked, info) if live is None else self._spoken(asked, live, info)
            chunks = await opened.enter_async_context(aclosing(speech))
            read: deque[PcmChunk] = deque()
            while not (read and read[-1].pcm) and (chunk := await anext(chunks, None)) is not None:
                read.append(chunk if seed is None else replace(chunk, seed=seed))
            if not redraws or not read or read[-1].pcm:
                break
            metrics.redrawn(read[-1].finish_reason, model=self._model)
            logger.warning(
                "request %s ended before any sound (%s): another seed", asked.request_id, read[-1].finish_reason
            )
        return chunks, read

    def _spoken(self, request: SynthesisRequest, live: LiveText, info: ModelInfo) -> AsyncGenerator[PcmChunk, None]:
        """The audio of a text while the client writes it. It is silent while the client pauses."""
        speech = self._long_text.speak(request, live, info)
        return without_clicks(speech, info.sample_rate, may_pause=lambda: not live.is_over)

    def _live_text(self, request: SynthesisRequest) -> LiveText | None:
        """The text of the request, if the client is still writing it."""
        if request.live is None or self._live_texts is None:
            return None
        return self._live_texts.find(request.live)

    def _refusal(self, reason: str) -> Exception:
        metrics.refused(reason, model=self._model)
        if reason == "starting":
            return self._starting()
        after_s = self._starts.retry_after_s(len(self._waiting), time.monotonic())
        num_waiting = self._num_streams - self._num_speaking
        load = f"being spoken: {self._num_speaking}, waiting for their first audio: {num_waiting}"
        remedy = _REMEDIES[reason].format(settings=self._settings)
        return Overloaded(f"The server is at its limit ({load}); {remedy}.", after_s)

    def _starting(self) -> NotReady:
        state = self.state()
        if state.ready_in_s is None:
            return NotReady()
        name = f"The model {self._model}" if self._model else "The model"
        how = (
            "its start failed, /v1/models says why"
            if state.status is ModelStatus.FAILED
            else f"{state.status}{_percent(state)}"
        )
        return Starting(f"{name} is not ready: {how}.", state.ready_in_s)

    @asynccontextmanager
    async def _start_told(self, request: SynthesisRequest, starting: bool) -> AsyncIterator[None]:
        """Logs every _TOLD_S seconds how far the start is that the request waits for."""

        async def tell() -> None:
            while not self._is_running():
                logger.info("request %s waits for %s: %s", request.request_id, self._model or "the model", self.state())
                await asyncio.sleep(_TOLD_S)

        telling = asyncio.create_task(tell()) if starting else None
        try:
            yield
        finally:
            if telling is not None:
                telling.cancel()

    async def _give_place_back(self) -> None:
        """A stream whose reader takes nothing does not count for the limits."""
        self._num_speaking -= 1
        self._count(-1)

    def _take_place_again(self) -> None:
        self._num_speaking += 1
        self._count(+1)

    def _count(self, change: int) -> None:
        self._num_streams += change
        metrics.ingress_load(self._num_streams, most=self._settings.max_streams, model=self._model)


def draw_seed() -> int:
    """A seed for a request whose client gave none."""
    return secrets.randbits(_SEED_BITS)


@asynccontextmanager
async def _once_written(live: LiveText | None, then: Callable[[], None]) -> AsyncIterator[None]:
    """Calls `then` inside the block: at once, or as soon as the client has written enough to be spoken."""
    if live is None:
        then()
        yield
        return

    async def wait() -> None:
        await live.is_plenty()
        then()

    waiting = asyncio.create_task(wait())
    try:
        yield
    finally:
        waiting.cancel()
