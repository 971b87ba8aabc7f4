"""Simulate a pool of codec replicas on CPU cores, using the real gate and real streams in simulated time.

Only call durations are modelled: a constant plus a time per frame, as measured by `talkray bench codec`, with 15 %
random variation. With all workers busy, calls take `1 + crowded` times as long. A replica rejects a stream that waits
longer than `patience_s` for admission. With `hybrid`, a GPU decodes the first frames. The overhead of calls between
actors is not modelled.
"""

import asyncio
import math
import random
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

import numpy as np

from deployments.codec.batch import Decoded, DecodeTask
from deployments.codec.decoder_state import DecoderState
from deployments.codec.plan import MAX_BATCH_FRAMES, MAX_BATCH_SIZE, ChunkPlan, call_sizes
from deployments.codec.pool import gate, stream
from deployments.codec.pool.capacity import Capacity
from deployments.codec.pool.gate import DecodeGate
from deployments.codec.pool.ramps import MANY_WORKERS, chosen_ramp, fitted_ramp, longest_call_s
from deployments.codec.pool.service import Placement
from deployments.codec.pool.stream import DecodingStart, StreamDecoder
from deployments.listener import Listener
from deployments.protocol import ALL_FRAMES, FinishReason, FrameChunk
from loadtest.simulate import Traffic
from loadtest.tables import MS, Table, percent

_FRAME_SAMPLES, _SAMPLE_RATE = 24, 300  # arbitrary, because the audio's content does not matter
_FRAME_S = _FRAME_SAMPLES / _SAMPLE_RATE
_NOTHING = DecoderState(0, ())
_FIRST_CODES_S, _NEXT_CODES_S = 0.012, 0.0035  # for a talker on a GPU
_DEVIATION = 0.15  # standard deviation of the log call durations
_HEARD_S = 0.001  # shortest audible pause
_MAX_LATE_S = 0.25  # maximum silence, as in api.admission.max_late_s


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Event loop whose clock jumps to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__()

    def time(self) -> float:
        """Return the seconds since the loop was created."""
        return self._now_s

    def _run_once(self) -> None:
        ready, scheduled = self._ready, self._scheduled  # type: ignore[attr-defined]
        if not ready and scheduled:
            self._now_s = max(self._now_s, scheduled[0].when())
        super()._run_once()  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class CodecPool:
    """Replicas of the pool, and how long streams wait for admission."""

    replicas: int
    workers: int  # per replica
    call_s: float = 0.015
    frame_s: float = 0.0046
    crowded: float = 0.0  # relative slowdown when all workers are busy, because cores share memory bandwidth
    hybrid: bool = False  # a GPU decodes as many first frames as `Placement` requires
    of_two: bool = False  # route each stream to the better of two random replicas instead of the best replica
    patience_s: float = 0.5
    seed: int = 1  # for call durations and for `of_two`

    @property
    def ramp(self) -> tuple[int, ...]:
        return chosen_ramp(self.workers)

    def work_s(self, frames: int) -> float:
        """Return the mean duration of a call that decodes `frames` frames."""
        return self.call_s + frames * self.frame_s

    def largest(self, frames: int) -> int:
        """Return the maximum number of streams per call with `frames` frames each, as set at startup (loading.py)."""
        batch = 1
        while 2 * batch <= MAX_BATCH_SIZE and 2 * batch * frames <= MAX_BATCH_FRAMES:
            if 2 * self.work_s(batch * frames) > longest_call_s(self.workers):
                break
            batch *= 2
        return batch


@dataclass(frozen=True, slots=True)
class Served:
    """Results at one load, as listeners would experience them."""

    first_audio_s: list[float]
    stalled_s: list[float]  # one value per admitted stream
    refused: int
    busy_cores: float
    batch: float  # mean streams per call
    decoded: float  # share of the audio that the pool decoded

    @property
    def late(self) -> float:
        """Share of streams that paused."""
        return sum(stalled > _HEARD_S for stalled in self.stalled_s) / len(self.stalled_s)

    def first_audio_ms(self, percent: float) -> float:
        return float(np.percentile(self.first_audio_s, percent)) * MS


def served_table(by_rate: Mapping[float, Served]) -> Table:
    titles = "r/s", "first audio p50 / p95, ms", "paused", "refused", "busy cores", "streams/call", "made by the pool"
    rows = [
        (
            f"{rate:g}",
            f"{served.first_audio_ms(50):.0f} / {served.first_audio_ms(95):.0f}",
            percent(served.late),
            f"{served.refused} of {served.refused + len(served.stalled_s)}",
            f"{served.busy_cores:.1f}",
            f"{served.batch:.2f}",
            percent(served.decoded, digits=0),
        )
        for rate, served in by_rate.items()
    ]
    return Table(titles, rows)


@dataclass(slots=True)
class _Cores:
    """CPU cores of all replicas."""

    busy: int = 0
    frames: int = 0  # of all streams
    frames_of_gpu: int = 0


@dataclass(slots=True)
class _Replica:
    pool: CodecPool
    cores: _Cores
    dice: random.Random
    streams: int = 0
    busy_s: float = 0.0
    gate: DecodeGate = field(init=False)
    capacity: Capacity = field(init=False)
    placement: Placement = field(init=False)
    _tasks: list[tuple[DecodeTask, asyncio.Future[Decoded]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        largest = {size: self.pool.largest(size) for size in call_sizes(self.pool.ramp)}
        self.gate = DecodeGate(self._decode, workers=self.pool.workers, frame_s=_FRAME_S, largest=largest)
        self.capacity = Capacity(max_late_s=_MAX_LATE_S, worker_capacity=lambda: self.gate.capacity)
        self.placement = Placement("hybrid" if self.pool.hybrid else "pool")
        self.placement.talker_on_gpu = True

    async def listen(self, frames: int) -> tuple[float, float] | None:
        """Run one stream. Return its time to first audio and its later silence in seconds, or None if refused."""
        asked_s = _now_s()
        self.streams += 1
        async with AsyncExitStack() as room:
            try:
                gpu_frames = room.enter_context(self.placement.admit(self.gate.capacity))
                if gpu_frames < ALL_FRAMES:
                    async with asyncio.timeout(self.pool.patience_s):
                        await room.enter_async_context(self.capacity.enter("", at_once=gpu_frames > 0))
                self.cores.frames += frames
                self.cores.frames_of_gpu += min(frames, gpu_frames)
                return await self._listen(frames, asked_s, gpu_frames)
            except TimeoutError:
                return None
            finally:
                self.streams -= 1

    async def _listen(self, frames: int, asked_s: float, gpu_frames: int) -> tuple[float, float]:
        listener, first_s = Listener(), math.inf
        shared = self.pool.workers >= MANY_WORKERS
        ramp = fitted_ramp(
            self.pool.ramp, self.gate.seconds_per_frame, wait_s=self.gate.wait_s, frame_s=_FRAME_S, shared=shared
        )
        plan, start = ChunkPlan(ramp, frame_s=_FRAME_S), DecodingStart(_NOTHING)
        decoder = StreamDecoder(
            self.gate.submit,
            plan,
            start,
            frame_samples=_FRAME_SAMPLES,
            sample_rate=_SAMPLE_RATE,
            load=lambda: self.gate.load,
        )
        async with aclosing(decoder.decode_chunks(_talker(frames, gpu_frames), gpu_frames=gpu_frames)) as chunks:
            async for chunk in chunks:
                first_s = min(first_s, _now_s() - asked_s)
                listener.deliver(len(chunk.codes) * _FRAME_S, now_s=_now_s())
        return first_s, listener.stalled_s

    async def _decode(self, task: DecodeTask) -> Decoded:
        done: asyncio.Future[Decoded] = asyncio.get_running_loop().create_future()
        self._tasks.append((task, done))
        if len(self._tasks) == 1:
            asyncio.get_running_loop().call_soon(self._begin)  # deferred, to batch all streams that arrive in this tick
        return await done

    def _begin(self) -> None:
        tasks, self._tasks = self._tasks, []
        self.gate.note_gathered()
        self.cores.busy += 1
        share = self.cores.busy / (self.pool.replicas * self.pool.workers)
        work_s = self.pool.work_s(sum(len(task.codes) for task, _ in tasks)) * self.dice.lognormvariate(0, _DEVIATION)
        work_s *= 1 + self.pool.crowded * share
        self.busy_s += work_s
        asyncio.get_running_loop().call_later(work_s, self._finish, tasks)

    def _finish(self, tasks: list[tuple[DecodeTask, asyncio.Future[Decoded]]]) -> None:
        self.cores.busy -= 1
        self.capacity.record_call(max(task.stall_s(_now_s()) for task, _ in tasks), now_s=_now_s())
        for task, done in tasks:
            pcm = np.ones(len(task.codes) * _FRAME_SAMPLES, np.int16)
            if not done.done():
                done.set_result(Decoded(pcm, DecoderState(task.state.position + len(task.codes), ())))


async def _talker(frames: int, gpu_frames: int) -> AsyncGenerator[FrameChunk, None]:
    sound = np.ones(_FRAME_SAMPLES, np.int16).tobytes()
    for number in range(frames):
        await asyncio.sleep(_NEXT_CODES_S if number else _FIRST_CODES_S)
        reason, pcm = FinishReason.STOP if number == frames - 1 else None, sound if number < gpu_frames else b""
        yield FrameChunk(np.zeros((1, 16), np.int16), 1, reason, pcm)


def _now_s() -> float:
    return asyncio.get_running_loop().time()


async def _load(pool: CodecPool, traffic: Traffic) -> Served:
    dice, cores = random.Random(pool.seed), _Cores()
    replicas = [_Replica(pool, cores, dice) for _ in range(pool.replicas)]
    listeners: list[asyncio.Task[tuple[float, float] | None]] = []
    began_s = _now_s()
    for arrival_s, frames in zip(traffic.arrival_s.tolist(), traffic.frames.tolist(), strict=True):
        await asyncio.sleep(began_s + arrival_s - _now_s())
        seen = dice.sample(replicas, min(2 if pool.of_two else pool.replicas, pool.replicas))
        listeners.append(asyncio.create_task(min(seen, key=lambda each: each.streams).listen(frames)))
    outcomes = await asyncio.gather(*listeners)
    heard = [outcome for outcome in outcomes if outcome is not None]
    batches, tasks = (sum(getattr(replica.gate, count) for replica in replicas) for count in ("batches", "tasks"))
    busy_cores = sum(replica.busy_s for replica in replicas) / (_now_s() - began_s)
    firsts, stalls = [first for first, _ in heard], [stalled for _, stalled in heard]
    refused, decoded = len(outcomes) - len(heard), 1 - cores.frames_of_gpu / cores.frames
    return Served(firsts, stalls, refused, busy_cores, tasks / batches, decoded)


def serve(pool: CodecPool, traffic: Traffic) -> Served:
    """Simulate every request to its end."""
    loop = VirtualTimeLoop()
    clock = SimpleNamespace(monotonic=loop.time)
    try:
        with mock.patch.object(gate, "time", clock), mock.patch.object(stream, "time", clock):
            return loop.run_until_complete(_load(pool, traffic))
    finally:
        loop.close()
