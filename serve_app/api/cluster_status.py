"""What the whole cluster does now and did in the last quarter of an hour, for `GET /status` and the page.

Each ingress replica counts for itself and leaves its counts in the cluster's control store every two seconds. The
replica that is asked adds them up, at most once a second.
"""

import asyncio
import importlib.metadata
import json
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool

from deployments.serving import metrics
from serve_app.speech.models import Models

Json = dict[str, object]
Sizes = Mapping[str, tuple[int, int]]  # replicas wanted and running, by pool

_SLICE_S = 15
_SLICES = 60  # a quarter of an hour
_NOW_SLICES = 5  # the last minute, with the part of 15 seconds that is under way
_STALE_S = 60.0  # a note of a replica that has ended; with many replicas notes are written less often
_SUMMED_S = 1.0
_STEP = math.log(1.05)  # times to first audio are counted in classes of 5 %


@dataclass(slots=True)
class _Slice:
    """What happened in 15 seconds."""

    number: int  # since the epoch
    first_ms: Counter[int] = field(default_factory=Counter)  # times to first audio, by their class
    refused: Counter[str] = field(default_factory=Counter)
    ended: int = 0
    late: int = 0  # chunks
    audio_s: float = 0.0

    def told(self) -> list[object]:
        return [self.number, dict(self.first_ms), dict(self.refused), self.ended, self.late, round(self.audio_s, 2)]


class Recent:
    """The counts of one ingress replica. `follow` once in its process, after the metrics have their recorders."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds since the epoch."""
        self._clock = clock
        self._slices: deque[_Slice] = deque(maxlen=_SLICES)
        self._models: Models | None = None

    def watch(self, models: Models) -> None:
        """Whose streams are counted."""
        self._models = models

    def follow(self) -> None:
        """Counts from now on what the metrics record."""
        for instrument, take in (
            (metrics.TTFA, self.count_first_audio),
            (metrics.REFUSALS, self._count_refusal),
            (metrics.ENDINGS, self._count_end),
            (metrics.UNDERRUNS, self._count_late),
            (metrics.AUDIO, self._count_audio),
        ):
            instrument.record = _both(instrument.record, take)

    def count_first_audio(self, elapsed_s: float, _tags: object = None) -> None:
        self._now().first_ms[round(math.log(max(elapsed_s, 1e-3) * 1000) / _STEP)] += 1

    def _count_refusal(self, _value: float, tags: Mapping[str, str]) -> None:
        self._now().refused[tags["reason"]] += 1

    def _count_end(self, _value: float, _tags: object = None) -> None:
        self._now().ended += 1

    def _count_late(self, _value: float, _tags: object = None) -> None:
        self._now().late += 1

    def _count_audio(self, audio_s: float, _tags: object = None) -> None:
        self._now().audio_s += audio_s

    def _now(self) -> _Slice:
        number = int(self._clock() // _SLICE_S)
        if not self._slices or self._slices[-1].number != number:
            self._slices.append(_Slice(number))
        return self._slices[-1]

    def note(self) -> bytes:
        """For the control store."""
        speaking, waiting, most = (0, 0, 0) if self._models is None else self._models.load()
        streams = {"speaking": speaking, "waiting": waiting, "most": most}
        slices = [each.told() for each in list(self._slices)]
        return json.dumps({"at": self._clock(), "streams": streams, "slices": slices}).encode()


def _both(first: Callable[..., None], second: Callable[..., None]) -> Callable[..., None]:
    def record(value: float, tags: Mapping[str, str] | None = None) -> None:
        first(value, tags)
        second(value, tags)

    return record


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The status of the cluster, from the counts of this replica and the notes of all."""

    recent: Recent
    sizes: Callable[[], Sizes] = dict  # of the pools
    notes: Callable[[], Sequence[bytes]] = tuple  # of the other ingress replicas; blocks

    def read(self) -> Json:
        """Streams, refusals and first audio of all replicas. Blocks."""
        own = json.loads(self.recent.note())
        others = [json.loads(note) for note in self.notes()]
        fresh = [own, *(each for each in others if own["at"] - each["at"] < _STALE_S)]
        sizes = self.sizes()
        pools = {name: {"wanted": wanted, "running": running} for name, (wanted, running) in sizes.items()}
        return {"at": own["at"], "pools": pools, **summed(fresh, now_s=own["at"]), "ingresses_heard": len(fresh)}


def summed(notes: Sequence[Mapping[str, object]], *, now_s: float) -> Json:
    """Notes of several replicas as one answer, with its last quarter of an hour in slices of 15 seconds."""
    streams: Counter[str] = Counter()
    by_number: dict[int, list[list[object]]] = defaultdict(list)
    last = int(now_s // _SLICE_S)
    for note in notes:
        streams.update(note["streams"])  # type: ignore[call-overload]
        for each in note["slices"]:  # type: ignore[attr-defined]
            by_number[each[0]].append(each)
    numbers = range(last - _SLICES + 1, last + 1)
    in_each = [_sum(by_number[number]) for number in numbers]
    quarter = _sum([each for number in numbers for each in by_number[number]])
    now = _sum([each for number in numbers[-_NOW_SLICES:] for each in by_number[number]])
    return {"streams": dict(streams), "last_minute": now, "last_quarter_hour": quarter, "slices": in_each}


def _sum(slices: Iterable[list[object]]) -> Json:
    first: Counter[int] = Counter()
    refused: Counter[str] = Counter()
    ended = late = 0
    audio_s = 0.0
    for _, first_ms, refusals, endings, lateness, seconds in slices:
        first.update({int(key): count for key, count in first_ms.items()})  # type: ignore[attr-defined]
        refused.update(refusals)  # type: ignore[call-overload]
        ended, late, audio_s = ended + endings, late + lateness, audio_s + seconds  # type: ignore[operator]
    ms = {"count": first.total(), "p50": _percentile(first, 0.5), "p95": _percentile(first, 0.95)}
    return {
        "first_audio_ms": ms,
        "refused": dict(refused),
        "streams_ended": ended,
        "late_chunks": late,
        "audio_s": round(audio_s, 1),
    }


def _percentile(classes: Counter[int], share: float) -> float | None:
    """Within 2.5 %."""
    wanted, passed = share * classes.total(), 0
    for key in sorted(classes):
        passed += classes[key]
        if passed >= wanted:
            return round(math.exp(key * _STEP), 1)
    return None


def cluster_routes(models: Models, status: ClusterStatus) -> APIRouter:
    """`GET /status`."""
    router, version, room = APIRouter(), importlib.metadata.version("talkray"), asyncio.Lock()
    kept: Json = {}

    @router.get("/status", summary="The cluster's models, pools, streams and first audio")
    async def cluster_status() -> Json:
        """Of all ingress replicas, as they were at most a few seconds ago; the page shows it."""
        async with room:  # many open pages are one reading a second
            if time.time() - float(str(kept.get("at", 0))) >= _SUMMED_S:
                kept.update(await run_in_threadpool(status.read))
        states = {name or "model": state.described() for name, state in models.states().items()}
        return {"version": version, "models": states, **kept}

    return router
