import asyncio
import math
from dataclasses import dataclass
from itertools import count
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings, stateful
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deployments.codec.batch import Decoded, DecodeTask, decode_batch
from deployments.codec.decoder import CodecDecoder
from deployments.codec.decoder_state import DecoderState
from deployments.codec.pool import gate as module
from deployments.codec.pool.gate import DecodeGate
from deployments.errors import EngineError
from tests.clock import Clock

NOWHERE = DecoderState(0, ())
MOST = 4  # tasks of a call
CLOCK = Clock()
OK, WRONG, GONE = "ok", EngineError("bad codes"), asyncio.CancelledError()
BOUNDED = settings(derandomize=True, max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))


@dataclass(slots=True, eq=False)
class Stream:
    number: int  # order of arrival, never used twice
    task: DecodeTask
    came_s: float
    fails: bool  # as soon as it is decoded
    caller: asyncio.Task[Decoded]
    decoding: asyncio.Future[Decoded] | None = None
    started_s: float = 0.0
    outcome: str | BaseException | None = None  # None: no call has decoded it yet

    @property
    def deadline_s(self) -> float:
        return self.task.deadline_s

    @property
    def is_urgent(self) -> bool:
        return bool(self.deadline_s - CLOCK.now_s <= 0.5)


def is_open(call: list[Stream]) -> bool:
    return not all(each.outcome for each in call)


class Streams(RuleBasedStateMachine):
    """Streams ask for a worker, leave and come back while calls are gathered, end and fail."""

    @initialize(
        workers=st.sampled_from([1, 2, 4, 5]), cost_s=st.sampled_from([0.0, 0.01, 0.03]), turns=st.integers(0, 2),
        largest=st.sampled_from([{}, {1: 8, 2: 2, 4: 1}]),
    )  # fmt: skip
    def begin(self, workers: int, cost_s: float, turns: int, largest: dict[int, int]) -> None:
        CLOCK.now_s = 0.0
        # As in Serve's event loop its time is that at which a turn began: timers may fire early.
        self.loop, self.turn_s, self.errors = asyncio.SelectorEventLoop(), 0.0, list[BaseException]()
        self.loop.time = lambda: self.turn_s  # type: ignore[method-assign]
        self.loop.set_exception_handler(lambda loop, context: self.errors.append(context["exception"]))
        self.workers, self.turns, self.largest = workers, turns, largest
        self.gate = DecodeGate(self.decode, workers=workers, frame_s=0.08, largest=largest)
        self.gate.seconds_per_frame = self.cost_s = cost_s
        self.streams, self.numbers = list[Stream](), count()
        self.waiting = list[Stream]()  # the earliest deadline first
        self.calls = list[list[Stream]]()  # that have a worker
        self.gathering: list[Stream] | None = None
        self.kept_s = list[float]()  # until each, a worker is kept for a stream that may come back
        self.num_calls = self.num_tasks = 0
        self.wait_s = 0.0

    async def decode(self, task: DecodeTask) -> Decoded:
        if self.gathering is None:
            self.gathering = []
            self.loop.call_soon(self.gather, self.gathering, self.turns)
        stream = next(each for each in self.streams if each.task is task)
        self.gathering.append(stream)
        stream.started_s = CLOCK.now_s
        if stream.fails:
            stream.outcome = WRONG
            raise WRONG
        stream.decoding = self.loop.create_future()
        return await stream.decoding

    def gather(self, call: list[Stream], turns: int) -> None:
        """The call has its tasks, as `@serve.batch` makes it."""
        if turns and is_open(call):
            self.loop.call_soon(self.gather, call, turns - 1)
            return
        self.gathering = None
        self.check(call)
        if is_open(call):
            self.gate.note_gathered()
            self.calls.append(call)
        else:
            self.ended(call)

    def check(self, call: list[Stream]) -> None:
        """The first stream that needs no longer wait has a worker, with the streams of its shape that come first."""
        eligible = self.eligible()
        assert eligible, "a chunk was decoded that was not eligible"
        first, fitting = eligible[0], [each for each in self.waiting if each.deadline_s < math.inf]
        fitting = [each for each in fitting if each.task.shape == first.task.shape]
        self.kept_s = [until_s for until_s in self.kept_s if until_s > CLOCK.now_s]
        assert len(self.calls) < self.workers
        assert first.is_urgent or len(self.calls) + len(self.kept_s) < self.workers
        if first.is_urgent:
            self.kept_s = self.kept_s[1:]
            if self.workers >= 4:  # others find a worker soon
                fitting = [each for each in fitting if each.is_urgent]
        if first.deadline_s == math.inf:
            assert call == [first]
        else:
            left_s = fitting[0].deadline_s - CLOCK.now_s
            assert call == fitting[: self.size(len(fitting), first.task.shape, left_s=left_s)]
        for each in call:
            self.waiting.remove(each)
            if each.deadline_s - each.came_s <= 0.5:
                self.wait_s += 0.1 * (CLOCK.now_s - each.came_s - self.wait_s)
        self.num_calls, self.num_tasks = self.num_calls + 1, self.num_tasks + len(call)

    def size(self, waiting: int, shape: tuple[int, bool], *, left_s: float = math.inf) -> int:
        """The largest power of two of streams that one call decodes soon enough for others and for the most urgent."""
        frames, state_only = shape

        def takes_s(streams: int) -> float:
            return self.cost_s * (streams * frames + 4)

        most_s = 0.4 if self.workers >= 4 else 0.25
        if 1.2 * takes_s(1) <= left_s:  # otherwise it is late alone as well
            most_s = min(most_s, left_s / 1.2)
        sizes = [1, *(size for size in (2, 4) if not state_only and size * frames <= 16 and takes_s(size) <= most_s)]
        return max(size for size in sizes if size == 1 or size <= min(waiting, MOST, self.largest.get(frames, MOST)))

    def eligible(self) -> list[Stream]:
        return [each for each in self.waiting if self.starts_s(each) <= CLOCK.now_s]

    def starts_s(self, stream: Stream) -> float:
        """Beside calls of many workers a stream with time waits for others to share a call, or for a second worker."""
        frames, state_only = shape = stream.task.shape
        if state_only or self.workers < 4 or not self.calls:
            return stream.came_s
        alike = sum(each.task.shape == shape for each in self.waiting)
        share_s = 0.3 if alike < self.size(MOST, shape) else 0.0
        if len(self.calls) == self.workers - 1:
            share_s = 1.0
        return min(stream.came_s + share_s, stream.deadline_s - self.cost_s * (2 * frames + 4) - 0.6)

    def ended(self, call: list[Stream]) -> None:
        if call in self.calls:
            self.calls.remove(call)
        if not call[0].task.state_only:
            frames = sum(len(each.task.codes) for each in call)
            taken_s = (CLOCK.now_s - call[0].started_s) / (frames + 4)
            smoothed_s = self.cost_s + 0.1 * (min(taken_s, 4 * self.cost_s) - self.cost_s)
            self.cost_s = smoothed_s if self.cost_s else taken_s
        ends_s = min(each.deadline_s + 0.08 * len(each.task.codes) for each in call)
        if ends_s - CLOCK.now_s < 0.5:
            self.kept_s.append(CLOCK.now_s + 0.02)

    def settle(self) -> None:
        async def turns() -> None:
            for _ in range(60):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())
        for error in self.errors:
            raise error

    @rule(
        of_frames=st.sampled_from([1, 2, 4, 8, 12]), state_only=st.sampled_from([False, False, False, True]),
        left_s=st.lists(st.sampled_from([-0.5, 0.1, 0.22, 0.4, 0.6, 0.7, 2.0, 30.0, math.inf]), min_size=1, max_size=9),
        fails=st.sampled_from([False, False, False, True]),
    )  # fmt: skip
    def come(self, of_frames: int, state_only: bool, left_s: list[float], fails: bool) -> None:
        for each_s in left_s:
            codes = np.zeros((of_frames, 4), np.int16)
            task = DecodeTask(codes, NOWHERE, CLOCK.now_s + each_s, state_only=state_only)
            caller = self.loop.create_task(self.gate.submit(task))
            self.streams.append(Stream(next(self.numbers), task, CLOCK.now_s, fails, caller))
            self.waiting.append(self.streams[-1])
        self.waiting.sort(key=lambda each: (each.deadline_s, each.number))
        self.settle()

    @rule(seconds=st.sampled_from([0.005, 0.02, 0.1, 0.31, 1.1]), is_long_turn=st.booleans())
    def wait(self, seconds: float, is_long_turn: bool) -> None:
        CLOCK.now_s += seconds
        if is_long_turn:
            self.come(2, state_only=False, left_s=[30.0], fails=False)
        self.turn_s = CLOCK.now_s
        self.settle()

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), outcome=st.sampled_from([OK, OK, OK, WRONG, GONE]), is_whole=st.booleans())
    def end(self, data: st.DataObject, outcome: str | BaseException, is_whole: bool) -> None:
        """One task or a whole call. A call keeps its worker until its last task ends."""
        call = data.draw(st.sampled_from(self.calls))
        for stream in [each for each in call if each.outcome is None][: None if is_whole else 1]:
            assert stream.decoding is not None
            stream.outcome = outcome
            if isinstance(outcome, asyncio.CancelledError):
                stream.decoding.cancel()
            elif isinstance(outcome, EngineError):
                stream.decoding.set_exception(outcome)
            else:
                stream.decoding.set_result(Decoded(np.full(1, stream.number, np.int16), NOWHERE))
        if not is_open(call):
            self.ended(call)
        self.settle()

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A waiting task is taken back; one that is decoded keeps its worker."""
        if present := [each for each in self.streams if not each.caller.done()]:
            stream = data.draw(st.sampled_from(present))
            stream.caller.cancel()
            if stream in self.waiting:
                self.waiting.remove(stream)
            self.settle()
            assert stream.caller.cancelled()
            self.streams.remove(stream)

    @invariant()
    def no_stream_waits_without_need_and_each_has_its_own_outcome(self) -> None:
        self.kept_s = [until_s for until_s in self.kept_s if until_s > CLOCK.now_s]
        if len(self.calls) < self.workers and (eligible := self.eligible()):
            assert not eligible[0].is_urgent
            assert len(self.calls) + len(self.kept_s) >= self.workers
        for each in self.streams:
            assert each.caller.done() == (each.outcome is not None)
            assert each.caller.cancelled() == (each.outcome is GONE)
            if each.outcome in (OK, WRONG):
                assert (each.caller.exception() or each.caller.result().pcm) == (
                    WRONG if each.outcome is WRONG else [each.number]
                )
        gate = self.gate
        assert (gate.batches, gate.tasks, gate.num_waiting) == (self.num_calls, self.num_tasks, len(self.waiting))
        assert gate.load == sum(each.deadline_s < math.inf for each in self.waiting) // self.workers
        assert gate.seconds_per_frame == pytest.approx(self.cost_s)
        assert gate.wait_s == pytest.approx(self.wait_s)
        self.cost_s = gate.seconds_per_frame  # without a rounding error

    def teardown(self) -> None:
        for each in self.streams:
            each.caller.cancel()
        for call in self.calls:
            for each in call:
                each.decoding is None or each.decoding.cancel()
        self.settle()
        assert self.gate.num_waiting == 0
        self.loop.close()


def test_streams_come_and_go_while_calls_run() -> None:
    with mock.patch.object(module, "time", CLOCK), mock.patch.object(module, "MAX_BATCH_SIZE", MOST):
        stateful.run_state_machine_as_test(Streams, settings=BOUNDED)


async def gathered() -> None:
    """A call ends while `@serve.batch` gathers another: a third, which it would add to that one, has to wait."""
    outcomes, started = list[asyncio.Future[Decoded]](), list[int]()

    async def decode(task: DecodeTask) -> Decoded:
        started.append(len(task.codes))
        outcomes.append(asyncio.get_running_loop().create_future())
        return await outcomes[-1]

    gate = DecodeGate(decode, workers=3, frame_s=0.08)
    for frames, expected in ((1, [1]), (2, [1, 2]), (4, [1, 2])):
        asyncio.get_running_loop().create_task(gate.submit(DecodeTask(np.zeros((frames, 4), np.int16), NOWHERE, 1.0)))
        for _ in range(9):
            await asyncio.sleep(0)
        assert started == expected
        if frames == 1:
            gate.note_gathered()
        if frames == 2:
            outcomes[0].set_result(Decoded(np.zeros(0, np.int16), NOWHERE))
    gate.note_gathered()
    for _ in range(9):
        await asyncio.sleep(0)
    assert started == [1, 2, 4]


def test_a_call_that_ends_lets_none_into_another_that_is_gathered() -> None:
    asyncio.run(gathered())


def gate_of(*, workers: int = 1, tried_s: float = 0.0, seconds_per_frame: float = 0.0) -> DecodeGate:
    gate = DecodeGate(mock.Mock(), workers=workers, frame_s=0.08, tried_s=tried_s)
    gate.seconds_per_frame = seconds_per_frame
    return gate


def test_what_workers_carry_follows_from_what_calls_have_taken_and_before_from_those_of_the_start() -> None:
    assert gate_of(workers=2).capacity == math.inf
    assert gate_of(workers=2, seconds_per_frame=0.01).capacity == pytest.approx(0.9 * 2 * 8 * 0.08 / 0.12)
    assert gate_of(tried_s=0.005).capacity == pytest.approx(0.5 * 0.9 * 8 * 0.08 / 0.06)
    assert gate_of(tried_s=1.0).capacity == 2  # enough that one stream is decoded, which tells more
    assert 0 < gate_of(tried_s=0.005, seconds_per_frame=1.0).capacity < 1


def decoded(decoder: CodecDecoder, *codes: np.ndarray) -> list[Any]:
    return decode_batch(decoder, [DecodeTask(each, decoder.initial_state(), 0.0) for each in codes])


def test_decode_batch_keeps_order_over_different_lengths(decoder: CodecDecoder, codes: torch.Tensor) -> None:
    rows = [row[:length].numpy().astype(np.int16) for row, length in zip(codes, (3, 1, 3), strict=True)]
    for row, outcome in zip(rows, decoded(decoder, *rows), strict=True):
        [alone] = decoded(decoder, row)
        assert outcome.state.position == len(row)
        assert outcome.pcm.dtype == np.int16
        assert np.abs(outcome.pcm.astype(int) - alone.pcm).max() <= 1


@pytest.mark.parametrize(
    ("broken", "message"),
    [(np.full((2, 4), 99, np.int16), "not within 0 to 31"), (np.zeros((2, 3), np.int16), "3 codes, the codec takes 4")],
)
def test_a_bad_job_fails_alone(decoder: CodecDecoder, codes: torch.Tensor, broken: np.ndarray, message: str) -> None:
    good = codes[0, :2].numpy().astype(np.int16)
    first, bad, last = decoded(decoder, good, broken, good)
    assert isinstance(bad, EngineError)
    assert message in str(bad)
    [alone] = decoded(decoder, good)
    assert np.array_equal(first.pcm, alone.pcm)
    assert np.array_equal(last.pcm, alone.pcm)
