import math
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings, stateful
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deployments.errors import Overloaded
from deployments.listener import Listener
from deployments.protocol import FinishReason, Sampling, SynthesisRequest
from deployments.talker.engine import lanes
from deployments.talker.engine import scheduler as module
from deployments.talker.engine.scheduler import Batch, Scheduler
from deployments.talker.engine.step_executor import StepInFlight
from deployments.talker.state.kv_cache import BlockManager
from deployments.talker.state.sequence import FrameLimit, Sequence
from deployments.talker.text.prompt import Prompt
from tests.clock import Clock

FRAME = np.zeros(4, np.int16)
BLOCK_SIZE = 4
CLOCK = Clock(5.0)
DEVICE = mock.Mock()
BOUNDED = settings(derandomize=True, max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))


def sequence(number: int, *, rows: int = 3, frames: int = 8, prefix: int = 0, **request: Any) -> Sequence:
    ids, limit = np.zeros(rows, np.int32), FrameLimit(frames, FinishReason.LENGTH)
    prompt = Prompt(ids, ids, ids[:1], num_text_tokens=rows)
    asked = SynthesisRequest(str(number), "text", **request)
    return Sequence(number, asked, prompt, Sampling(), limit, frames=[FRAME] * prefix, frame_s=0.08)


def scheduler(*, blocks: int = 100, max_num_seqs: int = 2, max_num_waiting: int = 2, **options: float) -> Scheduler:
    manager = BlockManager(num_blocks=blocks + 1, block_size=BLOCK_SIZE)
    return Scheduler(manager, max_num_seqs=max_num_seqs, max_num_waiting=max_num_waiting, **options)


def step(line: Scheduler) -> tuple[list[int], list[int]]:
    """One step as the engine takes it: the sequences that were prefilled, and those that got a frame."""
    if (batch := line.schedule()) is None:
        return [], []
    decoded = [each.id for each in batch.decode]
    for each in batch.decode:
        each.append(FRAME)
    line.retire(batch.decode)
    return [each.id for each in batch.prefill], decoded


class Steps(RuleBasedStateMachine):
    """A scheduler and two lanes: requests come, write and leave while steps of the engine and of lanes overlap."""

    @initialize(
        rows=st.sampled_from([1, 2, 3, 8, 17]), blocks=st.sampled_from([4, 9, 40]),
        max_lead_s=st.sampled_from([0.1, 0.5, math.inf]),
    )  # fmt: skip
    def begin(self, rows: int, blocks: int, max_lead_s: float) -> None:
        self.num_rows, self.num_blocks, self.max_lead_s = rows, blocks, max_lead_s
        self.line = scheduler(blocks=blocks, max_num_seqs=rows, max_num_waiting=3, max_lead_s=max_lead_s)
        maker: Any = self
        self.lanes, self.num_failing = lanes.Lanes(mock.Mock(), self.line, maker), 0
        self.lanes.runners = [mock.Mock(buckets=(1, 2), most_positions=most) for most in (6, 4)]
        self.free_lanes, self.scheduled_s = [*self.lanes.runners], 0.0
        # Where each sequence is, in the order that the scheduler has to keep.
        self.waiting, self.jobs, self.running = list[Sequence](), list[Sequence](), list[Sequence]()
        self.in_lanes = list[Sequence]()
        self.lane_steps = list[StepInFlight]()
        self.known = list[Sequence]()  # by id
        self.batch: Batch | None = None  # until its frames are there
        self.beside: Any = None  # the engine's last step
        self.unused_rows, self.unused_blocks = set[int](), set[int]()  # of the last step and of lanes beside it

    # What lanes need from the step executor.

    def start_sequences(self, sequences: list[Sequence], runner: object) -> list[Sequence]:
        return sequences[: self.num_failing]

    def queue(self, sequences: list[Sequence], runner: Any, after: None) -> StepInFlight:
        runner.run_pending_advance.reset_mock()
        runner_step: Any = SimpleNamespace(sequences=sequences, has_codes=False, is_over=False, result=lambda: None)
        return StepInFlight(runner_step, runner, [])

    def deliver(self, step: Any, frames: None = None) -> None:
        for each in step.runner_step.sequences:
            if self.line.has_row(each):
                each.append(FRAME)

    def follow_text(self, runner_step: Any) -> None:
        assert not any(each.id in self.line.running for each in runner_step.sequences), "it comes before they join"
        runner_step.was_followed = True

    def needed(self, each: Sequence) -> int:
        return -(-(each.num_positions + 1) // BLOCK_SIZE)

    def held(self, of: Iterable[Sequence]) -> set[int]:
        return {block for each in of for block in self.line.blocks.table(each.id)}

    def fits(self, each: Sequence) -> bool:
        free = self.num_blocks - len(self.held(self.running + self.in_lanes))
        return len(self.running + self.in_lanes) < self.num_rows and self.needed(each) <= free

    def remove(self, each: Sequence) -> None:
        for place in (self.waiting, self.jobs, self.running, self.in_lanes):
            if each in place:
                place.remove(each)

    def retired(self, sequences: Iterable[Sequence]) -> None:
        for each in sequences:
            if each in self.running + self.in_lanes:
                assert each.listener.audio_s == pytest.approx(0.08 * (each.num_frames - each.num_sent))
                if each.finish_reason is not None:
                    self.remove(each)

    @rule(
        kind=st.sampled_from(["new", "new", "job", "job", "live", "heard", "cloned"]), rows=st.integers(1, 7),
        frames=st.sampled_from([1, 2, 4, 8, 8]), prefix=st.integers(0, 1), in_hand_s=st.sampled_from([0.0, 0.5]),
        together=st.sampled_from([1, 2, 4]),
    )  # fmt: skip
    def arrive(self, kind: str, together: int, **options: Any) -> None:
        for _ in range(together):
            self.come(kind, **options)

    def come(self, kind: str, *, rows: int, frames: int, prefix: int, in_hand_s: float) -> None:
        line, is_job, options = self.line, kind == "job", {"background": True} if kind == "job" else {}
        ahead = len(self.waiting) + sum(not each.is_background for each in self.running + self.in_lanes)
        is_full = len(self.jobs) >= max(1, self.num_rows // 8) if is_job else ahead >= self.num_rows + 3
        if is_full:
            with pytest.raises(Overloaded, match="jobs" if is_job else rf"\({ahead} running or waiting\)") as refused:
                line.check_room(**options)
            assert is_job or refused.value.retry_after_s > 0
        else:
            line.check_room(**options)
        if is_full and kind not in ("heard", "job"):
            return
        prefix = prefix if kind == "heard" and frames > 1 else 0
        each = sequence(
            len(self.known), rows=rows, frames=frames, prefix=prefix, background=is_job, continues=kind == "heard"
        )
        if kind == "heard":
            each.listener = Listener(CLOCK.now_s + in_hand_s)
        if kind == "live":
            each.prompt = replace(each.prompt, trailing=each.prompt.trailing[:0], has_all_text=False)
        if kind == "cloned":
            each.prompt = replace(each.prompt, dense=torch.zeros(1, 4))
        self.known.append(each)
        line.add(each)
        place = self.jobs if is_job else self.waiting
        place.insert(0 if kind == "heard" else len(place), each)

    @precondition(lambda self: any(not each.prompt.has_all_text for each in self.known))
    @rule(data=st.data(), has_all_text=st.booleans())
    def write(self, data: st.DataObject, has_all_text: bool) -> None:
        each = data.draw(st.sampled_from([each for each in self.known if not each.prompt.has_all_text]))
        trailing = np.append(each.prompt.trailing, np.int32(0))
        each.prompt = replace(each.prompt, trailing=trailing, has_all_text=has_all_text)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.known)))  # one that has ended or never was is no error
        self.drop(number)

    def drop(self, number: int) -> None:
        self.lanes.wait_for_lane(number)
        self.check_waits(any(each.id == number for each in self.in_lanes))
        self.line.abort(number)
        for each in self.known[number : number + 1]:
            self.remove(each)

    def check_waits(self, waits: bool) -> None:
        awaited = [call.args[0] for call in DEVICE.wait_stream.call_args_list]
        assert awaited == [lane.cuda_stream for lane in self.lanes.runners] * waits
        DEVICE.reset_mock()

    @rule(taken_s=st.sampled_from([0.0, 0.0, 0.005, 0.03, 0.3]), times=st.sampled_from([1, 2, 5]))
    def step(self, taken_s: float, times: int) -> None:
        for _ in range(times):
            self.collect()
            CLOCK.now_s += taken_s
            self.choose()

    @rule()
    def collect(self) -> None:
        """The frames of the engine's step are there. It still uses its rows and blocks."""
        if self.batch is not None:
            self.deliver(self.beside)
            self.line.retire(self.batch.decode)
            self.retired(self.batch.decode)
            self.batch = None

    def choose(self) -> None:
        line, ready = self.line, [each for each in self.waiting if not each.awaits_text]
        room = self.num_blocks - len(self.held(self.in_lanes))
        is_crowded = sum(map(self.needed, self.running)) > room
        is_idle = line.is_idle
        self.batch = line.schedule()
        prefilled = [] if self.batch is None else self.batch.prefill
        assert is_idle == (self.batch is None and not ready and not is_crowded)
        self.check_preempted(ready, prefilled, is_crowded=is_crowded)
        self.check_admitted(ready, prefilled, is_crowded=is_crowded)
        expected = self.due()
        self.scheduled_s = CLOCK.now_s
        if self.batch is None:
            assert expected == []
            self.unused_blocks -= self.held(self.running)  # sequences that wait for text may get blocks without a step
            return
        assert self.batch.decode == expected
        for each in self.running:
            assert len(line.blocks.table(each.id)) == self.needed(each)
        self.lanes.begin_step()
        for lane in self.lanes.runners:
            lane.cuda_stream.wait_stream.assert_called_once_with(DEVICE)  # type: ignore[union-attr]
            lane.cuda_stream.reset_mock()  # type: ignore[union-attr]
        self.beside = SimpleNamespace(runner_step=SimpleNamespace(sequences=self.batch.decode))
        with_row = self.running + self.in_lanes
        self.unused_rows = {*range(self.num_rows)} - {each.row for each in with_row if each.row is not None}
        self.unused_blocks = {*range(1, self.num_blocks + 1)} - self.held(with_row)

    def check_preempted(self, ready: list[Sequence], prefilled: list[Sequence], *, is_crowded: bool) -> None:
        """Jobs give way before listeners, and the youngest first; none without need. They go on before others.

        Listeners that have text give way only where the blocks do not suffice for those that run.
        """
        preempted = [each for each in self.running if each.id not in self.line.running or each in prefilled]
        jobs = [each for each in self.running if each.is_background]
        listeners = [each for each in self.running if not each.is_background and (is_crowded or each.awaits_text)]
        order = [*jobs[::-1], *listeners[::-1]]
        assert {*preempted} == {*order[: len(preempted)]}
        assert preempted or not is_crowded
        for each in preempted:
            self.remove(each)
        if preempted:
            last = order[len(preempted) - 1]
            newcomer = [] if is_crowded else [each for each in ready if each not in prefilled][:1]
            wanted = [each for each in [*self.running, *prefilled, *newcomer, last] if each not in self.in_lanes]
            has_row = len({*wanted, *self.in_lanes}) <= self.num_rows
            assert not has_row or sum(map(self.needed, {*wanted})) > self.num_blocks - len(self.held(self.in_lanes))
        self.waiting = [each for each in preempted if not each.is_background] + self.waiting
        self.jobs = [each for each in preempted if each.is_background] + self.jobs

    def check_admitted(self, ready: list[Sequence], prefilled: list[Sequence], *, is_crowded: bool) -> None:
        """In the order of the line; sequences that await text, and one job, only if no other waits."""
        first = [each for each in prefilled if each in ready]
        then = [each for each in prefilled if each not in ready]
        assert first == ready[: len(first)]
        awaiting = [each for each in self.waiting if each.awaits_text]
        jobs, num_running_jobs = [*self.jobs], sum(each.is_background for each in self.running)
        for each in prefilled:
            self.remove(each)
            self.running.append(each)
        assert [*self.line.running.values()] == self.running
        if is_crowded:
            assert prefilled == []
        elif len(first) < len(ready):
            assert then == []
            assert not any(each.is_background or each.awaits_text for each in self.running)
            assert not self.fits(ready[len(first)])
        else:
            assert not any(map(self.fits, self.waiting))
            if then and then[0].is_background:
                assert prefilled == jobs[:1]
                assert num_running_jobs < self.most_of_jobs()
            else:
                assert then == [each for each in awaiting if each in then]
                is_full = num_running_jobs >= self.most_of_jobs()
                assert prefilled or is_full or not jobs or not self.fits(jobs[0])

    def most_of_jobs(self) -> int:
        """The most rows that jobs have beside listeners with a row or ready for one."""
        listeners = sum(not each.is_background for each in self.running + self.in_lanes)
        listeners += sum(not each.awaits_text for each in self.waiting)
        left = self.num_rows - self.num_rows // 8 - listeners
        return max(0, min(left, self.num_rows // 2, max(4, 18 - listeners // 4))) if listeners else max(1, left)

    def due(self) -> list[Sequence]:
        """The running sequences that have text. Some sit out for a frame that is the first or nearly due: jobs, and
        those far ahead of their listeners. Jobs also sit out beyond their rows, the youngest.
        """
        jobs = [each for each in self.running if each.is_background]
        ready = [each for each in self.running if not each.awaits_text and not each.is_background]
        nearly_due_s = min(0.25, 3 * (CLOCK.now_s - self.scheduled_s))
        has_rows = 2 * (len(self.running) - len(jobs)) <= self.num_rows
        leads = {each: each.listener.lead_s(CLOCK.now_s) for each in ready}
        if any(lead_s < nearly_due_s if each.listener.has_begun else has_rows for each, lead_s in leads.items()):
            return [each for each in ready if leads[each] < self.max_lead_s] or ready
        return (jobs[: self.most_of_jobs()] if ready else jobs) + ready

    @precondition(lambda self: self.beside is not None)
    @rule(num_failing=st.sampled_from([0, 0, 0, 1, 2]))
    def start_lane(self, num_failing: int) -> None:
        """A lane takes the head of the line: of text and without frames or a cloned voice, if it is short enough, on
        rows and blocks that neither the engine's step nor another lane has used since that step began.
        """
        self.num_failing = num_failing
        ready = [each for each in self.waiting if not each.awaits_text]
        self.lanes.start_step(self.beside)
        taken = [each for each in self.waiting if self.line.has_row(each)]
        assert taken == ready[: len(taken)]
        self.waiting = [each for each in self.waiting if each not in taken]
        self.in_lanes += taken
        num_beside = sum(not each.is_background for each in self.beside.runner_step.sequences)
        if not self.free_lanes or num_beside > 2:
            assert taken == []
            return
        lane, num_blocks = self.free_lanes[0], len(self.unused_blocks)
        is_plain = [not each.num_frames and each.prompt.dense is None for each in ready]
        needed = [sum(map(self.needed, ready[: number + 1])) for number in range(len(ready))]
        most = min(len(ready), 2, len(self.unused_rows))
        is_short = [each.num_positions <= lane.most_positions for each in ready]
        takes = [is_plain[n] and is_short[n] and needed[n] <= num_blocks for n in range(most)]
        assert len(taken) == [*takes, False].index(False)
        rows, blocks = {each.row for each in taken}, self.held(taken)
        assert rows <= self.unused_rows
        assert blocks <= self.unused_blocks
        self.unused_rows -= rows
        self.unused_blocks -= blocks
        for each in taken[:num_failing]:
            self.drop(each.id)
        if taken[num_failing:]:
            self.lane_steps.append(self.lanes._in_flight[-1])
            assert self.lane_steps[-1].runner_step.sequences == taken[num_failing:]
            assert self.lane_steps[-1].runner is self.free_lanes.pop(0)

    @precondition(lambda self: self.lane_steps)
    @rule(data=st.data())
    def run_lane(self, data: st.DataObject) -> None:
        runner_step: Any = data.draw(st.sampled_from(self.lane_steps)).runner_step
        runner_step.has_codes, runner_step.is_over = True, runner_step.has_codes

    @rule()
    def collect_lanes(self) -> None:
        """One lane's frames are handed on at once. The sequences of lanes that are over join the others."""
        joining, handed_on = list[StepInFlight](), list[StepInFlight]()
        for each in self.lane_steps:
            if each.runner_step.has_codes and not each.is_collected:
                handed_on.append(each)
                break
            if each.is_collected and each.runner_step.is_over:
                joining.append(each)
        assert self.lanes.collect() == bool(handed_on)
        assert self.lanes.is_idle == (len(self.lane_steps) == len(joining))
        for step in joining:
            self.lane_steps.remove(step)
            self.free_lanes = sorted([*self.free_lanes, step.runner], key=self.lanes.runners.index)
            assert step.runner_step.was_followed  # type: ignore[attr-defined]
            step.runner.run_pending_advance.assert_called()  # type: ignore[attr-defined]
            joined = [each for each in step.runner_step.sequences if each in self.in_lanes]
            self.running += joined
            self.in_lanes = [each for each in self.in_lanes if each not in joined]
        first = [each for step in handed_on for each in step.runner_step.sequences]
        assert all(each.num_frames == 1 for each in first if each in self.in_lanes)
        self.retired(first)
        self.check_waits(any(each.finish_reason is not None for each in first))  # for their rows, which are free now

    @invariant()
    def each_sequence_is_in_one_place_and_each_row_and_block_is_held_once(self) -> None:
        line, with_row = self.line, self.running + self.in_lanes
        assert [*line.waiting] == self.waiting
        assert [*line.waiting_background] == self.jobs
        assert [*line.running.values()] == self.running
        assert line.in_lanes == self.in_lanes
        line.check_integrity()
        assert line.num_free_rows == self.num_rows - len(with_row)
        assert line.blocks.num_free == self.num_blocks - len(self.held(with_row))
        listening = [each for each in with_row if not each.is_background]
        assert line.num_listeners == len(listening)
        assert line.num_background == len(with_row) - len(listening) + len(self.jobs)
        assert line.kv_used_ratio == pytest.approx(len(self.held(listening)) / self.num_blocks)
        live = {each.id: each for each in [*self.waiting, *self.jobs, *with_row]}
        for each in self.known:
            assert line.find(each.id) is live.get(each.id)
            assert line.has_row(each) == (each in with_row)
            assert (each.row is not None) == (each in with_row)

    def teardown(self) -> None:
        for each in self.known:
            each.prompt = replace(each.prompt, has_all_text=True)
        for _ in range(500):
            if self.line.is_idle and self.lanes.is_idle:
                break
            for step in self.lane_steps:
                step.runner_step.has_codes = step.runner_step.is_over = True  # type: ignore[misc]
            self.collect_lanes()
            self.step(0.3, 1)
        self.each_sequence_is_in_one_place_and_each_row_and_block_is_held_once()
        assert self.line.is_idle


def test_requests_come_and_go_while_steps_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "time", CLOCK)
    monkeypatch.setattr(lanes, "torch", SimpleNamespace(cuda=SimpleNamespace(current_stream=lambda: DEVICE)))
    monkeypatch.setattr(lanes, "_MOST_BESIDE_LANE", 2)
    stateful.run_state_machine_as_test(Steps, settings=BOUNDED)


def test_a_lane_never_takes_a_block_of_the_running_step() -> None:
    """Even if a sequence got a free block without a step: freed blocks are at the end of the queue."""
    blocks = BlockManager(num_blocks=6, block_size=BLOCK_SIZE)
    blocks.allocate(0, 2 * BLOCK_SIZE)
    blocks.begin_step()
    blocks.allocate(0, 3 * BLOCK_SIZE)
    blocks.free(0)
    assert (blocks.num_free, blocks.num_unused) == (5, 2)
    blocks.allocate(1, 2 * BLOCK_SIZE)
    assert (blocks.table(1), blocks.num_unused) == ([4, 5], 0)
    blocks.allocate(2, 2 * BLOCK_SIZE)
    assert blocks.num_unused == 0
    blocks.begin_step()
    assert blocks.num_unused == blocks.num_free == 1


def test_integrity_notices_a_lost_row() -> None:
    line = scheduler()
    line.add(sequence(1))
    batch = line.schedule()
    assert batch is not None
    batch.decode[0].row = None
    with pytest.raises(AssertionError, match="rows lost"):
        line.check_integrity()


@pytest.mark.parametrize(
    ("listeners", "idle", "most"), [(1, False, 18), (30, False, 11), (90, False, 4), (0, True, 40)]
)
def test_the_more_listeners_there_are_the_fewer_rows_have_jobs(listeners: int, idle: int, most: int) -> None:
    """A conversation that waits for blocks and has no text wants no row."""
    line = scheduler(blocks=4000, max_num_seqs=256, max_num_waiting=256)
    ids = np.zeros(5000 * BLOCK_SIZE, np.int32)
    for _ in range(idle):
        line.add(replace(sequence(999), prompt=Prompt(ids, ids, ids[:0], num_text_tokens=1, has_all_text=False)))
    for number in range(40 + listeners):
        line.add(sequence(number, frames=1000, background=number < 40))
    for _ in range(45):
        of_jobs = [number for number in step(line)[1] if number < 40]
    assert len(of_jobs) == most
