"""The gate: streams wait here for a decoder worker, and enter a call together.

`AudioStreams` of the talker chooses the calls of its GPU by rules of its own: these are short, and need no worker.
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
from deployments.codec.plan import CALL_FRAMES, MANY_WORKERS, MAX_BATCH_FRAMES, MAX_BATCH_SIZE, longest_call_s

_SMOOTHING = 0.1  # weight of the newest batch
_HICCUP = 4.0  # a call counts as at most this many times the mean, because in a longer one the machine stood still
_USABLE = 0.9  # share of the workers' time: busier workers are late at the next burst
_LONG = 1.2  # times the mean of calls; a stream expects this time where others share its call
# Until a stream was decoded, the capacity is half of the streams that the calls at the start suggest, because those
# calls had cores and memory to themselves. It is at least two, because such calls take too long on a busy machine.
_UNTRIED = 0.5
_LEAST_UNTRIED = 2.0
_USUAL_FRAMES = 8  # of a call, on average: it has fewer at a stream's beginning and more later
# A stream whose listener has less than _URGENT_S in hand after its chunk asks again as soon as the chunk is sent. Its
# worker waits _RETURN_S for it, because a call for a stream that has time would take far longer.
_URGENT_S = 0.5
_RETURN_S = 0.02
# With many workers, a task whose listener has more than _PLENTY_S in hand after the call waits _SHARE_WAIT_S for others
# to share the call, and _LAST_WORKER_S before it takes the last idle worker.
_PLENTY_S = 0.6
_SHARE_WAIT_S = 0.3
_LAST_WORKER_S = 1.0


@dataclass(order=True, slots=True)
class _Waiter:
    deadline_s: float
    number: int  # order of submission between equal deadlines
    task: DecodeTask = field(compare=False)
    decoded: asyncio.Future[Decoded] = field(compare=False)
    came_s: float = field(compare=False)

    def is_urgent(self, now_s: float) -> bool:
        return self.deadline_s - now_s <= _URGENT_S

    def settle(self, task: asyncio.Future[Decoded]) -> None:
        if self.decoded.done():  # its stream left while it was decoded
            return
        if task.cancelled():
            self.decoded.cancel()
        elif (error := task.exception()) is not None:
            self.decoded.set_exception(error)
        else:
            self.decoded.set_result(task.result())


class DecodeGate:
    """Holds tasks back while every worker is busy, then lets the most urgent ones through together.

    With many workers one may be idle while tasks wait that are not needed soon. They share a later call, which costs
    less, and an urgent task finds the idle worker.

    `decode` takes one task. All tasks of a batch reach it in one tick of the event loop, and `@serve.batch`, which has
    no wait, gathers them again (codec/deployment.py says why it is used). The next batch waits until this one is
    gathered, because `@serve.batch` would put the tasks of both into one call. A batch holds its worker until its last
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
        """`frame_s`: seconds that a frame plays.

        Tasks share a batch only while the call is expected to end within `longest_call_s`. `largest` is by frames how
        many tasks have been decoded together: more would be a new shape. `tried_s` is `seconds_per_frame` as the start
        measured it, 0 if that is not known.
        """
        self._decode, self._frame_s = decode, frame_s
        self._max_batch_size, self._max_batch_frames = MAX_BATCH_SIZE, MAX_BATCH_FRAMES  # tasks; frames of all of them
        self._max_call_s = longest_call_s(workers)
        self._largest = largest or {}
        self._workers = workers
        self._has_many_workers = workers >= MANY_WORKERS
        self._idle_workers = workers
        self._returns_s: list[float] = []  # until each of these times one idle worker is kept for an urgent stream
        self._waiting: list[_Waiter] = []  # the earliest deadline first
        self._gathered: list[_Waiter] | None = None  # the batch that `@serve.batch` gathers
        self._numbers = count()
        self._running: set[asyncio.Future[list[Decoded | BaseException]]] = set()
        self.batches = 0  # let through so far
        self.tasks = 0  # let through so far
        # The cost of a frame besides that of the call (CALL_FRAMES), smoothed. It is 0 before the first batch.
        self.seconds_per_frame, self._tried_s = 0.0, tried_s
        self.wait_s = 0.0  # smoothed time that urgent tasks wait for a worker

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def load(self) -> int:
        """How many times over the waiting tasks would fill the workers; 0 while each task finds one at once.

        Tasks without a deadline do not count, because no listener waits for them.
        """
        return sum(waiter.deadline_s < inf for waiter in self._waiting) // self._workers

    @property
    def capacity(self) -> float:
        """Streams that the workers decode in real time judged by the time of calls so far; infinite if that is unknown.

        A replica that has just started has the fewest streams, so the next streams all come to it at once.
        """
        seconds_per_frame = self.seconds_per_frame or self._tried_s
        if not seconds_per_frame:
            return inf
        call_s = seconds_per_frame * (_USUAL_FRAMES + CALL_FRAMES)
        carried = _USABLE * self._workers * _USUAL_FRAMES * self._frame_s / call_s
        return carried if self.seconds_per_frame else max(_UNTRIED * carried, _LEAST_UNTRIED)

    async def submit(self, task: DecodeTask) -> Decoded:
        """Wait for a worker and decode. Cancelling takes a waiting task back; a running one ends without its caller."""
        loop = asyncio.get_running_loop()
        waiter = _Waiter(task.deadline_s, next(self._numbers), task, loop.create_future(), time.monotonic())
        insort(self._waiting, waiter)
        loop.call_soon(self._dispatch)  # after all other submissions of this tick
        try:
            return await waiter.decoded
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)

    def note_gathered(self) -> None:
        """The batch that was let through last has been gathered."""
        self._gathered = None
        asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        if not self._waiting or not self._idle_workers or self._gathered is not None:
            return
        now_s = time.monotonic()
        self._returns_s = [until_s for until_s in self._returns_s if until_s > now_s]
        shapes = Counter(waiter.task.shape for waiter in self._waiting)
        starts_s = [self._starts_s(waiter, shapes[waiter.task.shape]) for waiter in self._waiting]
        first = next((waiter for waiter, at_s in zip(self._waiting, starts_s, strict=True) if at_s <= now_s), None)
        if first is None:
            asyncio.get_running_loop().call_later(min(starts_s) - now_s, self._dispatch)
            return
        if first.is_urgent(now_s):
            self._returns_s = self._returns_s[1:]  # it may be the stream for which a worker was kept
        elif self._idle_workers <= len(self._returns_s):
            asyncio.get_running_loop().call_later(self._returns_s[0] - now_s, self._dispatch)  # or a little earlier
            return
        self._start(self._next_batch(first, now_s))

    def _starts_s(self, waiter: _Waiter, alike: int) -> float:
        """The time until which a task waits although a worker is idle. `alike`: waiting tasks of the same shape."""
        frames, silent = shape = waiter.task.shape
        if silent or not self._has_many_workers or self._idle_workers == self._workers:
            return waiter.came_s  # without a call under way no other task may come to share one
        share_wait_s = _SHARE_WAIT_S if alike < self._size(self._max_batch_size, shape) else 0.0
        if self._idle_workers == 1:
            share_wait_s = _LAST_WORKER_S
        call_s = self.seconds_per_frame * (2 * frames + CALL_FRAMES)
        return min(waiter.came_s + share_wait_s, waiter.deadline_s - call_s - _PLENTY_S)

    def _next_batch(self, first: _Waiter, now_s: float) -> list[_Waiter]:
        """Tasks that share a call with `first`: as many as can be decoded without making the most urgent one late.

        With many workers only urgent tasks share an urgent one's call: another worker is soon free for the others.
        """
        if first.deadline_s == inf:  # a longer call would keep the worker from others
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
        """Tasks of one call: few sizes, all of which were called before (see plan.py); silent tasks go alone."""
        frames, silent = shape
        largest = self._largest.get(frames, self._max_batch_size)
        most_frames, in_time = self._frames_within(self._max_call_s), self._frames_within(left_s / _LONG)
        if in_time >= frames:  # else it is late alone as well, and should cost no more than it must
            most_frames = min(most_frames, in_time)
        most = min(waiting, self._max_batch_size, most_frames // frames, largest)
        return 1 if silent else 1 << max(0, most.bit_length() - 1)

    def _frames_within(self, call_s: float) -> int:
        """Frames of one call that takes at most `call_s`, by the cost of frames so far."""
        most = call_s / self.seconds_per_frame - CALL_FRAMES if self.seconds_per_frame else inf
        return max(0, int(min(self._max_batch_frames, most)))

    def _start(self, batch: list[_Waiter]) -> None:
        self._idle_workers -= 1
        self._gathered = batch
        self.batches += 1
        self.tasks += len(batch)
        decoding = [asyncio.ensure_future(self._decode(waiter.task)) for waiter in batch]
        for waiter, task in zip(batch, decoding, strict=True):
            task.add_done_callback(waiter.settle)
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
        if self._gathered is batch:  # the whole batch was cancelled, or failed, before
            self._gathered = None
        if not batch[0].task.silent:  # which costs far less a frame
            frames = sum(len(waiter.task.codes) for waiter in batch) + CALL_FRAMES
            taken_s, known_s = seconds / frames, self.seconds_per_frame
            if known_s:
                taken_s = known_s + _SMOOTHING * (min(taken_s, _HICCUP * known_s) - known_s)
            self.seconds_per_frame = taken_s
        self._idle_workers += 1
        now_s = time.monotonic()
        if min(waiter.deadline_s + len(waiter.task.codes) * self._frame_s for waiter in batch) - now_s < _URGENT_S:
            self._returns_s.append(now_s + _RETURN_S)
        asyncio.get_running_loop().call_soon(self._dispatch)
