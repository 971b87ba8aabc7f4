"""Newcomers' first frames beside a step that runs. A CPU has no lane: here it gets one, and events that take time."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from deployments.errors import EngineError, Overloaded, TalkerLost
from deployments.protocol import FinishReason, FrameChunk, SynthesisRequest
from deployments.talker.engine import lanes
from deployments.talker.engine.engine import Engine
from deployments.talker.engine.scheduler import Scheduler
from deployments.talker.runner.model_runner import ModelRunner
from deployments.talker.state.sequence import Sequence, TextProgress
from tests.deployments.talker.driving import Spoken, ask, drain, resumed, speak
from tests.deployments.talker.engine.test_engine import trip
from tests.deployments.talker.engine.test_scheduler import FRAME, ids, scheduler, sequence, step
from tests.deployments.talker.runner.test_model_runner import like_a_gpu
from tests.deployments.talker.test_live_text import at_once, live

OLD = ask("The one that speaks.", seed=1, frames=12, ignore_eos=True)
NEW_FRAMES = 9
NEW = ask("A newcomer.", seed=2, frames=NEW_FRAMES, ignore_eos=True)
LONG = ask("A prompt that the lane does not take. " * 12, seed=3, frames=3, ignore_eos=True, non_streaming_mode=True)


@dataclass(slots=True)
class Clock:
    """Events of the device take so many looks at them."""

    looks: int = 0

    def event(self) -> "Event":
        return Event(self.looks)


@dataclass(slots=True)
class Event:
    left: int

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0

    def synchronize(self) -> None:
        self.left = 0

    def elapsed_time(self, other: "Event") -> float:
        return 1.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(ModelRunner, "_event_now", lambda runner: clock.event())
    return clock


@pytest.fixture
def engine(tiny_checkpoint: Callable[[str], Path], clock: Clock) -> Engine:
    engine = like_a_gpu(tiny_checkpoint("CustomVoice"))
    engine.lanes.runners = [another_lane(engine.runner)]
    return engine


def another_lane(runner: ModelRunner) -> ModelRunner:
    """Of the same rows, weights, keys and values."""
    networks = runner.networks.another(num_rows=runner.shape.max_num_seqs, num_positions=256)
    return ModelRunner(networks, runner.blocks, runner.shape, most_positions=256)


def ids_beside(engine: Engine) -> list[int]:
    return [sequence.id for sequence in engine.scheduler.in_lanes]


@dataclass(slots=True)
class Lane:
    """What the lane was given, and the engine that it belongs to."""

    engine: Engine
    clock: Clock
    prefilled: list[int] = field(default_factory=list)
    queued: list[list[int]] = field(default_factory=list)

    def beside(
        self, *work: Callable[[], object], old: SynthesisRequest = OLD, lane_looks: int = 4,
        failures: dict[int, Exception] | None = None,
    ) -> list[tuple[int, FrameChunk]]:  # fmt: skip
        """Begin to speak `old` as number 0. While its second step runs do `work`, one thing a look: the chunks."""
        self.engine.add(0, old)
        chunks = list(self.engine.step().chunks)
        self.clock.looks = 20
        waiting = iter(work)

        def meanwhile() -> None:
            self.clock.looks = lane_looks  # few: the lane's work is over before the step
            next(waiting, lambda: None)()

        output = self.engine.step(meanwhile=meanwhile)
        assert failures is not None or output.failures == ()
        (failures if failures is not None else {}).update(output.failures)
        self.clock.looks = 0
        return chunks + list(output.chunks)


@pytest.fixture
def lane(engine: Engine, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Lane:
    seen, [runner] = Lane(engine, clock), engine.lanes.runners
    prefill, queue_step = runner.prefill, runner.queue_step

    def prefilling(sequences: list[Sequence]) -> None:
        seen.prefilled += [sequence.id for sequence in sequences]
        prefill(sequences)

    def queueing(sequences: list[Sequence], *more: object) -> object:
        seen.queued.append([sequence.id for sequence in sequences])
        return queue_step(sequences, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "prefill", prefilling)
    monkeypatch.setattr(runner, "queue_step", queueing)
    return seen


def joined(chunks: list[tuple[int, FrameChunk]], rest: dict[int, Spoken], number: int) -> np.ndarray:
    """All codes of a sequence."""
    first = [chunk.codes for other, chunk in chunks if other == number]
    return np.concatenate([*first, rest[number].codes] if number in rest else first)


def test_a_newcomer_has_its_first_frame_before_the_running_step(engine: Engine, lane: Lane) -> None:
    alone = [speak(engine, each).codes for each in (OLD, NEW)]
    assert lane.queued == []  # nothing ran beside them
    chunks = lane.beside(lambda: engine.add(1, NEW))
    assert [number for number, _ in chunks] == [0, 1]
    assert ids_beside(engine) == [1]
    assert engine.scheduler.num_listeners == 2
    rest = drain(engine)
    assert lane.queued == [[1]]
    for number in (0, 1):
        np.testing.assert_array_equal(joined(chunks, rest, number), alone[number])
        assert rest[number].reason is FinishReason.LENGTH


def test_newcomers_that_come_together_share_the_lane(engine: Engine, lane: Lane) -> None:
    requests = [ask("Several.", seed=seed, frames=5, ignore_eos=True) for seed in range(4)]
    alone = [speak(engine, each).codes for each in requests]

    def add_all() -> None:
        for number in (1, 2, 3):
            engine.add(number, requests[number])

    chunks = lane.beside(add_all, old=requests[0])
    rest = drain(engine)
    assert lane.queued == [[1, 2, 3]]
    for number in range(4):
        np.testing.assert_array_equal(joined(chunks, rest, number), alone[number])


def test_a_newcomer_waits_for_the_lane_if_that_is_free_first(engine: Engine, lane: Lane) -> None:
    chunks = lane.beside(lambda: engine.add(1, NEW), lambda: engine.add(2, NEW))
    rest = drain(engine)
    assert lane.queued == [[1], [2]]
    np.testing.assert_array_equal(joined(chunks, rest, 1), joined(chunks, rest, 2))


def test_a_newcomer_joins_the_next_step_if_that_begins_first(engine: Engine, lane: Lane) -> None:
    chunks = lane.beside(lambda: engine.add(1, NEW), lambda: engine.add(2, NEW), lane_looks=60)
    assert [number for number, _ in chunks] == [0, 0]
    assert ids_beside(engine) == [1]
    chunks += engine.step().chunks
    assert [sequence.id for sequence in engine.scheduler.running.values()] == [0, 2]
    rest = drain(engine)
    assert lane.queued == [[1]]
    np.testing.assert_array_equal(joined(chunks, rest, 1), joined(chunks, rest, 2))


def test_a_newcomer_takes_another_lane_while_one_is_busy(engine: Engine, lane: Lane) -> None:
    engine.lanes.runners.append(another_lane(engine.runner))
    alone = speak(engine, NEW).codes
    chunks = lane.beside(lambda: engine.add(1, NEW), lambda: engine.add(2, NEW), lane_looks=60)
    assert ids_beside(engine) == [1, 2]
    assert engine.lanes.runners[1].has_pending_advance
    rest = drain(engine)
    assert lane.queued == [[1]]  # by the first one
    for number in (1, 2):
        np.testing.assert_array_equal(joined(chunks, rest, number), alone)


@pytest.mark.parametrize("frames", [1, 2])
def test_a_stream_of_first_frames_ends(
    engine: Engine, lane: Lane, frames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.lanes, "_await_all", awaited := Mock())
    chunks = lane.beside(lambda: engine.add(1, ask(frames=frames, ignore_eos=True)))
    rest = drain(engine)
    assert lane.queued == [[1]]
    assert len(joined(chunks, rest, 1)) == frames
    assert [chunk.finish_reason for number, chunk in chunks if number == 1] == (
        [FinishReason.LENGTH] if frames == 1 else [None]
    )
    assert awaited.call_count == (frames == 1)  # its row is free while the lane still uses it


def test_a_newcomer_aborted_leaves_nothing(engine: Engine, lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.lanes, "_await_all", awaited := Mock())
    alone = speak(engine, OLD).codes
    free = engine.scheduler.blocks.num_free
    chunks = lane.beside(lambda: engine.add(1, NEW), lambda: engine.abort(1))
    assert (lane.queued, awaited.call_count) == ([[1]], 1)
    rest = drain(engine)
    assert [number for number, _ in chunks] == [0]
    np.testing.assert_array_equal(joined(chunks, rest, 0), alone)
    assert engine.scheduler.blocks.num_free == free


def test_an_engine_whose_only_stream_is_in_the_lane_is_not_idle(engine: Engine, lane: Lane) -> None:
    alone = speak(engine, NEW).codes
    chunks = lane.beside(lambda: engine.add(1, NEW), lambda: engine.abort(0))
    assert not engine.is_idle
    assert engine.poll_timeout_s == 0
    rest = drain(engine)
    np.testing.assert_array_equal(joined(chunks, rest, 1), alone)


def test_a_prefill_that_raises_fails_alone(engine: Engine, lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    [beside_it] = engine.lanes.runners
    trip(monkeypatch, beside_it, {2})

    def add_both() -> None:
        engine.add(2, NEW)
        engine.add(1, NEW)

    failures: dict[int, Exception] = {}
    lane.beside(add_both, failures=failures)
    assert [(number, type(error)) for number, error in failures.items()] == [(2, EngineError)]
    assert "tripped" in str(failures[2])
    assert lane.queued == [[1]]
    assert sorted(drain(engine)) == [0, 1]


def test_a_newcomer_without_a_slot_fails_alone(engine: Engine, lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    def add() -> None:
        monkeypatch.setattr(engine.audio, "open", Mock(side_effect=Overloaded("full")))
        engine.add(1, NEW)

    failures: dict[int, Exception] = {}
    lane.beside(add, failures=failures)
    assert [(number, type(error)) for number, error in failures.items()] == [(1, Overloaded)]
    assert sorted(drain(engine)) == [0]
    assert (lane.prefilled, lane.queued) == ([1], [])


def test_a_state_that_is_not_finite_is_reported(engine: Engine, lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    [beside_it] = engine.lanes.runners
    queue_step = beside_it.queue_step

    def breaking(sequences: list[Sequence], *more: object) -> object:
        engine.runner.state.hidden[sequences[0].row, 3] = torch.nan
        return queue_step(sequences, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(beside_it, "queue_step", breaking)
    failures: dict[int, Exception] = {}
    lane.beside(lambda: engine.add(1, NEW), failures=failures)
    assert [(number, type(error)) for number, error in failures.items()] == [(1, TalkerLost)]
    assert sorted(drain(engine)) == [0]


def test_text_that_is_written_while_its_first_frame_is_made_is_spoken(engine: Engine, lane: Lane) -> None:
    text = "It is spoken while it is written."
    expected = speak(engine, at_once(text)).codes

    def begin() -> None:
        engine.add(1, live(at_once(text)))
        engine.append_text(1, text[:7], is_last=False)

    chunks = lane.beside(begin, lambda: engine.append_text(1, text[7:], is_last=True))
    assert ids_beside(engine) == [1]
    rest = drain(engine)
    assert lane.queued == [[1]]
    np.testing.assert_array_equal(joined(chunks, rest, 1), expected)


@pytest.mark.parametrize("why", ["long", "resumed", "busy", "background"])
def test_who_does_not_take_the_lane(engine: Engine, lane: Lane, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    request = {
        "long": LONG,
        "resumed": resumed(NEW, speak(engine, NEW).codes[:3]),
        "busy": NEW,
        "background": replace(NEW, background=True),
    }[why]
    if why == "busy":
        monkeypatch.setattr(lanes, "_MOST_BESIDE_LANE", 0)
    expected = speak(engine, request).codes
    chunks = lane.beside(lambda: engine.add(1, request))
    rest = drain(engine)
    assert lane.prefilled == []
    np.testing.assert_array_equal(joined(chunks, rest, 1), expected)


def test_beside_any_job_a_listener_takes_the_lane(engine: Engine, lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "_MOST_BESIDE_LANE", 0)
    background = replace(OLD, background=True)
    lane.beside(lambda: engine.add(1, NEW), old=background)
    assert lane.queued == [[1]]
    drain(engine)


def test_rows_that_the_running_step_uses_are_not_for_the_lane(engine: Engine, lane: Lane) -> None:
    """Of five rows three others are taken before the step, and one of these is free again while it runs."""
    for number in (1, 2, 3):
        engine.add(number, NEW)

    def change() -> None:
        rows.extend(sequence.row for sequence in engine.scheduler.running.values())
        engine.abort(3)
        engine.add(8, NEW)
        engine.add(9, NEW)

    rows: list[int | None] = []
    lane.beside(change)
    assert lane.queued == [[8]]
    [newcomer] = engine.scheduler.in_lanes
    assert newcomer.row not in rows
    assert sorted(drain(engine)) == [0, 1, 2, 8, 9]


def test_where_a_first_frame_read_is_known(engine: Engine, lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lane's reading comes before its sequence joins the others, so before its second frame."""
    read: dict[bool, list[tuple[int, float]]] = {False: [], True: []}
    [beside_it] = engine.lanes.runners
    config = engine.runner.networks.config
    for runner in (engine.runner, beside_it):
        runner.networks.config = replace(config, text=replace(config.text, alignment_head=(1, 0)))
    for in_lane, found in read.items():
        monkeypatch.setattr(
            TextProgress,
            "read",
            lambda progress, mass, moment, prompt, found=found: (
                found.append((len(prompt.text_ids), mass)) if prompt.num_text_tokens == len("A newcomer.") else None
            ),
        )
        if in_lane:
            lane.beside(lambda: engine.add(1, NEW))
        else:
            engine.add(1, NEW)
        drain(engine)
    assert lane.queued == [[1]]
    assert len(read[False]) == NEW_FRAMES - 1
    np.testing.assert_allclose(read[True], read[False], atol=1e-5)


def lanes_of(line: Scheduler) -> lanes.Lanes:
    """Those of an engine without any."""
    plain: Any = SimpleNamespace(shape=SimpleNamespace(networks="plain"))
    nobody: Any = None
    return lanes.Lanes(plain, line, nobody)


def lane_for(*, most: int = 8, most_positions: int = 256) -> Any:
    return SimpleNamespace(buckets=[most], most_positions=most_positions)


def taken(line: Scheduler, batch: Iterable[Sequence]) -> tuple[set[int | None], set[int]]:
    """Rows and blocks of sequences."""
    return {each.row for each in batch}, {block for each in batch for block in line.blocks.table(each.id)}


@pytest.mark.parametrize("blocks", [100, 3])
def test_a_newcomer_starts_beside_a_step_on_rows_and_blocks_that_the_step_does_not_use(blocks: int) -> None:
    """What is free again since the step was chosen is used by the step."""
    line = scheduler(max_num_seqs=3 if blocks > 3 else 9, blocks=blocks, max_num_waiting=9)
    beside = lanes_of(line)
    for number in (0, 1):
        line.add(sequence(number, rows=2))
    batch = line.schedule()
    assert batch is not None
    beside.begin_step()
    rows, used = taken(line, batch.decode)
    line.abort(0)
    for number in (5, 6):
        line.add(sequence(number, rows=2))
    started = beside._take_newcomers(lane_for())
    assert ids(started) == ids(line.in_lanes) == [5]
    own_rows, own_blocks = taken(line, started)
    assert rows.isdisjoint(own_rows)
    assert used.isdisjoint(own_blocks)
    assert (line.num_listeners, line.find(5)) == (2, started[0])
    line.check_integrity()
    assert step(line) == ([6], [1, 6])  # the lane has 5 still
    started[0].append(FRAME)
    line.join(started)
    assert step(line) == ([], [1, 6, 5])


def test_nobody_overtakes_who_does_not_give_to_lane_the_step() -> None:
    line = scheduler(max_num_seqs=9, max_num_waiting=9)
    beside = lanes_of(line)
    line.add(sequence(0))
    line.schedule()
    beside.begin_step()
    for number, rows in ((1, 3), (2, 2), (3, 4)):
        line.add(sequence(number, rows=rows))
    assert beside._take_newcomers(lane_for(most_positions=2)) == []
    assert ids(beside._take_newcomers(lane_for(most=1, most_positions=3))) == [1]
    assert ids(beside._take_newcomers(lane_for(most_positions=3))) == [2]
    line.abort(2)
    line.join(line.in_lanes)
    assert line.in_lanes == []
    assert step(line) == ([3], [0, 1, 3])
