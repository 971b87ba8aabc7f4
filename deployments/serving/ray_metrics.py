"""Recorders for the instruments of `metrics.py`: Ray's metrics.

Ray's metrics agent on each node exports the metrics of all processes there, with `ray_` in front of each name. It adds
the tag `WorkerId`, which tells replicas apart. One record takes one to three microseconds.
"""

import functools
import threading
import time
from collections.abc import Callable, Sequence

from ray.util import metrics as ray

from deployments.serving import metrics

# Ray's agent drops a gauge that is not set for two of its reports, which are ten seconds apart.
_REPEAT_S = 5.0


class LastingGauge(ray.Gauge):  # type: ignore[misc]  # Ray has no types here
    """A gauge that keeps its last values while this process lives, because they are set again every _REPEAT_S."""

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        super().__init__(name, description, tag_keys)
        self._last: dict[tuple[tuple[str, str], ...], float] = {}
        self._lock = threading.Lock()  # an old value must not follow a new one

    def set(self, value: float | None, tags: dict[str, str] | None = None) -> None:
        assert value is not None
        with self._lock:
            self._last[tuple((tags or {}).items())] = value
            super().set(value, tags)

    def repeat(self) -> None:
        with self._lock:
            for tags, value in self._last.items():
                super().set(value, dict(tags))


@functools.cache
def install(model: str = "", *, pool: str | None = None, models: tuple[str, ...] = ("",)) -> None:
    """Let Ray export the metrics of this process. `model`: the name of one of several models. Counters of a `pool`
    begin at zero, those of an ingress for all `models`.

    The constructor of a replica calls this first.
    """
    gauges, counters = [], {}
    for instrument in metrics.INSTRUMENTS:
        name, description, tags = instrument.name, instrument.description, (*instrument.tags, metrics.MODEL)
        if instrument.boundaries:
            record = ray.Histogram(name, description, list(instrument.boundaries), tags).observe
        elif name.endswith("_total"):
            counters[name] = ray.Counter(name, description, tags)
            record = counters[name].inc
        else:
            gauges.append(LastingGauge(name, description, tags))
            record = gauges[-1].set
        instrument.record = functools.partial(_record, record, {metrics.MODEL: model})
    for instrument, counted in metrics.zeros(pool, models) if pool else ():
        counters[instrument.name]._record(0, {metrics.MODEL: model, **counted})  # `inc` refuses a zero
    threading.Thread(target=repeat_all, args=(gauges,), name="gauges", daemon=True).start()


def _record(
    record: Callable[[float, dict[str, str]], None],
    known: dict[str, str],
    value: float,
    tags: dict[str, str] | None = None,
) -> None:
    record(value, {**known, **tags} if tags else known)


def repeat_all(gauges: Sequence[LastingGauge]) -> None:
    while True:
        time.sleep(_REPEAT_S)
        for gauge in gauges:
            gauge.repeat()
