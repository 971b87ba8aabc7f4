from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from loadtest.arrivals import SpeechLengths
from loadtest.scenario import DAY_S, SettingsError, draw_traffic, rate_at, read_cluster, usual_step_s
from loadtest.service_model import MIN_SAMPLES, Observed, ServiceModel, in_flight, observe
from loadtest.simulate import Cluster, NodeKind, Simulated, SimulatedPool, Simulation, Traffic
from loadtest.traces import NoRunError
from serve_app.scaling.policies import CodecScaling, TalkerScaling
from tests.loadtest.test_metrics import SPOKEN

# 20 ms a frame alone, 40 ms with ten streams; the first byte after 0.1 s.
MODEL = ServiceModel(np.array([[1.0, 0.02], [10.0, 0.04]]), np.array([1.0]), np.array([[0.1]]))
FIXED = TalkerScaling(min_replicas=1, max_replicas=1, sequences_per_replica=4)


def simulate(
    cluster: Cluster, arrivals_s: list[float], *, frames: int = 51, warm: int = 1, step_s: float = 0.01
) -> Simulated:
    traffic = Traffic(np.array(arrivals_s), np.full(len(arrivals_s), frames))
    return Simulation(cluster, traffic, seed=0, warm=warm, step_s=step_s).run(lambda _: None)


def test_one_stream_takes_its_first_byte_and_its_frames_and_slows_others_down() -> None:
    alone = simulate(Cluster(MODEL, FIXED, None), [0.0])
    assert alone.ttfb_s == pytest.approx([0.1])
    assert alone.rtf * 51 * 0.08 == pytest.approx([0.1 + 50 * 0.02], abs=0.02)
    together = simulate(Cluster(MODEL, FIXED, None), [0.0] * 4)
    assert (together.rtf > alone.rtf[0] * 1.2).all()


def test_requests_beyond_the_slots_wait_and_beyond_the_line_are_refused() -> None:
    done = simulate(Cluster(MODEL, FIXED, None, max_waiting_per_replica=2), [0.0] * 8)
    assert done.refused == 2
    assert np.isnan(done.ttfb_s[-2:]).all()
    assert (done.ttfb_s[:4] < 0.2).all()
    assert (done.ttfb_s[4:6] > 1.0).all()


def test_the_production_policy_adds_replicas_which_take_their_time_to_start() -> None:
    nodes = NodeKind(boot_s=10.0, start_s=5.0, price_per_hour=3600.0)
    policy = TalkerScaling(min_replicas=1, max_replicas=3, sequences_per_replica=4)
    done = simulate(Cluster(MODEL, policy, None, talker_nodes=nodes), list(np.arange(0.0, 40.0, 0.1)), step_s=0.05)
    ready = dict(zip(done.times_s, done.talkers, strict=True))
    assert (done.talkers_wanted[0], max(done.talkers_wanted)) == (1, 3)
    assert [count for time_s, count in ready.items() if time_s < 15.0] == [1] * 15
    assert max(done.talkers) == 3
    assert done.cost == pytest.approx(done.node_hours * 3600.0)


def turns(replicas: list[int]) -> int:
    """How often a pool that grew shrinks or the other way round."""
    moves = np.diff(replicas)
    return int((np.diff(np.sign(moves[moves != 0])) != 0).sum())


def test_a_pool_does_not_swing_under_steady_traffic() -> None:
    model = ServiceModel(np.array([[1.0, 0.03], [8.0, 0.05], [32.0, 0.07]]), np.array([1.0]), np.array([[0.1]]))
    traffic = draw_traffic("steady", 20.0, duration_s=3000.0, lengths=SpeechLengths(5.7, 0.35), seed=1)
    policy = TalkerScaling(max_replicas=20, sequences_per_replica=32, target_use=0.7, scale_down_window_s=300)
    restless = replace(policy, smoothing_s=0.0, scale_down_margin=0.0)
    calm, swinging = (
        Simulation(Cluster(model, settings, None), traffic, seed=1, warm=6, step_s=0.5).run(lambda _: None)
        for settings in (policy, restless)
    )
    assert turns(calm.talkers_wanted) <= 1 < turns(swinging.talkers_wanted)
    assert calm.refused == 0


def test_streams_of_a_lost_node_go_on_elsewhere() -> None:
    policy = TalkerScaling(min_replicas=2, max_replicas=2, sequences_per_replica=64)
    nodes = NodeKind(boot_s=1.0, start_s=0.0, losses_per_hour=360.0)
    done = simulate(
        Cluster(MODEL, policy, None, talker_nodes=nodes, max_waiting_per_replica=64),
        list(np.arange(0.0, 60.0, 0.5)), warm=2, step_s=0.05,
    )  # fmt: skip
    assert done.nodes_lost > 0
    assert done.streams_moved > 0
    assert not np.isnan(done.rtf).any()
    assert done.refused == 0


def test_the_codec_pool_follows_the_talkers() -> None:
    talker = TalkerScaling(min_replicas=4, max_replicas=4, sequences_per_replica=10)
    codec = CodecScaling(min_replicas=1, max_replicas=9, streams_per_replica=5.0)
    cluster = Cluster(
        MODEL, talker, codec, codec_nodes=NodeKind(boot_s=0.0, start_s=1.0), codec_cores=2.0, codec_cores_per_stream=0.2
    )
    done = simulate(cluster, list(np.arange(0.0, 20.0, 0.1)), warm=4, step_s=0.05)
    assert done.codecs[-1] > 1


def test_an_empty_pool_starts_with_the_first_request() -> None:
    policy = TalkerScaling(min_replicas=0, max_replicas=2, sequences_per_replica=4)
    nodes = NodeKind(boot_s=3.0, start_s=1.0)
    done = simulate(Cluster(MODEL, policy, None, talker_nodes=nodes), [1.0], warm=0)
    assert 3.0 < done.ttfb_s[0] < 6.0  # boot, start, first byte, and what the policy takes to see it


def test_a_pool_drains_the_emptiest_replicas_and_keeps_their_nodes_for_a_while() -> None:
    pool = SimulatedPool(3, NodeKind(boot_s=10.0, start_s=1.0, idle_s=100.0), warm=3)
    load = np.array([5, 0, 2])
    pool.scale(2, 50.0, load)
    assert pool.usable(50.0).tolist() == [True, False, True]
    pool.settle(50.0, load)
    assert (pool.wanted, pool.up.tolist()) == (2, [True] * 3)
    pool.scale(3, 60.0, load)
    assert pool.ready_s[1] == 61.0
    pool.scale(2, 61.0, np.array([5, 0, 2]))
    pool.settle(61.0, load)
    pool.settle(161.0, load)
    assert pool.up.tolist() == [True, False, True]


def test_the_model_is_learned_from_what_was_observed() -> None:
    some = [Observed(n, n + 1.0, ttfb_s=0.1 + 0.01 * n, frames=50, frame_s=0.02 + 0.001 * n) for n in range(10)]
    model = ServiceModel.learn(some * 50)
    assert model.frame_s(np.array([2.0, 8.0, 20.0])) == pytest.approx([0.021, 0.027, 0.039], abs=0.001)
    drawn = model.draw_ttfb(np.array([0] * 50 + [9] * 50), np.random.default_rng(0))
    assert drawn[:50].mean() == pytest.approx(0.1)
    assert drawn[50:].mean() == pytest.approx(0.19)


def test_too_little_to_learn_from_is_said() -> None:
    with pytest.raises(NoRunError, match="too few to learn from"):
        ServiceModel.learn([Observed(0, 1.0, 0.1, 50, 0.02)] * (MIN_SAMPLES - 1))


def test_what_a_request_met_is_read_from_the_traces() -> None:
    first = replace(SPOKEN, sent_s=0.0, first_byte_s=0.5, finished_s=2.5)
    second = replace(SPOKEN, sent_s=1.5, first_byte_s=2.0, finished_s=3.0)
    observed = observe([first, second])
    assert [one.others_at_start for one in observed] == [0, 1]
    assert [one.mean_streams for one in observed] == pytest.approx([1.5, 1.5])
    assert [one.ttfb_s for one in observed] == [0.5, 0.5]


def test_a_day_is_quiet_at_four_and_loud_at_sixteen() -> None:
    hours = np.array([4.0, 10.0, 16.0]) * 3600
    assert rate_at("day", 100.0, hours) == pytest.approx([20.0, 60.0, 100.0])
    assert rate_at("steady", 100.0, hours).tolist() == [100.0] * 3


def test_traffic_is_settled_by_the_seed_and_has_its_rate() -> None:
    lengths = SpeechLengths(5.7, 0.35)
    traffic = draw_traffic("steady", 50.0, duration_s=90.0, lengths=lengths, seed=3)
    again = draw_traffic("steady", 50.0, duration_s=90.0, lengths=lengths, seed=3)
    assert np.array_equal(traffic.arrival_s, again.arrival_s)
    assert np.array_equal(traffic.frames, again.frames)
    assert len(traffic.arrival_s) == pytest.approx(4500, rel=0.05)
    assert 80.0 < traffic.arrival_s[-1] < 90.0
    assert DAY_S == 24 * 3600


def test_steps_are_short_beside_the_streams() -> None:
    traffic = Traffic(np.zeros(3), np.array([50, 50, 50]))
    assert usual_step_s(MODEL, traffic) == pytest.approx(0.25)


def test_a_settings_file_names_policies_as_production_does(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("talker_scaling: {sequences_per_replica: 24}\ntalker_nodes: {boot_s: 90}\ncodec_cores: 8\n")
    cluster = read_cluster(MODEL, file, gpus=7)
    assert (cluster.talker_scaling.sequences_per_replica, cluster.talker_scaling.max_replicas) == (24, 7)
    assert (cluster.talker_nodes.boot_s, cluster.codec_cores, cluster.codec_scaling) == (90, 8, None)


@pytest.mark.parametrize(("text", "complaint"), [
    ("talkers: 3", "unknown keys.*valid keys:.*talker_scaling"),
    ("talker_nodes: {boot: 3}", "talker_nodes.*valid keys:.*boot_s"),
    ("talker_scaling: {min_replicas: -1}", "talker_scaling: min_replicas must be 0 to max_replicas"),
    ("[1]", "not a mapping"), ("a: [", "cannot be read"),
])  # fmt: skip
def test_wrong_settings_are_explained(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=complaint):
        read_cluster(MODEL, file, gpus=7)


def test_requests_are_in_flight_from_send_to_end() -> None:
    first = replace(SPOKEN, sent_s=0.0, finished_s=2.0)
    second = replace(SPOKEN, sent_s=1.0, finished_s=3.0)
    times, counts = in_flight([first, second])
    assert times.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert counts.tolist() == [1, 2, 1, 0]
