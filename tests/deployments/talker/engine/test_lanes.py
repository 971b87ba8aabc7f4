"""Newcomers' first frames beside a step that runs. A CPU has no lane: here it gets one, and events that take time."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from deployments.protocol import FrameChunk, SynthesisRequest
from deployments.talker.engine.engine import Engine
from deployments.talker.runner.model_runner import ModelRunner
from deployments.talker.state.sequence import Sequence
from tests.deployments.talker.driving import Spoken, ask, drain, speak
from tests.deployments.talker.runner.test_model_runner import like_a_gpu
from tests.deployments.talker.test_live_text import at_once, live

OLD = ask("The one that speaks.", seed=1, frames=12, ignore_eos=True)
NEW = ask("A newcomer.", seed=2, frames=9, ignore_eos=True)


def event(looks: int) -> Mock:
    """An event of the device, which takes so many looks at it."""
    answers = chain(repeat(False, looks), repeat(True))
    return Mock(query=lambda: next(answers), elapsed_time=lambda other: 1.0)


def another_lane(runner: ModelRunner) -> ModelRunner:
    """Of the same rows, weights, keys and values."""
    networks = runner.networks.another(num_rows=runner.shape.max_num_seqs, num_positions=256)
    return ModelRunner(networks, runner.blocks, runner.shape, most_positions=256)


@dataclass(slots=True)
class Lane:
    """An engine with one lane, and what the lane was given."""

    engine: Engine
    looks: int = 0
    queued: list[list[int]] = field(default_factory=list)

    def beside(self, *work: Callable[[], object], lane_looks: int = 4) -> list[tuple[int, FrameChunk]]:
        """Begin to speak OLD as number 0. While its second step runs do `work`, one thing a look: the chunks."""
        self.engine.add(0, OLD)
        chunks = list(self.engine.step().chunks)
        self.looks = 20
        waiting = iter(work)

        def meanwhile() -> None:
            self.looks = lane_looks  # few: the lane's work is over before the step
            next(waiting, lambda: None)()

        output = self.engine.step(meanwhile=meanwhile)
        assert output.failures == ()
        self.looks = 0
        return chunks + list(output.chunks)

    @property
    def ids(self) -> list[int]:
        """Of sequences that have not joined the steps yet."""
        return [sequence.id for sequence in self.engine.scheduler.in_lanes]


@pytest.fixture
def lane(tiny_checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Lane:
    seen = Lane(like_a_gpu(tiny_checkpoint("CustomVoice")))
    runner = another_lane(seen.engine.runner)
    seen.engine.lanes.runners = [runner]
    queue_step = runner.queue_step

    def queueing(sequences: list[Sequence], *more: object) -> object:
        seen.queued.append([sequence.id for sequence in sequences])
        return queue_step(sequences, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(ModelRunner, "_event_now", lambda runner: event(seen.looks))
    monkeypatch.setattr(runner, "queue_step", queueing)
    return seen


@pytest.fixture
def engine(lane: Lane) -> Engine:
    return lane.engine


def joined(chunks: list[tuple[int, FrameChunk]], rest: dict[int, Spoken], number: int) -> np.ndarray:
    first = [chunk.codes for other, chunk in chunks if other == number]
    return np.concatenate([*first, rest[number].codes] if number in rest else first)


@pytest.mark.parametrize(
    ("work", "looks", "num_lanes", "frames", "queued"),
    [
        ([[1]], 4, 1, 9, [[1]]),
        ([[1]], 4, 1, 1, [[1]]),  # its first frame is its last
        ([[1, 2, 3]], 4, 1, 5, [[1, 2, 3]]),
        ([[1], [2]], 4, 1, 2, [[1], [2]]),  # the second waits for the lane
        ([[1], [2]], 60, 1, 5, [[1]]),  # it joins the next step, which begins before the lane is free
        ([[1], [2]], 60, 2, 5, [[1]]),  # it takes the other lane
    ],
)
def test_newcomers_say_beside_a_step_what_they_say_alone(
    engine: Engine, lane: Lane, work: list[list[int]], looks: int, num_lanes: int, frames: int, queued: list[list[int]]
) -> None:
    requests = [OLD, *(ask("A newcomer.", seed=seed, frames=frames, ignore_eos=True) for seed in range(1, 4))]
    newcomers = [number for group in work for number in group]
    alone = {number: speak(engine, requests[number]).codes for number in (0, *newcomers)}
    engine.lanes.runners += [another_lane(engine.runner) for _ in range(num_lanes - 1)]
    assert lane.queued == []  # nothing ran beside them

    def add(numbers: list[int]) -> None:
        for number in numbers:
            engine.add(number, requests[number])

    chunks = lane.beside(*(partial(add, group) for group in work), lane_looks=looks)
    if looks > 4:
        assert lane.ids == newcomers[:num_lanes]
    else:
        assert [number for number, _ in chunks][:2] == [0, 1], "its first frame comes before the step's"
    rest = drain(engine)
    assert lane.queued == queued
    for number, codes in alone.items():
        np.testing.assert_array_equal(joined(chunks, rest, number), codes)


def test_a_long_newcomer_does_not_take_the_lane(engine: Engine, lane: Lane) -> None:
    lane.beside(lambda: engine.add(1, ask("A text that takes many passes. " * 10, frames=2)))
    assert (lane.queued, lane.ids, sorted(drain(engine))) == ([], [], [0, 1])


@pytest.mark.parametrize(("aborted", "request_left"), [(0, NEW), (1, OLD)])
def test_an_abort_leaves_the_other(engine: Engine, lane: Lane, aborted: int, request_left: SynthesisRequest) -> None:
    alone, free = speak(engine, request_left).codes, engine.scheduler.blocks.num_free
    chunks = lane.beside(lambda: engine.add(1, NEW), lambda: engine.abort(aborted))
    assert lane.queued == [[1]]
    if not aborted:  # the only stream is in the lane
        assert not engine.is_idle
        assert engine.poll_timeout_s == 0
    rest = drain(engine)
    np.testing.assert_array_equal(joined(chunks, rest, 1 - aborted), alone)
    assert engine.scheduler.blocks.num_free == free


def test_text_that_is_written_while_its_first_frame_is_made_is_spoken(engine: Engine, lane: Lane) -> None:
    text = "It is spoken while it is written."
    expected = speak(engine, at_once(text)).codes

    def begin() -> None:
        engine.add(1, live(at_once(text)))
        engine.append_text(1, text[:7], is_last=False)

    waited: list[int] = []
    wait = engine.lanes.wait_for_lane
    engine.lanes.wait_for_lane = lambda number: (waited.append(number), wait(number))[1]  # type: ignore[method-assign]
    chunks = lane.beside(begin, lambda: engine.append_text(1, text[7:], is_last=True))
    assert (lane.ids, waited) == ([1], [1])
    rest = drain(engine)
    assert lane.queued == [[1]]
    np.testing.assert_array_equal(joined(chunks, rest, 1), expected)
