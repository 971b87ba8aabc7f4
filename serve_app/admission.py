"""Who is let in: a synthesizer that refuses at once what it could only speak late.

Queues behind it are bounded as well, but they are many and know little of each other. This one sees all requests of its
ingress replica, from their arrival to their first audio, and so knows how long the line in front of the pools takes.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from deployments import metrics
from deployments.errors import NotReady, Overloaded
from deployments.protocol import ModelInfo, PcmChunk, SynthesisRequest
from deployments.rate import Rate
from deployments.stream_limit import StreamLimit
from serve_app.api_settings import AdmissionSettings
from serve_app.synthesizer import Synthesizer

# What a first audio takes without a line: the least of so many latest ones.
_LATEST = 50
# While none is known.
_USUAL_S = 1.0
_SAMPLE_BYTES = 2


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
        # Since when, the eldest first. A recording takes its time, which says nothing of the line: those are left out.
        self._waiting: dict[object, float] = {}
        self._limit = StreamLimit(least=settings.min_streams)
        self._begun = Rate()
        self._waits_s: deque[float] = deque(maxlen=_LATEST)

    async def describe(self) -> ModelInfo:
        """What is loaded."""
        return await self._synthesizer.describe()

    async def synthesize(self, request: SynthesisRequest) -> AsyncGenerator[PcmChunk, None]:
        """Audio of one utterance. Raises Overloaded where it would come late, NotReady where no talker has started."""
        self.check_room()
        self._count(+1)
        try:
            player = _Player((await self.describe()).sample_rate)
            async with aclosing(self._synthesizer.synthesize(request)) as chunks:
                for chunk in await self._begin(chunks, in_line=request.reference is None):
                    player.receive(chunk.pcm, time.monotonic())
                    given_s = time.monotonic()
                    yield chunk
                    player.go_on(time.monotonic() - given_s)
                async for chunk in chunks:
                    self._judge(chunk, player)
                    given_s = time.monotonic()
                    yield chunk
                    player.go_on(time.monotonic() - given_s)
        finally:
            self._count(-1)

    def check_room(self) -> None:
        """Raises Overloaded where a request that comes now is refused: nothing has to be known of it."""
        if self._num_streams >= self._settings.max_streams:
            raise self._refusal("streams")
        if not self._is_running():
            return
        if not self._limit.has_room(self._num_streams):
            raise self._refusal("behind")
        eldest_s = next(iter(self._waiting.values()), None)
        if eldest_s is not None and time.monotonic() - eldest_s > self._usual_s + self._settings.max_line_s:
            raise self._refusal("line")

    @property
    def _usual_s(self) -> float:
        """What a first audio takes without a line."""
        return min(self._waits_s, default=_USUAL_S)

    def _judge(self, chunk: PcmChunk, player: "_Player") -> None:
        if chunk.pcm:
            now_s = time.monotonic()
            stalled_s = player.receive(chunk.pcm, now_s)
            is_late = stalled_s > self._settings.max_late_s
            self._limit.delivered(late=is_late, streams=self._num_streams, now_s=now_s)

    async def _begin(self, chunks: AsyncGenerator[PcmChunk, None], *, in_line: bool) -> list[PcmChunk]:
        """The chunks up to the first one with audio, within the time that is allowed for it."""
        starting = not self._is_running()
        allowed_s = self._settings.start_wait_s if starting else self._settings.max_wait_s
        ticket, joined_s = object(), time.monotonic()
        if in_line:
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
            self._waiting.pop(ticket, None)
        if in_line and not starting:
            self._note_wait(time.monotonic() - joined_s)
        return begun

    def _note_wait(self, waited_s: float) -> None:
        now_s = time.monotonic()
        self._begun.count(now_s)
        self._waits_s.append(waited_s)

    def _refusal(self, reason: str) -> Exception:
        metrics.refused(reason)
        if reason == "starting":
            return NotReady()
        after_s = self._begun.retry_after_s(len(self._waiting), time.monotonic())
        load = f"{self._num_streams} requests are spoken or wait, {len(self._waiting)} of them for their first audio"
        return Overloaded(f"The server is at its limit: {load}.", after_s)

    def _count(self, change: int) -> None:
        self._num_streams += change
        metrics.ingress_load(self._num_streams, most=self._settings.max_streams)


@dataclass(slots=True)
class _Player:
    """What a listener without a buffer hears. Times come from one monotonic clock."""

    sample_rate: int
    _due_s: float | None = None  # when the next audio is needed
    _stalled_s: float = 0.0

    def receive(self, pcm: bytes, now_s: float) -> float:
        """Take a chunk; how long there has been silence in all, where it came late again, else 0.0."""
        due_s = now_s if self._due_s is None else self._due_s
        self._due_s = max(due_s, now_s) + len(pcm) / _SAMPLE_BYTES / self.sample_rate
        late_s = max(0.0, now_s - due_s)
        self._stalled_s += late_s
        return self._stalled_s if late_s else 0.0

    def go_on(self, taken_s: float) -> None:
        """The reader took so long to want more, which is not the pools' fault."""
        if self._due_s is not None:
            self._due_s += taken_s


async def _until_audio(chunks: AsyncGenerator[PcmChunk, None]) -> list[PcmChunk]:
    read: list[PcmChunk] = []
    async for chunk in chunks:
        read.append(chunk)
        if chunk.pcm:
            break
    return read
