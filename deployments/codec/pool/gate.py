"""Scheduler in front of the decoder workers, which groups waiting streams into calls.

The talker's `AudioStreams` schedules GPU calls by different rules, because GPU calls are short and need no worker.
"""

import asyncio
import time
from bisect import insort
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from math import inf

from deployments.codec.batch import Decoded, DecodeTask
from deployments.codec.plan import CALL_FRAMES, MAX_BATCH_FRAMES, MAX_BATCH_SIZE
from deployments.codec.pool.ramps import MANY_WORKERS, longest_call_s

_SMOOTHING = 0.1  # weight of the newest batch
_HICCUP = 4.0  # caps a call's measured duration at this multiple of the mean; the machine stalled in longer calls
_USABLE = 0.9  # usable share of the workers' time; busier workers would fall behind in the next burst
_LONG = 1.2  # expected duration of a shared call for a stream, as a multiple of the mean
# Before the first stream is decoded, the capacity is half of the estimate from the startup calls, because those calls
# had all cores and memory to themselves. It is at least two, because such calls take too long on a busy machine.
_UNTRIED = 0.5
_LEAST_UNTRIED = 2.0
_USUAL_FRAMES = 8  # mean number of frames in a call; calls have fewer at the beginning of a stream and more later
# A stream with less than _URGENT_S of buffered audio after its chunk submits its next task immediately. Its worker
# waits _RETURN_S for that task, because a call for a stream that is not urgent would take far longer.
_URGENT_S = 0.5
_RETURN_S = 0.02
# With many workers, a task with more than _PLENTY_S of buffered audio after the call waits _SHARE_WAIT_S for others
# to share its call. Before it takes the last idle worker, it waits _LAST_WORKER_S.
_PLENTY_S = 0.6
_SHARE_WAIT_S = 0.3
_LAST_WORKER_S = 1.0


@dataclass(order=True, slots=True)
class _Waiter:
    deadline_s: float
    number: int  # order of submission, for tasks with equal deadlines
    task: DecodeTask = field(compare=False)
    decoded: asyncio.Future[Decoded] = field(compare=False)
    came_s: float = field(compare=False)

    def is_urgent(self, now_s: float) -> bool:
        return self.deadline_s - now_s <= _URGENT_S

    def copy_outcome(self, task: asyncio.Future[Decoded]) -> None:
        if self.decoded.done():  # its stream was closed during the call
            return
        if task.cancelled():
            self.decoded.cancel()
        elif isinstance(outcome := task.exception() or task.result(), BaseException):  # `serve.batch` returns errors
            self.decoded.set_exception(outcome)
        else:
            self.decoded.set_result(outcome)


class DecodeGate:
    """Scheduler that holds tasks back while all workers are busy, then starts the most urgent ones together.

    With many workers, a worker may stay idle while tasks that are not urgent wait. Those tasks share a later call,
    which costs less, and the idle worker is available for an urgent task.

    `decode` takes one task. All tasks of a batch call it in one tick of the event loop, and `@serve.batch` without a
    wait time gathers them again (codec/deployment.py gives the reason for its use). The next batch waits until this
    batch is gathered, because `@serve.batch` would otherwise merge both. A batch occupies its worker until its last
    task is done. Call all methods on one event loop.
    """

    def __init__(
        self,
        decode: Callable[[DecodeTask], Awaitable[Decoded]],
        *,
        workers: int,
        frame_s: float,
        largest: Mapping[int, int] | None = None,
        tried_s: float = 0.0,
    ) -> None:
        """Create a gate for frames of `frame_s` seconds.

        Tasks share a batch only if the call should end within `longest_call_s`. `largest` maps numbers of frames to the
        largest batch decoded so far, because a larger one would be a new shape. `tried_s` is `seconds_per_frame` from
        measurements at the start, 0 if unknown.
        """
        self._decode, self._frame_s = decode, frame_s
        self._max_batch_size, self._max_batch_frames = MAX_BATCH_SIZE, MAX_BATCH_FRAMES  # tasks; total frames
        self._max_call_s = longest_call_s(workers)
        self._largest = largest or {}
        self._workers = workers
        self._has_many_workers = workers >= MANY_WORKERS
        self._idle_workers = workers
        self._reserved_until_s: list[float] = []  # until each time, one idle worker is reserved for an urgent stream
        self._waiting: list[_Waiter] = []  # in order of deadlines
        self._gathered: list[_Waiter] | None = None  # the batch that `@serve.batch` is gathering
        self._numbers = count()
        self._running: set[asyncio.Future[list[Decoded | BaseException]]] = set()
        self.batches = 0  # number of batches started
        self.tasks = 0  # number of tasks started
        # Smoothed cost of a frame, excluding the fixed cost of a call (CALL_FRAMES). It is 0 before the first batch.
        self.seconds_per_frame, self._tried_s = 0.0, tried_s
        self.wait_s = 0.0  # smoothed seconds that urgent tasks wait for a worker

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def load(self) -> int:
        """Number of waiting tasks per worker, rounded down; 0 while every task finds an idle worker immediately.

        Tasks without a deadline are not counted, because they have no listener.
        """
        return sum(waiter.deadline_s < inf for waiter in self._waiting) // self._workers

    @property
    def capacity(self) -> float:
        """Number of streams that the workers can decode in real time, estimated from past calls; infinite if unknown.

        The estimate is low after startup, because a new replica has the fewest streams and receives all new ones.
        """
        seconds_per_frame = self.seconds_per_frame or self._tried_s
        if not seconds_per_frame:
            return inf
        call_s = seconds_per_frame * (_USUAL_FRAMES + CALL_FRAMES)
        carried = _USABLE * self._workers * _USUAL_FRAMES * self._frame_s / call_s
        return carried if self.seconds_per_frame else max(_UNTRIED * carried, _LEAST_UNTRIED)

    async def submit(self, task: DecodeTask) -> Decoded:
        """Wait for a worker and decode. Cancellation removes a waiting task, but does not stop a running task."""
        loop = asyncio.get_running_loop()
        waiter = _Waiter(task.deadline_s, next(self._numbers), task, loop.create_future(), time.monotonic())
        insort(self._waiting, waiter)
        loop.call_soon(self._dispatch)  # after all other submissions in this tick
        try:
            return await waiter.decoded
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)

    def note_gathered(self) -> None:
        """Mark the latest batch as gathered by `@serve.batch`, so the next batch can start."""
        self._gathered = None
        asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        if not self._waiting or not self._idle_workers or self._gathered is not None:
            return
        now_s = time.monotonic()
        self._reserved_until_s = [until_s for until_s in self._reserved_until_s if until_s > now_s]
        shapes = Counter(waiter.task.shape for waiter in self._waiting)
        starts_s = [self._starts_s(waiter, shapes[waiter.task.shape]) for waiter in self._waiting]
        first = next((waiter for waiter, at_s in zip(self._waiting, starts_s, strict=True) if at_s <= now_s), None)
        if first is None:
            asyncio.get_running_loop().call_later(min(starts_s) - now_s, self._dispatch)
            return
        if first.is_urgent(now_s):
            self._reserved_until_s = self._reserved_until_s[
                1:
            ]  # this may be the stream that the worker was reserved for
        elif self._idle_workers <= len(self._reserved_until_s):
            asyncio.get_running_loop().call_later(self._reserved_until_s[0] - now_s, self._dispatch)  # at the latest
            return
        self._start(self._next_batch(first, now_s))

    def _starts_s(self, waiter: _Waiter, alike: int) -> float:
        """Return the time until which a task waits even if a worker is idle. `alike` tasks have the same shape."""
        frames, state_only = shape = waiter.task.shape
        if state_only or not self._has_many_workers or self._idle_workers == self._workers:
            return waiter.came_s  # without a running call, further tasks may never arrive to share one
        share_wait_s = _SHARE_WAIT_S if alike < self._size(self._max_batch_size, shape) else 0.0
        if self._idle_workers == 1:
            share_wait_s = _LAST_WORKER_S
        call_s = self.seconds_per_frame * (2 * frames + CALL_FRAMES)
        return min(waiter.came_s + share_wait_s, waiter.deadline_s - call_s - _PLENTY_S)

    def _next_batch(self, first: _Waiter, now_s: float) -> list[_Waiter]:
        """Remove and return the tasks to share a call with `first`, as many as allow the most urgent one to be in time.

        With many workers, an urgent call contains only urgent tasks, because another worker is soon idle for the rest.
        """
        if first.deadline_s == inf:  # a longer call would delay tasks with listeners
            self._waiting.remove(first)
            return [first]
        listened = [waiter for waiter in self._waiting if waiter.deadline_s < inf]
        fitting = [waiter for waiter in listened if waiter.task.shape == first.task.shape]
        if self._has_many_workers and first.is_urgent(now_s):
            fitting = [waiter for waiter in fitting if waiter.is_urgent(now_s)]
        size = self._size(len(fitting), first.task.shape, left_s=fitting[0].deadline_s - now_s)
        batch = fitting[:size]
        self._waiting = [waiter for waiter in self._waiting if waiter not in batch]
        return batch

    def _size(self, waiting: int, shape: tuple[int, bool], left_s: float = inf) -> int:
        """Return the number of tasks in one call: a power of two that was called before. Silent tasks run alone."""
        frames, state_only = shape
        largest = self._largest.get(frames, self._max_batch_size)
        most_frames, in_time = self._frames_within(self._max_call_s), self._frames_within(left_s / _LONG)
        if in_time >= frames:  # otherwise the task will be late anyway, and a larger call costs less per frame
            most_frames = min(most_frames, in_time)
        most = min(waiting, self._max_batch_size, most_frames // frames, largest)
        return 1 if state_only else 1 << max(0, most.bit_length() - 1)

    def _frames_within(self, call_s: float) -> int:
        """Return how many frames fit in one call of at most `call_s`, estimated from the cost of past frames."""
        most = call_s / self.seconds_per_frame - CALL_FRAMES if self.seconds_per_frame else inf
        return max(0, int(min(self._max_batch_frames, most)))

    def _start(self, batch: list[_Waiter]) -> None:
        self._idle_workers -= 1
        self._gathered = batch
        self.batches += 1
        self.tasks += len(batch)
        decoding = [asyncio.ensure_future(self._decode(waiter.task)) for waiter in batch]
        for waiter, task in zip(batch, decoding, strict=True):
            task.add_done_callback(waiter.copy_outcome)
        running = asyncio.gather(*decoding, return_exceptions=True)
        self._running.add(running)
        started_s = time.monotonic()
        for waiter in batch:
            if waiter.deadline_s - waiter.came_s <= _URGENT_S:
                self.wait_s += _SMOOTHING * (started_s - waiter.came_s - self.wait_s)
        running.add_done_callback(lambda done: self._finish(done, batch, time.monotonic() - started_s))

    def _finish(
        self, running: asyncio.Future[list[Decoded | BaseException]], batch: list[_Waiter], seconds: float
    ) -> None:
        self._running.discard(running)
        if self._gathered is batch:  # the entire batch was cancelled or failed before it was gathered
            self._gathered = None
        if not batch[0].task.state_only:  # silent tasks cost far less per frame
            frames = sum(len(waiter.task.codes) for waiter in batch) + CALL_FRAMES
            taken_s, known_s = seconds / frames, self.seconds_per_frame
            if known_s:
                taken_s = known_s + _SMOOTHING * (min(taken_s, _HICCUP * known_s) - known_s)
            self.seconds_per_frame = taken_s
        self._idle_workers += 1
        now_s = time.monotonic()
        if min(waiter.deadline_s + len(waiter.task.codes) * self._frame_s for waiter in batch) - now_s < _URGENT_S:
            self._reserved_until_s.append(now_s + _RETURN_S)
        asyncio.get_running_loop().call_soon(self._dispatch)
