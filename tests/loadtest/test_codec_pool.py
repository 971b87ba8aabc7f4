"""Properties of the gate and the chunks that only show under load, in a time of their own: no machine is too busy."""

import asyncio
import time
from dataclasses import replace
from statistics import fmean

from typer.testing import CliRunner

from loadtest.__main__ import USUAL_LENGTHS, app
from loadtest.codec_pool import CodecPool, Served, VirtualTimeLoop, serve
from loadtest.scenario import draw_traffic

EIGHT = CodecPool(replicas=8, workers=1, call_s=0.026, frame_s=0.0104)
SEEDS = 1, 2, 3


def simulate(pool: CodecPool, rate: float, *, duration_s: float = 20.0) -> Served:
    traffic = draw_traffic("steady", rate, duration_s=duration_s, lengths=USUAL_LENGTHS, seed=pool.seed)
    return serve(pool, traffic)


def test_time_passes_only_for_the_loop() -> None:
    loop, began_s = VirtualTimeLoop(), time.monotonic()
    loop.run_until_complete(asyncio.sleep(3600))
    loop.close()
    assert loop.time() >= 3600
    assert time.monotonic() - began_s < 600


def test_the_same_load_has_the_same_result() -> None:
    assert simulate(EIGHT, 4, duration_s=5.0) == simulate(EIGHT, 4, duration_s=5.0)


def test_one_queue_over_all_cores_is_better_under_load_than_one_for_each() -> None:
    """A gate that keeps more workers for streams that may come back than there are such streams fails here."""
    one_each, one = (simulate(replace(EIGHT, replicas=8 // n, workers=n), 6) for n in (1, 8))
    assert one.late <= one_each.late + 0.01
    assert one.first_audio_ms(95) < one_each.first_audio_ms(95)


def test_two_replicas_at_random_are_worse_than_the_least_busy_of_all() -> None:
    of_all, of_two = (
        [simulate(replace(EIGHT, of_two=two, seed=seed), 7, duration_s=30.0) for seed in SEEDS] for two in (False, True)
    )
    assert sum(each.refused for each in of_all) == 0 < sum(each.refused for each in of_two)
    assert fmean(each.first_audio_ms(95) for each in of_all) < fmean(each.first_audio_ms(95) for each in of_two)


def test_what_an_overloaded_pool_lets_in_comes_in_time() -> None:
    """Streams that share a call make each other late, and chunks that are wide too early are."""
    results = [simulate(replace(EIGHT, replicas=3, workers=5, crowded=0.65, seed=seed), 24) for seed in (*SEEDS, 4)]
    assert all(each.refused for each in results)
    assert fmean(each.late for each in results) < 0.02  # what it is to keep; 1.1 % of eight seeds


def test_an_idle_pool_is_early_and_a_small_one_refuses() -> None:
    assert simulate(EIGHT, 0.5).late == 0
    small = [simulate(replace(EIGHT, replicas=2, seed=seed), 4) for seed in SEEDS]  # carries a third of that
    assert all(each.refused > len(each.stalled_s) / 2 for each in small)
    assert fmean(each.late for each in small) < 0.1


def test_a_gpu_helps_a_pool_that_cannot_carry_its_streams_and_leaves_the_others_to_it() -> None:
    hybrid = replace(EIGHT, hybrid=True)
    quiet, busy = simulate(hybrid, 1), [simulate(replace(hybrid, seed=seed), 12) for seed in SEEDS]
    assert quiet.decoded > 0.8
    assert quiet.late == 0
    assert max(each.decoded for each in busy) < 0.6
    assert sum(each.refused for each in busy) == 0
    assert fmean(each.late for each in busy) < 0.002
    assert simulate(EIGHT, 12).refused > 0
    assert simulate(EIGHT, 1).decoded == 1


def test_the_command_prints_a_row_for_each_rate() -> None:
    few = ("--replicas", "2", "--rates", "0.5,1", "--duration", "5")
    printed = CliRunner().invoke(app, ["simulate-codec", *few]).output
    assert [line.split()[1] for line in printed.splitlines() if line.startswith("│")] == ["0.5", "1"]


def test_a_full_pool_is_hardly_late() -> None:
    """Load widens no second chunk beyond what plays meanwhile: it was late for six of ten streams."""
    assert simulate(replace(EIGHT, replicas=4, workers=4, call_s=0.046, frame_s=0.009), 16).late < 0.15


def test_streams_share_calls_and_the_first_audio_hardly_waits_for_a_worker() -> None:
    """Of many workers, which share calls of 16 frames: chunks of four frames of four streams."""
    many = CodecPool(replicas=2, workers=7, crowded=0.65)
    idle, busy = (simulate(many, rate) for rate in (4, 10))
    assert busy.late < 0.01
    assert busy.batch > 2
    assert busy.first_audio_ms(95) < 1.2 * idle.first_audio_ms(95)
    slow = replace(many, call_s=0.046, frame_s=0.009, crowded=0.0)  # of eight frames of two
    assert simulate(slow, 8).batch > 1.4


def test_crowded_cores_are_slower() -> None:
    alone, crowded = (simulate(replace(EIGHT, crowded=share), 4) for share in (0.0, 0.65))
    assert crowded.busy_cores > 1.1 * alone.busy_cores
    assert crowded.first_audio_ms(50) > alone.first_audio_ms(50)
