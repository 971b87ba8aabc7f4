import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from deployments.errors import Overloaded
from deployments.protocol import FinishReason, Progress, Sampling, SynthesisRequest
from deployments.talker.engine.scheduler import Scheduler
from deployments.talker.state.kv_cache import BlockManager
from deployments.talker.state.sequence import FrameLimit, Sequence
from deployments.talker.text.prompt import Prompt
from tests.clock import Clock

FRAME = np.zeros(4, np.int16)
BLOCK_SIZE = 4


def sequence(number: int, *, rows: int = 3, frames: int = 8) -> Sequence:
    ids = np.zeros(rows, np.int32)
    prompt = Prompt(ids, ids, ids[:1], num_text_tokens=rows)
    request = SynthesisRequest(str(number), "text")
    return Sequence(number, request, prompt, Sampling(), FrameLimit(frames, FinishReason.LENGTH), frame_s=0.08)


def heard(number: int) -> Sequence:
    """A sequence that goes on with what a listener hears already."""
    each = sequence(number)
    each.request = replace(each.request, continues=True)
    return each


def awaiting_text(number: int) -> Sequence:
    """A sequence that waits for text."""
    each = sequence(number)
    each.prompt = replace(each.prompt, trailing=each.prompt.trailing[:0], has_all_text=False)
    return each


def scheduler(*, blocks: int = 100, max_num_seqs: int = 2, max_num_waiting: int = 2, **options: float) -> Scheduler:
    manager = BlockManager(num_blocks=blocks + 1, block_size=BLOCK_SIZE)
    return Scheduler(manager, max_num_seqs=max_num_seqs, max_num_waiting=max_num_waiting, **options)


def add(line: Scheduler, numbers: Iterable[int], make: Callable[..., Sequence] = sequence, **options: int) -> None:
    for number in numbers:
        line.add(make(number, **options))


def ids(sequences: list[Sequence]) -> list[int]:
    return [each.id for each in sequences]


def step(line: Scheduler) -> tuple[list[int], list[int]]:
    """One step as the engine takes it: who was prefilled, and who got a frame."""
    batch = line.schedule()
    if batch is None:
        return [], []
    decoded = ids(batch.decode)
    for each in batch.decode:
        assert len(line.blocks.table(each.id)) >= line.blocks.blocks_for(each.num_positions + 1)
        each.append(FRAME)
    line.retire(batch.decode)
    line.check_integrity()
    return ids(batch.prefill), decoded


def steps(line: Scheduler) -> Iterator[tuple[list[int], list[int]]]:
    while not line.is_idle:
        yield step(line)


def test_nothing_to_do_is_no_batch() -> None:
    line = scheduler()
    assert line.is_idle
    assert line.schedule() is None


def test_a_new_sequence_is_prefilled_and_decoded_in_one_step() -> None:
    line = scheduler()
    line.add(sequence(1))
    assert step(line) == ([1], [1])
    assert step(line) == ([], [1])


def test_rows_limit_who_runs_and_the_line_is_first_come_first_served() -> None:
    line = scheduler(max_num_seqs=2)
    for number, frames in [(1, 3), (2, 1), (3, 2), (4, 1)]:
        line.add(sequence(number, frames=frames))
    assert list(steps(line)) == [([1, 2], [1, 2]), ([3], [1, 3]), ([], [1, 3]), ([4], [4])]
    assert line.blocks.num_free == 100


def test_the_head_of_the_line_waits_for_blocks_and_nobody_overtakes_it() -> None:
    line = scheduler(blocks=4, max_num_seqs=3)
    line.add(sequence(1, rows=7, frames=1))  # two blocks
    line.add(sequence(2, rows=11, frames=1))  # three
    line.add(sequence(3, rows=1, frames=1))  # one, which is free all along
    assert list(steps(line)) == [([1], [1]), ([2, 3], [2, 3])]


def test_a_full_line_is_overload() -> None:
    line = scheduler(max_num_seqs=2, max_num_waiting=1)
    for number in range(3):
        line.check_room()
        line.add(sequence(number, frames=1))
    with pytest.raises(Overloaded, match=r"waiting: 3\)"):
        line.check_room()
    step(line)
    line.check_room()


def test_rows_that_run_count_towards_the_limit() -> None:
    line = scheduler(max_num_seqs=1, max_num_waiting=0)
    line.add(sequence(1))
    step(line)
    with pytest.raises(Overloaded):
        line.check_room()


def test_who_waits_for_text_is_prefilled_where_nobody_else_wants_the_place() -> None:
    line = scheduler(max_num_seqs=1)
    line.add(awaiting_text(1))
    assert step(line) == ([1], [])
    assert line.is_idle
    line.add(awaiting_text(2))
    assert line.is_idle
    line.add(sequence(3, frames=1))
    assert step(line) == ([3], [3])
    assert ids(list(line.waiting)) == [1, 2]
    assert step(line) == ([1], [])
    assert line.is_idle


def test_the_newest_gives_way_when_blocks_run_out_and_goes_on_first() -> None:
    line = scheduler(blocks=4, max_num_seqs=3, max_num_waiting=1)
    sequences = [sequence(number, rows=3, frames=4) for number in (1, 2, 3)]
    for each in [*sequences, sequence(4, rows=1, frames=1)]:
        line.add(each)
    assert step(line) == ([1, 2, 3], [1, 2, 3])  # a block each, one is free; with 4 frames it is two each
    assert step(line) == ([], [1, 2])
    assert ids(list(line.waiting)) == [3, 4]
    assert sequences[2].num_frames == 1
    assert [step(line) for _ in range(2)] == [([], [1, 2])] * 2
    assert step(line) == ([3, 4], [3, 4])
    assert list(steps(line)) == [([], [3])] * 2
    assert [each.num_frames for each in sequences] == [4, 4, 4]
    assert line.blocks.num_free == 4


def test_of_two_that_give_way_the_older_goes_on_first() -> None:
    line = scheduler(blocks=4, max_num_seqs=3)
    line.add(sequence(1, rows=7, frames=9))  # takes a third block in the second step, and the fourth in the sixth
    line.add(sequence(2, rows=1, frames=9))
    line.add(sequence(3, rows=1, frames=9))
    line.schedule()
    assert line.blocks.num_free == 0
    sequences = list(line.running.values())
    for each in sequences:
        each.frames = [FRAME] * 4
    assert step(line) == ([], [1])
    assert ids(list(line.waiting)) == [2, 3]


def test_abort_frees_a_running_sequence() -> None:
    line = scheduler()
    add(line, (1, 2, 3))
    step(line)
    line.abort(1)
    line.check_integrity()
    assert step(line) == ([3], [2, 3])
    line.abort(2)
    line.abort(3)
    assert line.is_idle
    assert line.blocks.num_free == 100
    line.check_integrity()


def test_abort_takes_a_waiting_sequence_out_of_the_line() -> None:
    line = scheduler(max_num_seqs=1)
    add(line, (1, 2, 3), frames=2)
    step(line)
    line.abort(2)
    assert [number for prefill, _ in steps(line) for number in prefill] == [3]


def test_abort_of_a_stranger_is_no_error() -> None:
    line = scheduler()
    line.add(sequence(1, frames=1))
    step(line)
    line.abort(1)
    line.abort(99)
    assert line.is_idle
    line.check_integrity()


def test_integrity_notices_a_lost_row() -> None:
    line = scheduler()
    line.add(sequence(1))
    batch = line.schedule()
    assert batch is not None
    batch.decode[0].row = None
    with pytest.raises(AssertionError, match="rows lost"):
        line.check_integrity()


@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_ends_with_everything_returned(seed: int) -> None:
    rng = random.Random(seed)
    line = scheduler(blocks=9, max_num_seqs=4, max_num_waiting=3)
    sequences: dict[int, Sequence] = {}
    aborted: set[int] = set()
    refused = preempted = 0
    for number in range(120):
        try:
            line.check_room()
        except Overloaded:
            refused += 1
        else:
            sequences[number] = sequence(number, rows=rng.randint(1, 9), frames=rng.randint(1, 20))
            line.add(sequences[number])
        if sequences and rng.random() < 0.2:
            victim = rng.choice(list(sequences))
            line.abort(victim)
            aborted.add(victim)
        before = set(line.running)
        step(line)
        preempted += any(each.id in before for each in line.waiting)
    for _ in steps(line):
        pass
    for number, each in sequences.items():
        assert number in aborted or each.num_frames == each.limit.frames
    assert line.blocks.num_free == 9
    assert refused
    assert preempted


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(5.0)
    monkeypatch.setattr("deployments.talker.engine.scheduler.time", clock)
    return clock


def running_for(frames: int, *, max_num_seqs: int = 8) -> Scheduler:
    """Two that have run for `frames` frames in no time, the listener of the second one began later."""
    line = scheduler(blocks=199, max_num_seqs=max_num_seqs, max_lead_s=1.0)
    add(line, (1, 2), frames=99)
    for _ in range(frames):
        step(line)
    return line


def test_those_far_ahead_sit_out_while_another_has_no_frame_or_a_frame_is_nearly_due(clock: Clock) -> None:
    line = running_for(16)
    assert step(line) == ([], [1, 2])  # 1.28 s ahead, but nobody waits
    line.add(sequence(3, frames=99))
    assert step(line) == ([3], [3])
    clock.now_s += 0.05
    assert step(line) == ([], [3])  # 30 ms are nearly due, as a step takes 50 ms
    for _ in range(2):
        step(line)
    assert step(line) == ([], [1, 2, 3])


def test_what_is_left_to_hear_is_enough_where_steps_are_short(clock: Clock) -> None:
    line = running_for(14)
    line.add(sequence(3, frames=99))
    assert step(line) == ([3], [3])
    clock.now_s += 0.01
    assert step(line) == ([], [1, 2, 3])  # 70 ms are seven steps


def test_nobody_sits_out_for_a_first_frame_once_half_of_the_rows_are_taken(clock: Clock) -> None:
    line = running_for(17, max_num_seqs=4)
    line.add(sequence(3, frames=99))
    assert step(line) == ([3], [1, 2, 3])
    clock.now_s += 0.05
    assert step(line) == ([], [3])  # but for frames that are nearly due


def test_those_far_ahead_run_again_when_their_listeners_have_caught_up(clock: Clock) -> None:
    line = running_for(14)
    line.add(sequence(3, frames=99))
    assert step(line) == ([3], [3])
    clock.now_s = 5.2
    assert step(line) == ([], [1, 2, 3])


@pytest.mark.usefixtures("clock")
def test_where_all_are_far_ahead_all_run() -> None:
    line = running_for(14)
    line.add(sequence(3, rows=9999))  # never fits
    assert step(line) == ([], [1, 2])


def test_long_texts_leave_rows_to_others(clock: Clock) -> None:
    """They are made far faster than they are heard, and would all keep their rows if they sat out for each other."""
    blocks = BlockManager(num_blocks=9000, block_size=64)
    line = Scheduler(blocks, max_num_seqs=256, max_num_waiting=128, max_lead_s=8.0)
    frames_of, rng, waited_s = [275, 275, 275, 71, 71, 71, 71, 71, 71, 71], random.Random(1), []
    came_s, due_s = dict[int, float](), clock.now_s
    until_s = clock.now_s + 14.0
    while clock.now_s < until_s:
        while due_s <= clock.now_s:
            number = len(came_s)
            came_s[number] = due_s
            line.add(sequence(number, frames=frames_of[number % len(frames_of)]))
            due_s += rng.expovariate(92.0)
        batch = line.schedule()
        if batch is not None:
            waited_s += [clock.now_s - came_s[each.id] for each in batch.prefill]
            clock.now_s += 0.003 + 0.00003 * len(batch.decode) + 0.003 * len(batch.prefill)
            for each in batch.decode:
                each.append(FRAME)
            line.retire(batch.decode)
        else:
            clock.now_s += 0.001
    assert len(waited_s) > 1000
    assert max(waited_s) < 0.05
    line.check_integrity()


@pytest.mark.usefixtures("clock")
def test_a_resumed_sequence_is_not_ahead_by_what_was_heard_elsewhere() -> None:
    line = scheduler(blocks=199, max_num_seqs=3, max_lead_s=1.0)
    new = sequence(1, frames=99)
    resumed = Sequence(1, new.request, new.prompt, new.sampling, new.limit, frames=[FRAME] * 40, frame_s=0.08)
    for each in (resumed, sequence(2, frames=99)):
        line.add(each)
    assert [step(line) for _ in range(3)] == [([1, 2], [1, 2]), ([], [1, 2]), ([], [1, 2])]


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(("in_hand_s", "decoded"), [(0.0, [1, 2]), (5.0, [2])])
def test_a_resumed_sequence_is_ahead_by_what_its_listener_has_in_hand(in_hand_s: float, decoded: list[int]) -> None:
    line = scheduler(blocks=199, max_num_seqs=4, max_lead_s=1.0)
    new, frames = sequence(1, frames=99), [FRAME] * 40
    progress = Progress(np.stack(frames), 40 * 1920, in_hand_s)
    request = replace(new.request, resume=progress)
    line.add(Sequence(1, request, new.prompt, new.sampling, new.limit, frames=frames, frame_s=0.08))
    line.add(sequence(2, frames=99))
    assert step(line) == ([1, 2], decoded)


def test_a_sequence_that_is_heard_already_goes_first() -> None:
    line = scheduler(max_num_seqs=1)
    add(line, (1, 2))
    step(line)
    line.add(heard(3))
    job = of_a_job(4)
    job.request = replace(job.request, continues=True)
    line.add(job)
    assert (ids(list(line.waiting)), ids(list(line.waiting_background))) == ([3, 2], [4])


def test_a_full_line_says_how_long_it_will_take() -> None:
    line = scheduler(max_num_seqs=1, max_num_waiting=1)
    add(line, (1, 2))
    with pytest.raises(Overloaded) as refused:
        line.check_room()
    assert refused.value.retry_after_s > 0


def of_a_job(number: int, *, frames: int = 8) -> Sequence:
    """A segment that nobody waits for."""
    each = sequence(number, frames=frames)
    request = replace(each.request, background=True)
    return Sequence(number, request, each.prompt, Sampling(), each.limit, frame_s=0.08)


def decoded(line: Scheduler) -> list[int]:
    return sorted(step(line)[1])


def test_jobs_enter_one_a_step_and_leave_an_eighth_of_the_rows_free() -> None:
    line = scheduler(max_num_seqs=8)
    add(line, range(20), of_a_job, frames=100)
    assert [len(decoded(line)) for _ in range(9)] == [1, 2, 3, 4, 5, 6, 7, 7, 7]
    assert (line.num_listeners, line.num_background, line.kv_used_ratio) == (0, 20, pytest.approx(0.0))
    line.add(sequence(100))
    assert 100 in decoded(line), "a listener finds a free row at once"


@pytest.mark.parametrize(("listeners", "most"), [(1, 18), (30, 11), (90, 4)])
def test_the_more_listeners_there_are_the_fewer_rows_have_jobs(listeners: int, most: int) -> None:
    line = scheduler(blocks=4000, max_num_seqs=256, max_num_waiting=256)
    add(line, range(40), of_a_job, frames=100)
    add(line, range(100, 100 + listeners), frames=1000)
    for _ in range(45):
        of_jobs = [number for number in decoded(line) if number < 100]
    assert len(of_jobs) == most


def test_beside_listeners_a_step_has_fewer_of_jobs_and_the_youngest_are_parked_with_their_blocks() -> None:
    line = scheduler(max_num_seqs=8)
    add(line, range(7), of_a_job, frames=100)
    for _ in range(7):
        step(line)
    assert decoded(line) == [0, 1, 2, 3, 4, 5, 6]
    add(line, (100, 101, 102, 103, 104), frames=6)
    first = decoded(line)
    assert [number for number in first if number >= 100] == [100, 101, 102, 103, 104]
    assert len(first) - 5 == 2  # of the rows that five leave, but for one
    parked = {each.id for each in line.running.values() if each.row is not None} - set(first)
    assert parked, "they keep their rows"
    assert all(line.blocks.table(number) for number in parked)
    prefilled: list[int] = []
    while any(number >= 100 for number in line.running):
        prefilled += step(line)[0]
    resumed = decoded(line)
    assert set(parked) <= set(resumed)
    assert not set(prefilled) & parked, "who is parked is not prefilled again"


def test_a_job_is_preempted_only_where_a_listener_would_have_no_row_or_no_blocks() -> None:
    line = scheduler(max_num_seqs=2, blocks=4)
    line.add(of_a_job(1, frames=30))
    step(line)
    line.add(of_a_job(2, frames=30))
    step(line)
    assert set(line.running) == {1, 2}
    line.add(sequence(10, frames=2))
    prefilled, _ = step(line)
    assert prefilled == [10]
    assert set(line.running) == {1, 10}, "the youngest of the jobs gave its row"
    for _ in range(3):
        step(line)
    assert set(line.running) == {1, 2}, "the job is back once there is room"
    line.check_integrity()


def test_the_line_of_jobs_is_short_and_takes_no_place_of_others() -> None:
    line = scheduler(max_num_seqs=8, max_num_waiting=2)
    for number in range(8):
        line.check_room(background=True)
        line.add(of_a_job(number, frames=100))
        step(line)
    with pytest.raises(Overloaded):
        line.check_room(background=True)
    for number in range(100, 110):
        line.check_room()
        line.add(sequence(number, frames=100))
    with pytest.raises(Overloaded):
        line.check_room()
    line.abort(7)
    assert line.find(7) is None


def test_while_a_listener_waits_for_its_first_frame_jobs_sit_out_and_never_hold_up_others(clock: Clock) -> None:
    line = scheduler(blocks=199, max_num_seqs=16, max_num_waiting=4, max_lead_s=8.0)
    add(line, range(4), of_a_job, frames=100)
    for _ in range(4):
        step(line)
        clock.now_s += 0.004
    line.add(sequence(100, frames=50))
    assert decoded(line) == [100]  # its first frame
    clock.now_s += 0.004
    assert decoded(line) == [0, 1, 2, 3, 100]
    clock.now_s += line.running[100].listener.lead_s(clock.now_s) - 0.005
    step(line)  # a long step
    clock.now_s += 0.004
    clock.now_s += line.running[100].listener.lead_s(clock.now_s) - 0.01
    assert decoded(line) == [100]  # its next frame is nearly due


def test_every_sequence_of_a_mixed_load_ends_and_listeners_never_wait_for_a_row() -> None:
    rng, line = random.Random(3), scheduler(max_num_seqs=8, blocks=60, max_num_waiting=100)
    ended: set[int] = set()
    jobs, listeners = [of_a_job(n, frames=rng.randint(1, 20)) for n in range(40)], list(range(1000, 1030))
    everything = [*jobs]
    while jobs or listeners or not line.is_idle:
        if jobs and len(line.waiting_background) < 2:
            line.add(jobs.pop())
        if listeners and rng.random() < 0.3:
            everything.append(sequence(listeners.pop(), frames=rng.randint(1, 9)))
            line.add(everything[-1])
        num_before = line.num_listeners
        prefilled, _ = step(line)
        if num_before < 4:
            assert not line.waiting, "rows that jobs have are no reason to wait"
        assert len([number for number in prefilled if number < 1000]) <= 1
        ended = {each.id for each in everything if each.finish_reason is not None}
    assert len(ended) == 70


def test_beside_sequences_that_only_wait_for_text_jobs_go_on_and_those_without_a_row_leave_the_engine_idle() -> None:
    line = scheduler(max_num_seqs=2)
    line.add(of_a_job(1, frames=3))
    step(line)
    line.add(awaiting_text(10))
    assert decoded(line) == [1], "nothing else can be made"
    line.add(awaiting_text(11))
    line.add(of_a_job(2))
    while 1 in line.running:
        step(line)
    step(line)
    assert set(line.running) == {10, 11}
    assert line.waiting_background
    assert line.is_idle, "a step would do nothing"
    line.abort(10)
    assert not line.is_idle
    assert decoded(line) == [2]
