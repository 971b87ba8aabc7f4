"""The load of a codec replica: its streams, the frames that wait for a decoder, and its workers. Knows no Ray."""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from deployments.autoscaling_records import CodecRecord
from deployments.codec.plan import chosen_ramp
from deployments.limits import StreamLimit
from deployments.protocol import ALL_FRAMES, FrameChunk, PcmChunk, SynthesisRequest
from deployments.serving import metrics
from deployments.serving.replica_streams import Generate

if TYPE_CHECKING:  # torch stays out of processes that only compose the application
    from deployments.codec.batch import DecodeTask

# One chunk keeps a core busy for a moment: the mean work over this time counts.
_BUSY_MEMORY_S = 4.0

# This many clients have a place each, even on a slow machine.
_CLIENTS = 2

T = TypeVar("T")
DecodeStream = Callable[[SynthesisRequest, Generate], AsyncGenerator[PcmChunk, None]]


class Capacity:
    """How many streams a replica decodes at once: no more than its workers can make in real time, judged by the time of
    their calls, and no more than were in time so far. They enter in order.

    On a machine that is too slow for one stream there would be one place, and a client that speaks without a pause
    would hold it for good. So a client that has none of the places competes with other clients, not with how many
    places they hold; two clients have a place in any case.

    Call all methods on one event loop, with times of one clock.
    """

    def __init__(self, *, max_late_s: float, workers_carry: Callable[[], float] = lambda: math.inf) -> None:
        """Listeners may hear `max_late_s` of silence in total. `workers_carry()`: streams that workers carry now."""
        self._max_late_s, self._workers_carry = max_late_s, workers_carry
        self.limit = StreamLimit(least=1)
        self._places: dict[object, str] = {}  # whose they are
        self._line: deque[tuple[str, asyncio.Future[object]]] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._line)

    @asynccontextmanager
    async def enter(self, client: str, *, at_once: bool) -> AsyncIterator[None]:
        """Hold a place while the context lasts: after the waiting line, or at once, even if there is no room."""
        enters = at_once or self._has_room(client)  # waiting streams have none
        place = self._claim(client) if enters else await self._wait(client)
        try:
            yield
        finally:
            self._leave(place)

    def decoded(self, stall_s: float, *, now_s: float) -> None:
        """Learn from a call. `stall_s`: total silence of a listener for whom it was late; 0.0 if there is none."""
        self.limit.delivered(late=stall_s > self._max_late_s, streams=len(self._places), now_s=now_s)
        self._admit()

    def _has_room(self, client: str) -> bool:
        if self._is_below_limits(len(self._places)):
            return True
        clients = set(self._places.values())
        return client not in clients and (len(clients) < _CLIENTS or self._is_below_limits(len(clients)))

    def _is_below_limits(self, streams: int) -> bool:
        """Whether one more stream may join `streams` streams."""
        return streams + 1 <= self._workers_carry() and self.limit.has_room(streams)

    def _claim(self, client: str) -> object:
        place = object()
        self._places[place] = client
        return place

    def _leave(self, place: object) -> None:
        del self._places[place]
        self._admit()

    async def _wait(self, client: str) -> object:
        turn: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        waiter = client, turn
        self._line.append(waiter)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # both came at the same time: the room goes to the next one
                self._leave(turn.result())
            elif waiter in self._line:
                self._line.remove(waiter)
            raise

    def _admit(self) -> None:
        """Admit the first in line that has room, until none has."""
        while waiter := next((waiter for waiter in self._line if self._has_room(waiter[0])), None):
            self._line.remove(waiter)
            client, turn = waiter
            if not turn.done():
                turn.set_result(self._claim(client))


@dataclass(slots=True, eq=False)
class _Counts:
    """Frames of one stream."""

    arrived: int = 0
    decoded: int = 0

    @property
    def waiting(self) -> int:
        return max(0, self.arrived - self.decoded)  # a stream that continues here brings its own frames


class CodecLoad:
    """Counts the frames that pass through. Call all methods on one event loop."""

    def __init__(
        self, workers: int, *, frame_s: float, max_late_s: float, workers_carry: Callable[[], float] = lambda: math.inf
    ) -> None:
        """`frame_s`: seconds that a frame plays. See `Capacity` for the rest."""
        self._workers, self._frame_s = workers, frame_s
        # A stream holds these back on purpose: others wait for a worker.
        self._chunk_frames = chosen_ramp(workers)[-1]
        self._capacity = Capacity(max_late_s=max_late_s, workers_carry=workers_carry)
        self._streams: set[_Counts] = set()
        self._num_background = 0  # streams of jobs, which are in no other count and wait for no room
        self._calls = 0  # that decode now
        self._busy_s = 0.0  # seconds of all workers since the last record
        self._busy_cores = 0.0
        self._counted_s = self._recorded_s = time.monotonic()

    @property
    def lag_s(self) -> float:
        """Audio that has arrived as codes and is not decoded, over all streams."""
        return self._frame_s * sum(stream.waiting for stream in self._streams)

    @property
    def backlog_s(self) -> float:
        """Audio of the frames that would be decoded if there were a worker."""
        return self._frame_s * sum(max(0, stream.waiting - self._chunk_frames) for stream in self._streams)

    async def counted(
        self, decode_stream: DecodeStream, request: SynthesisRequest, generate: Generate
    ) -> AsyncGenerator[PcmChunk, None]:
        """The chunks of `decode_stream(request, generate)`, counted on their way in and out.

        A stream that has delivered no audio is decoded once there is room for it. The talker begins at once, because
        its pool must see the demand, and codes are small.
        """
        if request.background:
            self._num_background += 1
            try:
                async with aclosing(decode_stream(request, generate)) as chunks:
                    async for chunk in chunks:
                        yield chunk
            finally:
                self._num_background -= 1
            return
        counts, room = _Counts(), AsyncExitStack()
        client, is_continuation = request.client, request.is_continuation

        async def arriving(request: SynthesisRequest) -> AsyncGenerator[FrameChunk, None]:
            async with aclosing(generate(request)) as chunks:
                async for chunk in chunks:
                    if len(chunk.codes) and not counts.arrived and request.gpu_frames < ALL_FRAMES:
                        # Samples that a GPU has made must not wait.
                        at_once = is_continuation or request.gpu_frames > 0
                        await room.enter_async_context(self._capacity.enter(client, at_once=at_once))
                    counts.arrived += len(chunk.codes)
                    yield chunk

        self._streams.add(counts)
        try:
            async with room, aclosing(decode_stream(request, arriving)) as chunks:
                async for chunk in chunks:
                    counts.decoded += len(chunk.codes)
                    yield chunk
        finally:
            self._streams.discard(counts)
            metrics.CODEC_LAG.record(self.lag_s)

    async def measure_call(self, decoding: Awaitable[T], tasks: "Sequence[DecodeTask]", *, waiting: int) -> T:
        """The outcome of the call that decodes `tasks`, which is measured; `waiting` other tasks wait for a worker."""
        began_s = time.monotonic()
        if all(task.deadline_s == math.inf for task in tasks):
            return await decoding  # background work: nothing is learnt, and no worker counts as busy
        self._change_calls(+1)
        try:
            return await decoding
        finally:
            self._change_calls(-1)
            now_s = time.monotonic()
            self._capacity.decoded(max(task.stall_s(now_s) for task in tasks), now_s=now_s)
            metrics.codec_call(now_s - began_s, len(tasks), waiting=waiting, lag_s=self.lag_s)

    def record(self) -> CodecRecord:
        """The load of this replica, for Serve's controller; `busy_cores` is a moving mean."""
        self._change_calls(0)
        elapsed_s = max(self._counted_s - self._recorded_s, 1e-6)
        weight = 1.0 - math.exp(-elapsed_s / _BUSY_MEMORY_S)
        self._busy_cores += weight * (self._busy_s / elapsed_s - self._busy_cores)
        self._busy_s, self._recorded_s = 0.0, self._counted_s
        return CodecRecord(
            streams=float(len(self._streams)),
            starting=float(sum(not stream.arrived for stream in self._streams)),
            backlog_s=self.backlog_s,
            busy_cores=self._busy_cores,
            cores=float(self._workers),
            background=float(self._num_background),
        )

    def _change_calls(self, change: int) -> None:
        now_s = time.monotonic()
        self._busy_s += self._calls * (now_s - self._counted_s)
        self._calls, self._counted_s = self._calls + change, now_s
