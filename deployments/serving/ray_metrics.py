"""Recorders that pass the metrics in `metrics.py` to Ray.

Ray's metrics agent on each node exports the metrics of all processes there. The agent prefixes each name with `ray_`
and adds the tag `WorkerId`, which distinguishes replicas. Recording through Ray takes 3 microseconds, or up to 95 if
the process was idle. A separate thread calls Ray shortly afterwards, so streams never wait for Ray.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from functools import cache, partial

from ray.util import metrics as ray

from deployments.serving import metrics

logger = logging.getLogger(__name__)

_HAND_ON_S = 0.05
# Ray's agent drops a gauge that is not set for two reports in a row. Reports are ten seconds apart.
_REPEAT_S = 5.0

Record = Callable[[float, dict[str, str]], None]


class LastingGauge(ray.Gauge):  # type: ignore[misc]  # Ray has no type annotations here
    """Gauge that repeats its last values every _REPEAT_S, so that they stay exported while the process is alive."""

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        super().__init__(name, description, tag_keys)
        self._last: dict[tuple[tuple[str, str], ...], float] = {}

    def set(self, value: float | None, tags: dict[str, str] | None = None) -> None:
        assert value is not None
        self._last[tuple((tags or {}).items())] = value
        super().set(value, tags)

    def repeat(self) -> None:
        for tags, value in self._last.items():
            super().set(value, dict(tags))


class Recorder:
    """Queue of recorded values that a separate thread passes to Ray in order."""

    def __init__(self) -> None:
        self.gauges: list[LastingGauge] = []
        self._records = queue.SimpleQueue[tuple[Record, float, dict[str, str]]]()

    def of(self, record: Record, known: dict[str, str]) -> Callable[..., None]:
        """Return the `record` function of an instrument. `known` holds this process's default model tag."""

        def keep(value: float, **tags: str) -> None:
            self._records.put((record, value, known | tags if tags.get(metrics.MODEL) else tags | known))

        return keep

    def deliver(self) -> None:
        """Pass all queued records to Ray. Must be called from only one thread."""
        while not self._records.empty():
            record, value, tags = self._records.get()
            try:
                record(value, tags)
            except Exception:
                logger.exception("a metric was not recorded: %s, %s", value, tags)

    def run(self) -> None:
        repeated_s = time.monotonic()
        while True:
            time.sleep(_HAND_ON_S)
            self.deliver()
            if time.monotonic() - repeated_s >= _REPEAT_S:
                repeated_s = time.monotonic()
                for gauge in self.gauges:
                    gauge.repeat()


def _count(counter: ray.Counter, value: float, tags: dict[str, str]) -> None:
    if value:  # Ray rejects a zero
        counter.inc(value, tags)


@cache
def install(model: str = "", *, pool: str | None = None, models: tuple[str, ...] = ("",)) -> Recorder:
    """Export this process's metrics through Ray. Called first in a replica's constructor.

    `model` is the model's name if there are several. The counters for `pool` start at zero; an ingress has one counter
    for each of `models`.
    """
    recorder, counters = Recorder(), {}
    for instrument in metrics.INSTRUMENTS:
        name, description, tags = instrument.name, instrument.description, (*instrument.tags, metrics.MODEL)
        if instrument.boundaries:
            record = ray.Histogram(name, description, list(instrument.boundaries), tags).observe
        elif name.endswith("_total"):
            counters[name] = ray.Counter(name, description, tags)
            record = partial(_count, counters[name])
        else:
            recorder.gauges.append(LastingGauge(name, description, tags))
            record = recorder.gauges[-1].set
        instrument.record = recorder.of(record, {metrics.MODEL: model})
    for instrument, counted in metrics.zeros(pool, models) if pool else ():
        counters[instrument.name]._record(0, {metrics.MODEL: model, **counted})  # `_count` would ignore a zero
    threading.Thread(target=recorder.run, name="metrics", daemon=True).start()
    return recorder
