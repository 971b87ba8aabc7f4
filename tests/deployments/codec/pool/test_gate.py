import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import uvloop

from deployments.codec.batch import Decoded, DecodeTask, decode_batch
from deployments.codec.decoder import CodecDecoder
from deployments.codec.decoder_state import DecoderState
from deployments.codec.pool import gate as module
from deployments.codec.pool.gate import DecodeGate
from deployments.errors import EngineError

pytestmark = pytest.mark.anyio

NOWHERE = DecoderState(0, ())


def code(deadline_s: float) -> int:
    """What tells a task apart: times of a machine that has run for days are no codes."""
    return int(deadline_s) % 2048


def task(deadline_s: float, *, frames: int = 1) -> DecodeTask:
    return DecodeTask(np.full((frames, 4), code(deadline_s), np.int16), NOWHERE, deadline_s)


class FakeDecoder:
    """Notes which tasks reach it in one tick, and finishes them when a test asks for it."""

    def __init__(self) -> None:
        self.calls: list[list[float]] = []  # deadlines by tick
        self.running: dict[float, asyncio.Future[Decoded]] = {}
        self.note_gathered: Callable[[], None] = lambda: None  # the gate's
        self._same_tick = False

    async def __call__(self, task: DecodeTask) -> Decoded:
        if not self._same_tick:
            self.calls.append([])
            self._same_tick = True
            asyncio.get_running_loop().call_soon(self._end_tick)
        self.calls[-1].append(task.deadline_s)
        self.running[task.deadline_s] = asyncio.get_running_loop().create_future()
        return await self.running[task.deadline_s]

    def _end_tick(self) -> None:
        self._same_tick = False
        self.note_gathered()

    def finish(self, *deadlines: float) -> None:
        for deadline in deadlines:
            self.running.pop(deadline).set_result(Decoded(np.full(1, code(deadline), np.int16), NOWHERE))

    async def land(self, *deadlines: float) -> None:
        """Finish tasks once they run."""
        await until(lambda: self.running.keys() >= {*deadlines})
        self.finish(*deadlines)

    def fail(self, deadline: float, error: BaseException) -> None:
        running = self.running.pop(deadline)
        running.cancel() if isinstance(error, asyncio.CancelledError) else running.set_exception(error)


async def until(condition: Callable[[], bool]) -> None:
    """Let other tasks run until the condition holds; a condition that never does is a failed test."""
    for _ in range(100):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition never held")


def send(gate: DecodeGate, deadline_s: float, *, frames: int = 1) -> asyncio.Task[Decoded]:
    return asyncio.create_task(gate.submit(task(deadline_s, frames=frames)))


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
def fake() -> FakeDecoder:
    return FakeDecoder()


def gate_of(
    fake: FakeDecoder, *, workers: int = 1, max_batch_size: int = 16, max_batch_frames: int = 1000,
    max_call_s: float = 60.0, tried_s: float = 0.0,
) -> DecodeGate:  # fmt: skip
    limits = {"MAX_BATCH_SIZE": max_batch_size, "MAX_BATCH_FRAMES": max_batch_frames}
    with mock.patch.multiple(module, **limits, longest_call_s=lambda workers: max_call_s):
        gate = DecodeGate(fake, workers=workers, frame_s=0.08, tried_s=tried_s)
    fake.note_gathered = gate.note_gathered
    return gate


async def test_jobs_of_one_tick_go_together_at_once(fake: FakeDecoder) -> None:
    gate = gate_of(fake)
    decoding = [send(gate, deadline) for deadline in (3.0, 1.0, 2.0, 4.0)]
    await until(lambda: len(fake.running) == 4)
    assert fake.calls == [[1.0, 2.0, 3.0, 4.0]]
    fake.finish(1.0, 2.0, 3.0, 4.0)
    assert [(await task).pcm[0] for task in decoding] == [3, 1, 2, 4]
    assert (gate.batches, gate.tasks, gate.num_waiting) == (1, 4, 0)


@pytest.mark.parametrize("comes_back", [True, False])
async def test_a_worker_waits_a_moment_for_a_stream_with_little_time(fake: FakeDecoder, comes_back: bool) -> None:
    gate, now_s = gate_of(fake), time.monotonic()
    soon, later, sooner = now_s + 0.1, now_s + 10, now_s + 0.2
    urgent = send(gate, soon)
    await until(lambda: soon in fake.running)
    patient = send(gate, later, frames=12)
    fake.finish(soon)
    await urgent
    assert later not in fake.running
    if comes_back:
        again = send(gate, sooner)
        await fake.land(sooner)
        await again
    while later not in fake.running:  # noqa: ASYNC110, the gate's clock lets it through
        await asyncio.sleep(0.001)
    fake.finish(later)
    await patient
    assert fake.calls == ([[soon], [sooner], [later]] if comes_back else [[soon], [later]])


async def test_no_more_workers_wait_than_streams_may_come_back(fake: FakeDecoder) -> None:
    gate, now_s = gate_of(fake, workers=3), time.monotonic()
    soon, later, sooner = now_s + 0.1, [now_s + 10, now_s + 20, now_s + 30], now_s + 0.2
    urgent = send(gate, soon)
    await fake.land(soon)
    await urgent
    patient = [send(gate, each, frames=number + 1) for number, each in enumerate(later)]
    await settle()
    assert list(fake.running) == later[:2], "one of three workers is kept for the stream that may come back"
    again = send(gate, sooner)
    await until(lambda: sooner in fake.running)
    fake.finish(sooner, *later[:2])
    await again
    while later[2] not in fake.running:  # noqa: ASYNC110, the gate's clock lets it through
        await asyncio.sleep(0.001)
    fake.finish(later[2])
    await asyncio.gather(*patient)


MANY = 4


async def many_of_which_are_idle(fake: FakeDecoder, idle: int) -> tuple[DecodeGate, list[asyncio.Task[Decoded]], float]:
    """A gate of many workers; the others decode, the first of them for who needs it now."""
    gate, now_s = gate_of(fake, workers=MANY, max_batch_size=2), time.monotonic()
    decoding = [send(gate, now_s, frames=20 + number) for number in range(MANY - idle)]
    await until(lambda: sum(map(len, fake.calls)) == MANY - idle)
    return gate, decoding, now_s


async def test_who_has_plenty_in_hand_waits_for_another_to_share_a_call(fake: FakeDecoder) -> None:
    gate, decoding, now_s = await many_of_which_are_idle(fake, 2)
    decoding.append(send(gate, now_s + 30, frames=8))
    await settle()
    assert gate.num_waiting == 1
    decoding += [send(gate, now_s + later, frames=8) for later in (31, 32)]
    await until(lambda: fake.calls[-1] == [now_s + 30, now_s + 31])
    await settle()
    assert gate.num_waiting == 1, "a call takes two, and the last worker is left to the urgent"
    await _cancel(decoding)


async def test_who_has_plenty_in_hand_goes_alone_in_the_end(fake: FakeDecoder) -> None:
    gate, decoding, now_s = await many_of_which_are_idle(fake, 2)
    began_s = time.monotonic()
    decoding.append(send(gate, now_s + 30))
    await settle()
    async with asyncio.timeout(10):
        while gate.num_waiting:  # noqa: ASYNC110, the gate's clock lets it through
            await asyncio.sleep(0.001)
    assert time.monotonic() - began_s > 0.1
    await _cancel(decoding)


async def test_the_last_idle_worker_is_left_to_the_urgent(fake: FakeDecoder) -> None:
    gate, decoding, now_s = await many_of_which_are_idle(fake, 1)
    decoding += [send(gate, now_s + later) for later in (30, 31)]
    await settle()
    assert gate.num_waiting == 2
    decoding.append(send(gate, now_s + 0.1))
    await until(lambda: fake.calls[-1] == [now_s + 0.1])
    assert gate.num_waiting == 2, "it takes none along that has time"
    await _cancel(decoding)


@pytest.mark.parametrize(("left_s", "calls"), [
    (2.2, [[2.2], [2.4, 2.6]]), (1.8, [[1.8, 2.0], [2.2]]), (-2.0, [[-2.0, -1.8], [-1.6]]),
], ids=["in-time", "late-also-alone", "late-already"])  # fmt: skip
async def test_who_is_in_time_joins_no_late_call(fake: FakeDecoder, left_s: float, calls: list[list[float]]) -> None:
    """A call of two takes 2.4 s here, one of one 2.0 s, and perhaps a fifth longer."""
    gate, now_s = gate_of(fake), time.monotonic()
    gate.seconds_per_frame = 0.4 / 1.2
    decoding = [send(gate, now_s + left_s + 0.2 * number) for number in range(3)]
    for call in calls:
        deadlines = [now_s + each for each in call]
        await until(lambda deadlines=deadlines: list(fake.running) == pytest.approx(deadlines, abs=1e-6))
        gate.seconds_per_frame = 1e-6
        fake.finish(*fake.running)
    await asyncio.gather(*decoding)


@pytest.mark.parametrize(("workers", "busy"), [(MANY, 0), (MANY - 1, 1)])
async def test_nobody_waits_for_idle_workers_or_beside_few_of_them(fake: FakeDecoder, workers: int, busy: int) -> None:
    gate, now_s = gate_of(fake, workers=workers), time.monotonic()
    decoding = [send(gate, now_s, frames=20) for _ in range(busy)]
    await until(lambda: len(fake.running) == busy)
    decoding.append(send(gate, now_s + 30))
    await until(lambda: now_s + 30 in fake.running)
    await _cancel(decoding)


async def _cancel(decoding: list[asyncio.Task[Decoded]]) -> None:
    for task in decoding:
        task.cancel()
    await asyncio.gather(*decoding, return_exceptions=True)


def test_a_timer_that_fires_early_leaves_nobody_waiting() -> None:
    """As those of Serve's event loop do: they count from the beginning of the loop's turn."""

    async def speak() -> None:
        fake = FakeDecoder()
        gate, now_s = gate_of(fake), time.monotonic()
        urgent = send(gate, now_s)
        await until(lambda: now_s in fake.running)
        patient = send(gate, now_s + 10)
        await settle()
        time.sleep(0.05)  # noqa: ASYNC251, a long turn
        fake.finish(now_s)
        await urgent
        async with asyncio.timeout(10):
            while now_s + 10 not in fake.running:  # noqa: ASYNC110, the gate's clock lets it through
                await asyncio.sleep(0.001)
        fake.finish(now_s + 10)
        await patient

    uvloop.run(speak())


async def test_calls_have_few_sizes(fake: FakeDecoder) -> None:
    """Sound goes in powers of two streams, what only brings a state forward alone."""
    gate = gate_of(fake)
    decoding = [send(gate, float(number)) for number in range(7)]
    for batch in ([0.0, 1.0, 2.0, 3.0], [4.0, 5.0], [6.0]):
        await until(lambda batch=batch: list(fake.running) == batch)
        fake.finish(*batch)
    await asyncio.gather(*decoding)
    silent = [asyncio.create_task(gate.submit(replace(task(float(number)), silent=True))) for number in range(2)]
    for number in range(2):
        await until(lambda number=number: list(fake.running) == [float(number)])
        fake.finish(float(number))
    await asyncio.gather(*silent)


async def test_waiting_jobs_go_by_deadline_with_their_frame_count(fake: FakeDecoder) -> None:
    gate = gate_of(fake, max_batch_size=2)
    decoding = [send(gate, 0.0)]
    await until(lambda: 0.0 in fake.running)
    waiting = [task(5.0), task(4.0, frames=2), task(3.0), task(6.0), task(9.0, frames=2)]
    decoding += [asyncio.create_task(gate.submit(each)) for each in waiting]
    await until(lambda: gate.num_waiting == 5)
    for batch in ([0.0], [3.0, 5.0], [4.0, 9.0], [6.0]):
        await until(lambda batch=batch: list(fake.running) == batch)
        fake.finish(*batch)
    await asyncio.gather(*decoding)
    assert fake.calls == [[0.0], [3.0, 5.0], [4.0, 9.0], [6.0]]


async def test_a_worker_is_held_until_the_whole_batch_is_done(fake: FakeDecoder) -> None:
    gate = gate_of(fake)
    decoding = [send(gate, deadline) for deadline in (1.0, 2.0)]
    await until(lambda: len(fake.running) == 2)
    decoding.append(send(gate, 3.0))
    fake.finish(1.0)
    await settle()
    assert decoding[0].done()
    assert 3.0 not in fake.running
    fake.finish(2.0)
    await fake.land(3.0)
    await asyncio.gather(*decoding)


async def test_every_worker_gets_a_batch(fake: FakeDecoder) -> None:
    gate = gate_of(fake, workers=2, max_batch_size=1)
    decoding = [send(gate, deadline) for deadline in (1.0, 2.0, 3.0)]
    await settle()
    assert sorted(fake.running) == [1.0, 2.0]
    fake.finish(2.0)
    await until(lambda: 3.0 in fake.running)
    fake.finish(1.0, 3.0)
    await asyncio.gather(*decoding)
    assert fake.calls == [[1.0], [2.0], [3.0]], "each batch is gathered by itself"


@pytest.mark.parametrize("error", [EngineError("bad codes"), asyncio.CancelledError()])
async def test_an_error_reaches_its_own_caller_only(fake: FakeDecoder, error: BaseException) -> None:
    gate = gate_of(fake)
    decoding = [send(gate, deadline) for deadline in (1.0, 2.0)]
    await until(lambda: len(fake.running) == 2)
    fake.fail(1.0, error)
    fake.finish(2.0)
    await until(decoding[0].done)
    with pytest.raises(type(error)):
        await decoding[0]
    assert (await decoding[1]).pcm[0] == 2
    again = send(gate, 3.0)
    await fake.land(3.0)
    await again


async def test_a_caller_who_leaves_takes_its_waiting_job_back(fake: FakeDecoder) -> None:
    gate = gate_of(fake)
    decoding = [send(gate, 1.0)]
    await until(lambda: 1.0 in fake.running)
    left, stays = (send(gate, deadline) for deadline in (2.0, 3.0))
    await until(lambda: gate.num_waiting == 2)
    left.cancel()
    await until(left.cancelled)
    assert gate.num_waiting == 1
    fake.finish(1.0)
    await until(lambda: bool(fake.running))
    assert list(fake.running) == [3.0]
    fake.finish(3.0)
    await asyncio.gather(*decoding, stays)


async def test_a_caller_who_leaves_while_decoding_leaks_no_worker(fake: FakeDecoder) -> None:
    gate = gate_of(fake)
    left, failed = (send(gate, deadline) for deadline in (1.0, 2.0))
    await until(lambda: len(fake.running) == 2)
    left.cancel()
    failed.cancel()
    await until(lambda: left.cancelled() and failed.cancelled())
    after = send(gate, 3.0)
    await settle()
    assert 3.0 not in fake.running  # the worker is still busy with those who left
    fake.finish(1.0)
    fake.fail(2.0, EngineError("nobody hears this"))
    await fake.land(3.0)
    await after


async def test_sixteen_streams_share_batches() -> None:
    """Streams that each decode chunk after chunk meet in the gate, whatever order they come in."""
    free = asyncio.Event()

    async def decode(task: DecodeTask) -> Decoded:
        await free.wait()
        await asyncio.sleep(0)
        return Decoded(np.zeros(1, np.int16), NOWHERE)

    gate = DecodeGate(decode, workers=1, frame_s=0.08)

    async def run(number: int) -> None:
        for chunk in range(10):
            await gate.submit(task(chunk + number / 100))
            for _ in range(number % 3):
                await asyncio.sleep(0)

    streams = asyncio.gather(*(run(number) for number in range(16)))
    await settle()
    free.set()
    await streams
    assert gate.tasks == 160
    assert gate.tasks / gate.batches > 2


def decode_alone(decoder: CodecDecoder, codes: torch.Tensor) -> np.ndarray:
    (outcome,) = decode_batch(decoder, [DecodeTask(codes.numpy().astype(np.int16), decoder.initial_state(), 0.0)])
    assert isinstance(outcome, Decoded)
    return outcome.pcm


def test_decode_batch_keeps_order_over_different_lengths(decoder: CodecDecoder, codes: torch.Tensor) -> None:
    lengths = [3, 1, 3]
    tasks = [
        DecodeTask(row[:length].numpy().astype(np.int16), decoder.initial_state(), 0.0)
        for row, length in zip(codes, lengths, strict=True)
    ]
    for row, length, outcome in zip(codes, lengths, decode_batch(decoder, tasks), strict=True):
        assert isinstance(outcome, Decoded)
        assert outcome.state.position == length
        assert outcome.pcm.dtype == np.int16
        assert np.abs(outcome.pcm.astype(int) - decode_alone(decoder, row[:length])).max() <= 1


@pytest.mark.parametrize(
    ("broken", "message"),
    [(np.full((2, 4), 99, np.int16), "not within 0 to 31"), (np.zeros((2, 3), np.int16), "3 codes, the codec takes 4")],
)
def test_a_bad_job_fails_alone(decoder: CodecDecoder, codes: torch.Tensor, broken: np.ndarray, message: str) -> None:
    good = codes[0, :2].numpy().astype(np.int16)
    tasks = [DecodeTask(each, decoder.initial_state(), 0.0) for each in (good, broken, good)]
    first, bad, last = decode_batch(decoder, tasks)
    assert isinstance(bad, EngineError)
    assert message in str(bad)
    for outcome in (first, last):
        assert isinstance(outcome, Decoded)
        assert np.array_equal(outcome.pcm, decode_alone(decoder, codes[0, :2]))


@pytest.mark.parametrize(
    ("limit", "seconds_per_frame"),
    [({"max_batch_frames": 8}, 0.0), ({"max_call_s": 0.4}, 0.033)],  # and as much as 4 frames for the call
    ids=["frames", "their cost so far"],
)
async def test_a_batch_is_bounded(fake: FakeDecoder, limit: dict[str, Any], seconds_per_frame: float) -> None:
    gate = gate_of(fake, **limit)
    gate.seconds_per_frame = seconds_per_frame
    decoding = [send(gate, float(number), frames=4) for number in range(3)]
    await until(lambda: len(fake.running) == 2)
    fake.finish(0.0, 1.0)
    gate.seconds_per_frame = 1.0
    await fake.land(2.0)
    await asyncio.gather(*decoding)
    assert fake.calls == [[0.0, 1.0], [2.0]]


def test_what_workers_carry_follows_from_what_calls_have_taken(fake: FakeDecoder) -> None:
    gate = gate_of(fake, workers=2)
    assert gate.capacity == math.inf
    gate.seconds_per_frame = 0.01
    assert gate.capacity == pytest.approx(0.9 * 2 * 8 * 0.08 / 0.12)  # in calls of eight frames
    gate.seconds_per_frame = 1.0
    assert 0 < gate.capacity < 1


async def test_before_the_first_call_those_of_the_start_say_what_workers_carry(fake: FakeDecoder) -> None:
    gate = gate_of(fake, tried_s=0.005)
    assert gate.capacity == pytest.approx(0.5 * 0.9 * 8 * 0.08 / 0.06)
    assert gate_of(fake, tried_s=1.0).capacity == 2  # enough that one stream is decoded, which tells more
    gate.seconds_per_frame = 1.0
    assert 0 < gate.capacity < 1


async def test_a_machine_that_stood_still_does_not_make_frames_dear(fake: FakeDecoder) -> None:
    gate = gate_of(fake)
    gate.seconds_per_frame = 1e-6
    task = send(gate, 0.0)
    await until(lambda: 0.0 in fake.running)
    fake.finish(0.0)  # far more than a microsecond later
    await task
    assert gate.seconds_per_frame == pytest.approx(1.3e-6)
