"""A codec replica's load: its streams, the frames waiting to be decoded, and its workers. Independent of Ray."""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from deployments.autoscaling_records import CodecRecord
from deployments.codec.pool.ramps import chosen_ramp
from deployments.limits import StreamLimit
from deployments.protocol import ALL_FRAMES, FrameChunk, PcmChunk, SynthesisRequest
from deployments.serving import metrics
from deployments.serving.replica_streams import Generate

if TYPE_CHECKING:  # do not import torch in processes that only compose the application
    from deployments.codec.batch import DecodeTask

# Time constant for the moving mean of busy cores. A single chunk keeps a core busy only briefly.
_BUSY_MEMORY_S = 4.0

# This many clients get one place each, even on a slow machine.
_CLIENTS = 2

T = TypeVar("T")
DecodeStream = Callable[[SynthesisRequest, Generate], AsyncGenerator[PcmChunk, None]]


class Capacity:
    """Limit on the streams that a replica decodes at once, with a FIFO queue for further streams.

    The limit is the number of streams that the workers can decode in real time, estimated from the time of their calls,
    and at most the number that recently received audio in time.

    A machine that is too slow for one stream would have a single place. A client that streams continuously could then
    hold that place forever. A client without a place therefore competes with the number of other clients, not with
    the number of places that they hold. Two clients always get a place.

    Call all methods on one event loop, with times from one clock.
    """

    def __init__(self, *, max_late_s: float, worker_capacity: Callable[[], float] = lambda: math.inf) -> None:
        """Listeners may hear `max_late_s` of silence in total. `worker_capacity()` returns the capacity in streams."""
        self._max_late_s, self._workers_carry = max_late_s, worker_capacity
        self.limit = StreamLimit(least=1)
        self._places: dict[object, str] = {}  # the client that holds each place
        self._queue: deque[tuple[str, asyncio.Future[object]]] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @asynccontextmanager
    async def enter(self, client: str, *, at_once: bool) -> AsyncIterator[None]:
        """Hold a place during the context. Waits in the queue for it; with `at_once`, exceeds the limit instead."""
        enters = at_once or self._has_room(client)  # there is no room for queued streams, so the order is kept
        place = self._claim(client) if enters else await self._wait(client)
        try:
            yield
        finally:
            self._leave(place)

    def record_call(self, stall_s: float, *, now_s: float) -> None:
        """Update the limit after a call. `stall_s` is the total stall of the listener it was late for, or 0.0."""
        self.limit.count_chunk(late=stall_s > self._max_late_s, streams=len(self._places), now_s=now_s)
        self._admit()

    def _has_room(self, client: str) -> bool:
        if self._is_below_limits(len(self._places)):
            return True
        clients = set(self._places.values())
        return client not in clients and (len(clients) < _CLIENTS or self._is_below_limits(len(clients)))

    def _is_below_limits(self, streams: int) -> bool:
        """Return whether one more stream may join `streams` running streams."""
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
        self._queue.append(waiter)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # admitted and cancelled at the same time: pass the place on
                self._leave(turn.result())
            elif waiter in self._queue:
                self._queue.remove(waiter)
            raise

    def _admit(self) -> None:
        """Admit waiters in queue order, as long as there is room for any of them."""
        while waiter := next((waiter for waiter in self._queue if self._has_room(waiter[0])), None):
            self._queue.remove(waiter)
            client, turn = waiter
            if not turn.done():
                turn.set_result(self._claim(client))


@dataclass(slots=True, eq=False)
class _Counts:
    """Frame counts for one stream."""

    arrived: int = 0
    decoded: int = 0

    @property
    def waiting(self) -> int:
        return max(0, self.arrived - self.decoded)  # a resumed stream decodes frames that did not arrive here


class CodecLoad:
    """Counters of the frames that pass through a replica. Call all methods on one event loop."""

    def __init__(
        self,
        workers: int,
        *,
        frame_s: float,
        max_late_s: float,
        worker_capacity: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """Create counters for frames of `frame_s` seconds. See `Capacity` for the other parameters."""
        self._workers, self._frame_s = workers, frame_s
        # Up to this many frames per stream are waiting for a full chunk, not for a worker.
        self._chunk_frames = chosen_ramp(workers)[-1]
        self._capacity = Capacity(max_late_s=max_late_s, worker_capacity=worker_capacity)
        self._streams: set[_Counts] = set()
        self._num_background = 0  # job streams, which are excluded from other counts and from the limit
        self._calls = 0  # calls in progress
        self._busy_s = 0.0  # total seconds that all workers spent in calls since the last record
        self._busy_cores = 0.0
        self._counted_s = self._recorded_s = time.monotonic()

    @property
    def lag_s(self) -> float:
        """Seconds of audio received as codes and not yet decoded, over all streams."""
        return self._frame_s * sum(stream.waiting for stream in self._streams)

    @property
    def backlog_s(self) -> float:
        """Seconds of audio waiting for a worker."""
        return self._frame_s * sum(max(0, stream.waiting - self._chunk_frames) for stream in self._streams)

    async def track_stream(
        self, decode_stream: DecodeStream, request: SynthesisRequest, generate: Generate
    ) -> AsyncGenerator[PcmChunk, None]:
        """Yield the chunks of `decode_stream(request, generate)`, and count frames on arrival and after decoding.

        A stream whose audio has not started waits for room before decoding. The talker starts immediately, because its
        pool must see the demand, and codes are small.
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
                        # Samples already made by a GPU must not wait.
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
        """Await the call that decodes `tasks`, and measure it. `waiting` further tasks wait for a worker."""
        began_s = time.monotonic()
        if all(task.deadline_s == math.inf for task in tasks):
            return await decoding  # background work does not affect the limit, and its workers do not count as busy
        self._change_calls(+1)
        try:
            return await decoding
        finally:
            self._change_calls(-1)
            now_s = time.monotonic()
            self._capacity.record_call(max(task.stall_s(now_s) for task in tasks), now_s=now_s)
            metrics.record_codec_call(now_s - began_s, len(tasks), waiting=waiting, lag_s=self.lag_s)

    def record(self) -> CodecRecord:
        """Return the load of this replica for Serve's controller. `busy_cores` is a moving mean."""
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
