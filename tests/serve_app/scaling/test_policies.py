"""The policies as pure functions, without Ray: what they decide, when, and how slowly they give back."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.autoscaling_records import CodecRecord, TalkerRecord
from serve_app.scaling import policies

TALKER = policies.TalkerScaling(
    min_replicas=1, max_replicas=10, sequences_per_replica=8, target_use=0.75, scale_down_window_s=60
)
CODEC = policies.CodecScaling(
    min_replicas=1, max_replicas=10, streams_per_replica=8, target_use=0.75, scale_down_window_s=60
)
TICK_S = 0.1


@dataclass
class Pool:
    """A pool that has at once what its policy wants."""

    settings: Any
    decide: Callable[..., policies.Decision]
    wanted: int = 1
    now_s: float = 1000.0
    state: policies.State = field(default_factory=policies.State)

    def tick(self, records: Sequence[Any] = (), *, queued: float = 0, ongoing: float = 0) -> policies.Decision:
        self.now_s += TICK_S
        counts = policies.Counts(running=self.wanted, wanted=self.wanted, queued=queued, ongoing=ongoing)
        decision = self.decide(records, counts, settings=self.settings, state=self.state, now_s=self.now_s)
        self.wanted, self.state = decision.replicas, decision.state
        return decision

    def run(self, duration_s: float, records: Sequence[Any] = (), **load: float) -> list[int]:
        return [self.tick(records, **load).replicas for _ in range(round(duration_s / TICK_S))]


def talkers(settings: policies.TalkerScaling = TALKER, *, wanted: int = 1) -> Pool:
    return Pool(settings, policies.decide_talker, wanted)


def codecs(settings: policies.CodecScaling = CODEC, *, wanted: int = 1) -> Pool:
    return Pool(settings, policies.decide_codec, wanted)


FEW_STREAMS = replace(CODEC, max_talker_streams=12)


@pytest.mark.parametrize(
    ("pool", "records", "load", "replicas", "reason"),
    [
        # Talkers follow running and waiting sequences: 13 / (8 * 0.75).
        (talkers(), [TalkerRecord(running=6)], {}, 1, None),
        (talkers(), [TalkerRecord(running=8, waiting=5)], {}, 3, None),
        # Requests that no replica has taken count, also those of a replica that has recorded nothing yet.
        (talkers(), [TalkerRecord(running=8)], {"queued": 16}, 4, None),
        (talkers(), [], {"ongoing": 12}, 2, None),
        # Full KV blocks ask for a replica though rows are free.
        (talkers(), [TalkerRecord(running=2, kv_used_ratio=0.95)], {}, 2, "kv use"),
        (talkers(wanted=2), [TalkerRecord(running=2, kv_used_ratio=0.9)] * 2, {}, 3, "kv use"),
        # Codecs follow the streams that wait for a talker: nothing is undecoded, for the frames are still to come.
        (codecs(), [CodecRecord(streams=16, starting=16, cores=1)], {}, 3, "streams"),
        # They do not grow for streams that no talker can take, but for those that flow already.
        (codecs(FEW_STREAMS), [CodecRecord(streams=60, starting=60)], {}, 2, None),
        (codecs(FEW_STREAMS), [CodecRecord(streams=24, starting=0)], {}, 4, None),
        # They follow the audio that waits per core; a long backlog doubles the pool and no more.
        (codecs(), [CodecRecord(streams=4, backlog_s=0.9, cores=1)], {}, 2, "backlog"),
        (codecs(), [CodecRecord(streams=4, backlog_s=0.9, cores=4)], {}, 1, None),
        (codecs(wanted=2), [CodecRecord(backlog_s=60)] * 2, {}, 4, None),
        (codecs(wanted=2), [CodecRecord(streams=4, backlog_s=0.9, cores=1)] * 2, {}, 4, "backlog"),
        (codecs(), [CodecRecord(streams=5, busy_cores=1.9, cores=2)], {}, 2, "busy cores"),
        (codecs(wanted=2), [CodecRecord(streams=5, busy_cores=1.9, cores=2)] * 2, {}, 3, "busy cores"),
    ],
)
def test_one_look(pool: Pool, records: list[Any], load: dict[str, float], replicas: int, reason: str | None) -> None:
    decision = pool.tick(records, **load)
    assert decision.replicas == replicas
    assert reason in (None, decision.reason)


def test_a_growing_line_asks_for_more_than_it_holds() -> None:
    steady, growing = talkers(), talkers()
    for tick in range(10):
        steady.tick([TalkerRecord(running=8, waiting=4)])
        growing.tick([TalkerRecord(running=8, waiting=4 * tick / 9)])
    assert steady.wanted == 2
    assert growing.wanted > steady.wanted
    assert growing.tick([TalkerRecord(running=8, waiting=4)]).replicas <= 4  # twice what is there at most


def test_a_burst_is_not_a_growing_line() -> None:
    pool = talkers()
    pool.run(2, [TalkerRecord(running=8)])
    assert set(pool.run(2, [TalkerRecord(running=8, waiting=4)])) == {2}


def test_a_growing_line_is_answered_within_one_and_a_half_seconds() -> None:
    """Even one that the rows in use would not have asked for yet."""
    pool = talkers(wanted=2)
    pool.run(5, [TalkerRecord(running=8), TalkerRecord(running=2)])
    history = [
        pool.tick([TalkerRecord(running=8, waiting=0.1 * tick), TalkerRecord(running=2)]).replicas for tick in range(15)
    ]
    assert history[0] == 2
    assert history[-1] > 2


def test_a_shrinking_line_is_no_reason_to_remove_anything_at_once() -> None:
    pool = talkers()
    pool.run(1, [TalkerRecord(running=8, waiting=22)])
    assert pool.wanted == 5
    assert set(pool.run(50, [TalkerRecord(running=2)])) == {5}


def test_the_bounds_hold() -> None:
    pool = talkers(replace(TALKER, min_replicas=2, max_replicas=3), wanted=2)
    assert pool.tick([TalkerRecord(running=100)]).replicas == 3
    assert pool.run(600)[-1] == 2


def test_removal_waits_for_the_window_and_goes_in_steps() -> None:
    pool = talkers()
    pool.run(1, [TalkerRecord(running=24)])
    assert pool.wanted == 4
    history = pool.run(200)
    changes = [index * TICK_S for index in range(1, len(history)) if history[index] != history[index - 1]]
    assert [history[0], history[-1]] == [4, 1]
    assert all(earlier - later <= 1 for earlier, later in itertools.pairwise(history))
    assert changes[0] >= TALKER.scale_down_window_s - 1
    least_s = TALKER.scale_down_interval_s - TICK_S
    assert min(later - earlier for earlier, later in itertools.pairwise(changes)) >= least_s


def test_a_large_pool_gives_back_a_share_at_a_time() -> None:
    pool = talkers(replace(TALKER, max_replicas=100), wanted=50)
    pool.run(1, [TalkerRecord(running=100)])
    history = pool.run(TALKER.scale_down_window_s + 1.5 * TALKER.scale_down_interval_s)  # two removals
    steps = {earlier - later for earlier, later in itertools.pairwise(history)}
    assert steps == {0, 4, 5}  # a tenth of 50, then of 45


def test_a_burst_that_finds_room_asks_for_nothing() -> None:
    pool = talkers(wanted=2)
    pool.run(60, [TalkerRecord(running=5), TalkerRecord(running=4)])
    assert set(pool.run(1, [TalkerRecord(running=8), TalkerRecord(running=7)])) == {2}
    assert pool.run(30, [TalkerRecord(running=8), TalkerRecord(running=7)])[-1] == 3  # it was no burst


@pytest.mark.parametrize(
    ("make", "before", "burst", "queued"),
    [
        (talkers, [TalkerRecord(running=5)] * 2, [TalkerRecord(running=9), TalkerRecord(running=8)], 0),
        (talkers, [TalkerRecord(running=5)] * 2, [TalkerRecord(running=8, waiting=1), TalkerRecord(running=5)], 0),
        (codecs, [CodecRecord(streams=5)] * 2, [CodecRecord(streams=9), CodecRecord(streams=8)], 0),
        (codecs, [CodecRecord(streams=5)] * 2, [CodecRecord(streams=8), CodecRecord(streams=5)], 1),
    ],
)
def test_a_burst_that_finds_none_asks_at_once(
    make: Callable[..., Pool], before: list[Any], burst: list[Any], queued: int
) -> None:
    pool = make(wanted=2)
    pool.run(60, before)
    assert pool.tick(burst, queued=queued).replicas == 3


def test_load_that_wavers_moves_nothing() -> None:
    pool = talkers()
    pool.run(60, [TalkerRecord(running=13)])
    assert pool.wanted == 3
    moved = [pool.run(100, [TalkerRecord(running=running)]) for running in (11, 12, 13, 11, 12.5)]
    assert {replicas for history in moved for replicas in history} == {3}
    assert pool.run(100, [TalkerRecord(running=10)])[-1] == 2


def test_streams_in_flight_keep_their_replicas() -> None:
    settings = {"target_use": 2.0, "scale_down_margin": 0.0}  # would pack two streams to a row
    talker, codec = talkers(replace(TALKER, **settings), wanted=4), codecs(replace(CODEC, **settings), wanted=4)
    talker.run(600, [TalkerRecord(running=8)] * 3)
    codec.run(600, [CodecRecord(streams=8)] * 3)
    assert (talker.wanted, codec.wanted) == (3, 3)


def test_a_short_dip_removes_nothing() -> None:
    pool = talkers()
    for _ in range(6):
        pool.run(5, [TalkerRecord(running=12)])
        pool.run(40)
    assert pool.wanted == 2


def test_the_last_replica_goes_only_where_zero_is_allowed_and_nobody_speaks() -> None:
    settings = replace(TALKER, min_replicas=0, scale_to_zero_after_s=120)
    pool = talkers(settings)
    pool.run(1, [TalkerRecord(running=1)])
    assert set(pool.run(115)) == {1}
    assert pool.run(10)[-1] == 0
    assert pool.tick(queued=1).replicas == 1


def test_a_replica_that_somebody_woke_is_waited_for_though_nobody_waits_any_more() -> None:
    settings = replace(TALKER, min_replicas=0, scale_to_zero_after_s=5, scale_down_window_s=5)
    pool = talkers(settings, wanted=0)
    pool.tick(queued=1)
    starting = policies.Counts(running=0, wanted=1)
    for _ in range(300):
        pool.now_s += TICK_S
        decision = policies.decide_talker([], starting, settings=settings, state=pool.state, now_s=pool.now_s)
        pool.state = decision.state
        assert decision.replicas == 1
    assert pool.run(4)[-1] == 1  # it runs now
    assert pool.run(4)[-1] == 0


def test_a_pool_that_starts_empty_stays_empty_until_somebody_speaks() -> None:
    pool = talkers(replace(TALKER, min_replicas=0), wanted=0)
    assert set(pool.run(5)) == {0}
    assert pool.tick(queued=30).replicas == 5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_replicas": 3, "max_replicas": 2}, "min_replicas must be 0 to max_replicas"),
        ({"max_replicas": 0, "min_replicas": 0}, "max_replicas at least 1"),
        ({"scale_down_window_s": -1}, "scale_down_window_s must not be negative"),
        ({"target_use": -0.1}, "target_use must not be negative"),
    ],
)
@pytest.mark.parametrize("kind", [policies.TalkerScaling, policies.CodecScaling])
def test_impossible_settings_are_refused(kind: type[Any], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**settings)


def context(
    metrics: dict[str, dict[str, float]], *, target: int = 1, total: float = 0, queued: float = 0, most: int = 10,
    now_s: float = 50.0,
) -> Any:  # fmt: skip
    """What Serve's controller passes: for each name, samples by replica."""
    samples = {
        name: {
            replica: [SimpleNamespace(value=-1.0), SimpleNamespace(value=value)] for replica, value in values.items()
        }
        for name, values in metrics.items()
    }
    return SimpleNamespace(
        current_num_replicas=1,
        target_num_replicas=target,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=most,
        current_time=now_s,
        total_num_requests=total,
        total_queued_requests=queued,
        raw_metrics=samples,
    )


def test_the_talker_policy_reads_the_newest_records_of_every_replica() -> None:
    policy = policies.TalkerPolicy(max_replicas=10, sequences_per_replica=8, target_use=0.5)
    metrics = {"running": {"a": 8.0, "b": 6.0}, "waiting": {"a": 2.0, "b": 0.0}}
    metrics |= {"kv_used_ratio": {"a": 0.5, "b": 0.5}, "ongoing_requests": {"a": 99.0}}
    assert policy(context(metrics, target=2)) == (4, {})


def test_the_codec_policy_adds_what_waits_at_the_callers() -> None:
    policy = policies.CodecPolicy(max_replicas=10, streams_per_replica=4, target_use=1.0)
    metrics = {"streams": {"a": 4.0}, "starting": {"a": 0.0}, "cores": {"a": 1.0}}
    assert policy(context(metrics, total=10, queued=6)) == (3, {})


def test_a_policy_before_the_first_record_keeps_what_there_is() -> None:
    assert policies.TalkerPolicy(max_replicas=4)(context({}, target=2)) == (2, {})
    assert policies.CodecPolicy(max_replicas=4)(context({}, target=2)) == (2, {})
    assert policies.CodecScaling().max_talker_streams == math.inf


def test_a_policy_takes_its_bounds_from_serve(caplog: pytest.LogCaptureFixture) -> None:
    metrics = {"running": {"a": 80.0}, "waiting": {"a": 0.0}}
    policy = policies.TalkerPolicy(sequences_per_replica=8, target_use=1.0)
    with caplog.at_level("INFO"):
        assert [policy(context(metrics, target=1, most=most))[0] for most in (3, 6, 0)] == [3, 6, 1]
    assert [line.split(" (")[0] for line in caplog.messages] == [f"TalkerPolicy: 1 -> {to} replicas" for to in (3, 6)]


def test_a_policy_remembers_decisions_that_hold() -> None:
    policy, metrics = policies.TalkerPolicy(max_replicas=10, scale_down_window_s=60), {"running": {"a": 0.0, "b": 0.0}}
    assert [policy(context(metrics, target=2, now_s=now_s))[0] for now_s in (50, 100, 120)] == [2, 2, 1]


def test_segments_of_jobs_ask_for_no_replica_and_keep_none_but_the_last() -> None:
    busy = [TalkerRecord(running=2, background=8), TalkerRecord(background=8)]
    pool = talkers(wanted=2)
    assert set(pool.run(5, busy, ongoing=18)) == {2}
    assert pool.run(100, busy, ongoing=18)[-1] == 1, "16 requests of jobs hold up no removal"
    codec = [CodecRecord(streams=1, background=30, cores=2)]
    assert set(codecs().run(5, codec, ongoing=31)) == {1}


@pytest.mark.parametrize(("jobs", "left"), [("neither", 0), ("hold", 1), ("wake", 1)])
def test_a_setting_says_whether_jobs_keep_the_last_replica(jobs: str, left: int) -> None:
    settings = {"min_replicas": 0, "scale_to_zero_after_s": 5, "scale_down_window_s": 5, "jobs": jobs}
    pool = talkers(replace(TALKER, **settings))
    assert pool.run(60, [TalkerRecord(background=8)], ongoing=8)[-1] == left
    pool = codecs(replace(CODEC, **settings))
    assert pool.run(60, [CodecRecord(background=8)], ongoing=8)[-1] == left
