from dataclasses import dataclass, field

import pytest

from deployments.codec.plan import ChunkPlan
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


@pytest.mark.parametrize("late", range(1, 5))
def test_where_streams_share_calls_none_pauses_while_another_replica_takes_over(late: int) -> None:
    """Chunks come 60 ms after each other, and one of them 0.18 s after the one before: its replica has died."""
    ramp = fitted_ramp(chosen_ramp(MANY_WORKERS), 0.005, wait_s=0.005, frame_s=FRAME_S, shared=True)
    lead_s = 0.0
    for number, frames in enumerate((*ramp, ramp[-1])):
        lead_s -= (0.18 if number == late else 0.06) if number else 0.0
        assert lead_s >= 0
        lead_s += frames * FRAME_S
