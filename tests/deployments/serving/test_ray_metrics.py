"""What is recorded reaches Ray. Gauges are set again, because Ray's agent drops one that has not changed."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
from ray.util import metrics as ray

from deployments.protocol import FinishReason
from deployments.recording_cache import Lookups
from deployments.serving import metrics, ray_metrics

Call = tuple[str, float, dict[str, str] | None]


class Recorded:
    """What reaches Ray's own code, which checks the tags, once all is installed."""

    def __init__(self) -> None:
        self.recorders: list[ray_metrics.Recorder] = []
        self.calls: list[Call] = []

    def take(self) -> list[Call]:
        for recorder in self.recorders:
            recorder.deliver()
        return self.calls


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    recorded = Recorded()
    checked = ray.Metric._validate_tags

    def record(self: ray.Metric, value: float, tags: dict[str, str] | None = None) -> None:
        checked(self, tags or {})
        recorded.calls.append((self.info["name"], value, tags))

    class Noted(ray_metrics.Recorder):
        def __init__(self) -> None:
            super().__init__()
            recorded.recorders.append(self)

    monkeypatch.setattr(ray.Metric, "_record", record)
    monkeypatch.setattr(ray_metrics, "Recorder", Noted)
    before = [instrument.record for instrument in metrics.INSTRUMENTS]
    ray_metrics.install.cache_clear()
    ray_metrics.install()
    yield recorded
    ray_metrics.install.cache_clear()
    for instrument, was in zip(metrics.INSTRUMENTS, before, strict=True):
        instrument.record = was


UNINSTALLED = """
import sys
from deployments.serving import metrics
for instrument in metrics.INSTRUMENTS:
    instrument.record(1.0, no_such="tag")
assert metrics.INSTRUMENTS and "ray" not in sys.modules
"""


def test_nothing_is_recorded_before_it_is_installed() -> None:
    """In a process of its own: a replica that another test made has installed it in this one."""
    subprocess.run([sys.executable, "-c", UNINSTALLED], check=True)


def test_every_instrument_gets_values_in_its_unit_with_its_labels(recorded: Recorded) -> None:
    ours, talker, codec = {"model": "m"}, {"pool": "talker"}, {"pool": "codec"}
    user = {"key": "ada", "voice": "ryan", "dialect": "OpenAI", **ours}
    metrics.REFUSALS.record(1, reason="full", model="m")
    metrics.FAILOVERS.record(1, reason="TalkerLost")
    metrics.FAILOVER_GAP.record(0.1, reason="TalkerLost")
    metrics.TTFB.record(0.2)
    for seconds, instrument in enumerate((metrics.TTFP, metrics.TTFA, metrics.ONSET, metrics.STALLS), 3):
        instrument.record(seconds / 10, model="m")
    metrics.STAGES.record(0.25, stage="two")
    metrics.record_chunk(1.5, late_s=0.25, model="m")
    metrics.record_chunk(0.5, late_s=0.0)
    metrics.record_stream(1.0, audio_s=4.0, reason=FinishReason.STOP, model="m")
    metrics.record_stream(1.0, audio_s=0.0, reason=None)
    metrics.REDRAWN.record(1, reason="none", model="m")
    metrics.STREAMS.record(3, model="m")
    metrics.ROOM.record(0.75, model="")
    for count, gauge in enumerate((metrics.RUNNING, metrics.WANTED, metrics.DIED)):
        gauge.record(count, **talker, **ours)
    metrics.record_talker_step(0.01, 6, 0.5, waiting=7)
    metrics.record_talker_step(0.01, 0, 0.25, waiting=8)
    metrics.PRECISION.record(1, **codec, precision="float32")
    metrics.REPAIRS.record(9, **talker)
    metrics.REPAIRS.record(0, **codec)
    metrics.CODEC_LAG.record(0.6)
    metrics.record_codec_call(0.02, 10, waiting=11, lag_s=0.7)
    metrics.DECODED.record(1.5, **codec)
    metrics.record_recording_lookups("codes", Lookups(hits=12, misses=13))
    metrics.record_recording_lookups("prompt", Lookups(hits=0, misses=0))
    for number, used in enumerate(metrics.USED.values(), 20):
        used.record(number, **user)
    metrics.USED["failed"].record(2, key="", voice="", dialect="")
    expected: dict[str, list[tuple[float, dict[str, str]]]] = {
        "refusals_total": [(1, {"reason": "full", **ours})], "failovers_total": [(1, {"reason": "TalkerLost"})],
        "failover_gap_seconds": [(0.1, {"reason": "TalkerLost"})], "ttfb_seconds": [(0.2, {})],
        "ttfp_seconds": [(0.3, ours)], "ttfa_seconds": [(0.4, ours)], "onset_seconds": [(0.5, ours)],
        "stage_seconds": [(0.25, {"stage": "two"})],
        "chunk_lateness_seconds": [(0.25, ours), (0.0, {})], "underruns_total": [(1, ours)],
        "audio_seconds_total": [(1.5, ours), (0.5, {})], "stall_seconds": [(0.6, ours)],
        "endings_total": [(1, {"reason": "stop", **ours})], "rtf": [(0.25, ours)],
        "redrawn_total": [(1, {"reason": "none", **ours})], "ingress_streams": [(3, ours)],
        "ingress_used_ratio": [(0.75, {})], "replicas_wanted": [(1, {**talker, **ours})],
        "replicas_running": [(0, {**talker, **ours})], "replicas_died": [(2, {**talker, **ours})],
        "step_seconds": [(0.01, talker), (0.02, codec)], "batch_size": [(6, talker), (10, codec)],
        "kv_blocks_used_ratio": [(0.5, {}), (0.25, {})], "queue_depth": [(7, talker), (8, talker), (11, codec)],
        "codec_precision": [(1, {**codec, "precision": "float32"})], "codec_repairs_total": [(9, talker)],
        "codec_lag_seconds": [(0.6, {}), (0.7, {})], "decoded_seconds_total": [(1.5, codec)],
        "reference_lookups_total": [
            (12, {"wanted": "codes", "known": "yes"}), (13, {"wanted": "codes", "known": "no"}),
        ],
        "usage_requests_total": [(20, user)], "usage_characters_total": [(21, user)],
        "usage_audio_seconds_total": [(22, user)], "usage_codes_total": [(23, user)],
        "usage_refused_total": [(24, user)],
        "usage_failed_total": [(25, user), (2, {"key": "", "voice": "", "dialect": ""})],
    }  # fmt: skip
    assert {f"talkray_{name}" for name in expected} == {instrument.name for instrument in metrics.INSTRUMENTS}
    seen: dict[str, list[tuple[float, dict[str, str]]]] = {name: [] for name in expected}
    for name, value, tags in recorded.take():
        seen[name.removeprefix("talkray_")].append((value, tags or {}))
    assert seen == {
        name: [(pytest.approx(value), {"model": "", **tags}) for value, tags in records]
        for name, records in expected.items()
    }


def test_every_counter_begins_at_zero_in_some_pool() -> None:
    begun = {each.name for pool in ("ingress", "codec", "talker") for each, _ in metrics.zeros(pool, [""])}
    counters = {each.name for each in metrics.INSTRUMENTS if each.name.endswith("_total")}
    assert begun == {name for name in counters if not name.startswith("talkray_usage_")}, "of keys that may come"
