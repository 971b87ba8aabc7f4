"""Gauges are set again, because Ray's agent drops one that has not changed for twenty seconds."""

import threading
from collections.abc import Iterator

import pytest
from ray.util.metrics import Gauge

from deployments.serving import metrics

Set = tuple[str, float, dict[str, str] | None]


@pytest.fixture
def was_set(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Set]]:
    """What reaches Ray."""
    calls: list[Set] = []
    monkeypatch.setattr(Gauge, "set", lambda self, value, tags=None: calls.append((self._name, value, tags)))
    for gauge in metrics.Gauge.all:
        gauge._last.clear()
    yield calls
    for gauge in metrics.Gauge.all:
        gauge._last.clear()


def test_every_gauge_here_is_one_that_stays() -> None:
    here = [each for each in vars(metrics).values() if isinstance(each, Gauge)]
    assert len(here) == 9
    assert all(each in metrics.Gauge.all for each in here)


def test_the_last_value_of_each_set_of_tags_is_set_again(was_set: list[Set]) -> None:
    metrics.replicas("talker", wanted=2, running=1)
    metrics.replicas("codec", wanted=1, running=1)
    metrics.replicas("talker", wanted=2, running=2)
    was_set.clear()
    metrics.RUNNING.repeat()
    name = "talkray_replicas_running"
    assert was_set == [(name, 2, {"pool": "talker"}), (name, 1, {"pool": "codec"})]


def test_it_happens_by_itself(was_set: list[Set], monkeypatch: pytest.MonkeyPatch) -> None:
    again = threading.Event()
    metrics._start_repeating.cache_clear()
    monkeypatch.setattr(metrics, "_REPEAT_S", 0.01)
    monkeypatch.setattr(metrics.PRECISION, "repeat", again.set)
    metrics.codec_precision("codec", "float32")
    assert again.wait(30)
