from dataclasses import dataclass, field

import pytest

from deployments.codec.plan import ChunkPlan, call_sizes, split_frames
from deployments.codec.pool.ramps import MANY_WORKERS, chosen_ramp, fitted_ramp

RAMP = (1, 2, 4, 8, 12)
FRAME_S = 0.08


@dataclass
class Playback:
    sizes: list[int] = field(default_factory=list)
    leads_s: list[float] = field(default_factory=list)  # just before each chunk but the first arrived
    audio_s: float = 0.0
    started_s: float | None = None

    def lead_s(self, now_s: float) -> float:
        return 0.0 if self.started_s is None else self.started_s + self.audio_s - now_s

    def deliver(self, size: int, now_s: float) -> None:
        if self.started_s is None:
            self.started_s = now_s
        else:
            self.leads_s.append(self.lead_s(now_s))
        self.sizes.append(size)
        self.audio_s += size * FRAME_S


def simulate(rtf: float, *, num_frames: int, call_s: float = 0.01, decode_s: float = 0.002) -> Playback:
    """Play a stream: a frame takes the talker `rtf` * 80 ms and the codec `decode_s`, a chunk another `call_s`."""
    plan, playback = ChunkPlan(RAMP, frame_s=FRAME_S), Playback()
    now_s, decoded = 0.0, 0
    while decoded < num_frames:
        made = min(num_frames, int(now_s / (rtf * FRAME_S) + 1e-9))
        size = plan.next_size(made - decoded, ended=made == num_frames, lead_s=playback.lead_s(now_s))
        if size == 0:
            now_s += 0.001
            continue
        now_s += call_s + decode_s * size
        size = min(size, made - decoded)
        decoded += size
        playback.deliver(size, now_s)
    return playback


@pytest.mark.parametrize("rtf", [0.2, 0.5, 0.8, 0.9])
def test_a_talker_below_real_time_never_makes_the_player_wait(rtf: float) -> None:
    playback = simulate(rtf, num_frames=400)
    assert min(playback.leads_s) > 0
    assert sum(playback.sizes) == 400


def test_a_slow_talker_starts_with_single_frames_and_grows_as_the_lead_does() -> None:
    playback = simulate(0.9, num_frames=400)
    assert playback.sizes[:10] == [1] * 10
    late = simulate(0.5, num_frames=400).sizes[20:-1]
    assert min(late) >= 2


def test_a_slow_codec_catches_up_with_larger_chunks() -> None:
    """One frame alone takes longer than it lasts; in chunks the codec keeps up."""
    playback = simulate(0.3, num_frames=400, call_s=0.1, decode_s=0.05)
    assert (playback.sizes[:5], set(playback.sizes[5:-1])) == ([1, 2, 4, 8, 12], {12})
    assert playback.leads_s[0] < 0 < playback.leads_s[-1]


def test_an_underrunning_talker_is_passed_on_frame_by_frame() -> None:
    assert set(simulate(1.5, num_frames=50).sizes) == {1}


def test_the_first_chunk_waits_for_its_size() -> None:
    plan = ChunkPlan((4, 12), frame_s=FRAME_S)
    assert plan.next_size(3, ended=False, lead_s=0.0) == 0
    assert plan.next_size(5, ended=False, lead_s=0.0) == 4


def test_the_end_is_one_call_where_there_is_time() -> None:
    plan = ChunkPlan((4, 12), frame_s=FRAME_S)
    assert [plan.next_size(left, ended=True, lead_s=9.0) for left in (3, 2, 1)] == [4, 4, 1]
    assert plan.next_size(30, ended=True, lead_s=9.0) == 12
    assert plan.next_size(0, ended=True, lead_s=9.0) == 0
    assert plan.next_size(9, ended=True, lead_s=0.1) == 4


def test_a_low_lead_takes_what_is_there_within_the_ramp() -> None:
    plan = ChunkPlan((1, 4), frame_s=FRAME_S, min_lead_s=0.25)
    assert plan.next_size(1, ended=False, lead_s=0.0) == 1
    assert plan.next_size(3, ended=False, lead_s=0.26) == 0
    assert plan.next_size(0, ended=False, lead_s=0.25) == 0
    assert plan.next_size(3, ended=False, lead_s=0.25) == 1
    assert plan.next_size(9, ended=False, lead_s=-1.0) == 4


def test_patience_ends_when_the_lead_gets_low() -> None:
    plan = ChunkPlan((1, 4), frame_s=FRAME_S, min_lead_s=0.25)
    assert plan.patience_s(0.0) is None
    plan.next_size(1, ended=False, lead_s=0.0)
    assert plan.patience_s(0.5) == pytest.approx(0.25)
    assert plan.patience_s(0.1) == 0


@pytest.mark.parametrize("frames", [0, 1, 11, 37, 588])
def test_every_number_of_frames_takes_calls_of_few_sizes(frames: int) -> None:
    sizes = call_sizes((1, 2, 4, 8, 12, 12))
    assert sizes == (12, 8, 4, 2, 1)
    assert sum(split_frames(frames, sizes)) == frames
    sizes = ChunkPlan(RAMP, frame_s=FRAME_S).recall_sizes(frames)
    assert set(sizes) <= {1, 2, 4, 8, 12, 24, 48, 96, 192}
    assert sum(sizes) == frames
    assert sizes == sorted(sizes)  # the last reaches furthest


@pytest.mark.parametrize(("frame_ms", "wait_ms", "expected"), [
    (0, 0, (1, 1, 2, 4, 8, 12)),
    (9, 0, (1, 1, 2, 4, 8, 12)),  # the second frame takes 45 ms of the 80 that the first one plays
    (10, 0, (2, 2, 2, 4, 8, 12)), (5, 10, (1, 1, 2, 4, 8, 12)), (5, 20, (2, 2, 2, 4, 8, 12)),
    (18, 0, (4, 4, 4, 4, 8, 12)),
    (100, 0, (4, 4, 4, 4, 8, 12)),  # nothing keeps up: no longer silence for that
])  # fmt: skip
def test_first_chunks_play_while_the_next_is_made(frame_ms: float, wait_ms: float, expected: tuple[int, ...]) -> None:
    for ramp, fitted in (((1, 1, 2, 4, 8, 12), expected), ((12,), (12,)), ((3, 12), (3, 12))):
        assert fitted_ramp(ramp, frame_ms / 1000, wait_s=wait_ms / 1000, frame_s=FRAME_S, shared=False) == fitted


@pytest.mark.parametrize(
    ("in_hand", "sizes"), [(0.5, [1, 2, 4, 12, 12]), (0.75, [1, 1, 2, 4, 8]), (0.0, [1, 8, 12, 12, 12])]
)
def test_load_widens_chunks_as_far_as_the_lead_allows(in_hand: float, sizes: list[int]) -> None:
    """A CPU makes the second chunk while a single frame plays, however much others wait for it; a GPU is quick."""
    plan, lead_s = ChunkPlan((1, 1, 2, 4, 8, 12), frame_s=FRAME_S, in_hand=in_hand), 0.0
    for size in sizes:
        assert plan.next_size(50, ended=False, lead_s=lead_s, load=3) == size
        lead_s += size * FRAME_S


@pytest.mark.parametrize("late", range(1, 5))
def test_where_streams_share_calls_none_pauses_while_another_replica_takes_over(late: int) -> None:
    """Chunks come 60 ms after each other, and one of them 0.18 s after the one before: its replica has died."""
    ramp = fitted_ramp(chosen_ramp(MANY_WORKERS), 0.005, wait_s=0.005, frame_s=FRAME_S, shared=True)
    lead_s = 0.0
    for number, frames in enumerate((*ramp, ramp[-1])):
        lead_s -= (0.18 if number == late else 0.06) if number else 0.0
        assert lead_s >= 0
        lead_s += frames * FRAME_S


@pytest.mark.parametrize("load", [0, 2])
@pytest.mark.parametrize("chunks", [0, 1, 3, 9])
def test_what_is_not_ready_has_no_size(chunks: int, load: int) -> None:
    plan = ChunkPlan(RAMP, frame_s=FRAME_S)
    for _ in range(chunks):
        plan.count()
    outcomes = set()
    for available in range(14):
        for lead_s in (0.0, 0.2, 0.3, 3.0):
            size = plan.size(available, ended=False, lead_s=lead_s, load=load)
            is_ready = lead_s <= plan.lead_to_decode_s(available)
            assert is_ready or not size
            outcomes.add((is_ready, bool(size)))
    assert outcomes >= {(False, False), (True, True)}
