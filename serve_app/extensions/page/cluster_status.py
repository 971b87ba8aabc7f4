"""Compute the cluster's activity, now and over the last 15 minutes, for `GET /status` and the web page.

Each ingress replica writes its counts to the cluster's control store every two seconds. The replica that serves
`GET /status` adds up the counts of all replicas, at most once per second.
"""

import asyncio
import json
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from deployments.serving import metrics
from serve_app.api.speech_service import SpeechService
from serve_app.distribution import version
from serve_app.extension import Charge, Dialect, Route
from serve_app.speech.speech_models import SpeechModels

Json = dict[str, object]
Sizes = Mapping[str, tuple[int, int]]  # target and running number of replicas, by pool

_SLICE_S = 15
_SLICES = 60  # 15 minutes
_NOW_SLICES = 5  # the last minute and the current slice
_STALE_S = 60.0  # ignore older notes, because their replica has stopped
_SUMMED_S = 1.0
_STEP = math.log(1.05)  # histogram buckets of the time to first audio are 5 % wide
_FIRST, _REFUSED = "first ", "refused "  # prefixes of buckets and reasons


class Recent:
    """Counts of one ingress replica. Call `follow` once per process, after the metrics are installed."""

    def __init__(self, clock: Callable[[], float], models: SpeechModels | None = None) -> None:
        """`clock` returns seconds since the epoch. `models` provides the number of streams."""
        self._clock, self._models = clock, models
        self._slices: deque[tuple[int, Counter[str]]] = deque(maxlen=_SLICES)  # (slice since the epoch, counts)

    def follow(self) -> None:
        """Start counting the values that the metrics record."""
        for instrument, count in (
            (metrics.TTFA, lambda elapsed_s, **_: self.count_first_audio(elapsed_s)),
            (metrics.REFUSALS, lambda _, *, reason, **__: self._count(f"{_REFUSED}{reason}")),
            (metrics.ENDINGS, lambda *_, **__: self._count("ended")),
            (metrics.UNDERRUNS, lambda *_, **__: self._count("late")),
            (metrics.AUDIO, lambda audio_s, **_: self._count("audio_s", audio_s)),
        ):
            instrument.record = _both(instrument.record, count)

    def count_first_audio(self, elapsed_s: float) -> None:
        self._count(f"{_FIRST}{round(math.log(max(elapsed_s, 1e-3) * 1000) / _STEP)}")

    def _count(self, name: str, amount: float = 1) -> None:
        number = int(self._clock() // _SLICE_S)
        if not self._slices or self._slices[-1][0] != number:
            self._slices.append((number, Counter()))
        self._slices[-1][1][name] += amount  # type: ignore[assignment]  # the amount may be in seconds

    def note(self) -> bytes:
        """Return the counts as JSON for the control store."""
        speaking, waiting, most = (0, 0, 0) if self._models is None else self._models.stream_counts()
        streams = {"speaking": speaking, "waiting": waiting, "most": most}
        slices = [(number, dict(counts)) for number, counts in list(self._slices)]
        return json.dumps({"at": self._clock(), "streams": streams, "slices": slices}).encode()


def _both(first: Callable[..., None], second: Callable[..., None]) -> Callable[..., None]:
    def record(value: float, **tags: str) -> None:
        first(value, **tags)
        second(value, **tags)

    return record


class ClusterStatus:
    """The cluster's status, computed from this replica's counts and the other replicas' notes."""

    def __init__(
        self, recent: Recent, sizes: Callable[[], Sizes] = dict, notes: Callable[[], Sequence[bytes]] = tuple
    ) -> None:
        """`sizes` returns the sizes of the pools. `notes` returns the notes of other ingress replicas, and blocks."""
        self.recent, self._sizes, self._notes = recent, sizes, notes
        self._reading, self._latest = asyncio.Lock(), Json()

    async def latest(self) -> Json:
        """Return the result of `read`, which can be up to one second old."""
        async with self._reading:  # however many pages are open, read only once per second
            if time.time() - float(str(self._latest.get("at", 0))) >= _SUMMED_S:
                self._latest = await run_in_threadpool(self.read)
        return self._latest

    def read(self) -> Json:
        """Read and add up the streams, refusals and times to first audio of all replicas. Blocks."""
        own = json.loads(self.recent.note())
        other_notes = [json.loads(note) for note in self._notes()]
        fresh = [own, *(note for note in other_notes if own["at"] - note["at"] < _STALE_S)]
        sizes = self._sizes()
        pools = {name: {"wanted": wanted, "running": running} for name, (wanted, running) in sizes.items()}
        return {"at": own["at"], "pools": pools, **summed(fresh, now_s=own["at"]), "ingresses_heard": len(fresh)}


def summed(notes: Sequence[Mapping[str, Any]], *, now_s: float) -> Json:
    """Add up the notes of several replicas, in 15-second slices for the last 15 minutes."""
    streams: Counter[str] = Counter()
    in_each: list[Counter[str]] = [Counter() for _ in range(_SLICES)]  # oldest first
    oldest = int(now_s // _SLICE_S) - _SLICES + 1
    for note in notes:
        streams.update(note["streams"])
        for number, counts in note["slices"]:
            if oldest <= number < oldest + _SLICES:
                in_each[number - oldest].update(counts)
    quarter, now = sum(in_each, Counter()), sum(in_each[-_NOW_SLICES:], Counter())
    windows = {
        "last_minute": _window(now),
        "last_quarter_hour": _window(quarter),
        "slices": [_window(counts) for counts in in_each],
    }
    return {"streams": dict(streams), **windows}


def _window(counts: Counter[str]) -> Json:
    first = Counter({int(name[len(_FIRST) :]): count for name, count in counts.items() if name.startswith(_FIRST)})
    refused = {name[len(_REFUSED) :]: count for name, count in counts.items() if name.startswith(_REFUSED)}
    ms = {"count": first.total(), "p50": _percentile(first, 0.5), "p95": _percentile(first, 0.95)}
    ends = {"streams_ended": counts["ended"], "late_chunks": counts["late"], "audio_s": round(counts["audio_s"], 1)}
    return {"first_audio_ms": ms, "refused": refused, **ends}


def _percentile(classes: Counter[int], share: float) -> float | None:
    """Return a percentile of the time to first audio in ms, accurate to 2.5 %, or None if there is no data."""
    wanted, passed = share * classes.total(), 0
    for key in sorted(classes):
        passed += classes[key]
        if passed >= wanted:
            return round(math.exp(key * _STEP), 1)
    return None


@dataclass(frozen=True, slots=True)
class PageState:
    """Data for the routes of the web page."""

    dialects: Sequence[Dialect]  # dialects of the core and of all extensions
    status: ClusterStatus | None  # None outside a replica


def page_of(service: SpeechService) -> PageState:
    state: PageState = service.opened_by("page")
    return state


async def show_status(service: SpeechService) -> Json:
    """Return the status of the entire cluster, which can be a few seconds old."""
    if (status := page_of(service).status) is None:
        raise HTTPException(404)
    told = await status.latest()
    states = {name or "model": state.as_json() for name, state in service.models.states().items()}
    return {"version": version(), "models": states, **told}


DIALECT = Dialect(
    "Cluster status",
    routes=(
        Route(
            "GET /status",
            show_status,
            "Show the cluster's models, pools, streams and first audio",
            charge=Charge.NOTHING,
        ),
    ),
    heading="This server",
)
