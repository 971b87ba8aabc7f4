"""Count usage by key, model, voice and dialect for each hour, without texts.

Each process writes one file per hour to the voice store, and rewrites the file after changes. Processes therefore do
not conflict. If a process dies, the counts since its last `flush` are lost; it runs every ten seconds.
"""

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Annotated, Self

from pydantic import BaseModel, Field

from deployments.serving import metrics
from serve_app.api.request_record import RequestRecord
from serve_app.extensions.voices.voice_store import StoreFailed, VoiceStore

# Bucket for rows over the limit. It replaces voices first, and then keys. Models and dialects are few.
OTHERS = "(others)"
_MOST_ROWS = 1000  # per file; 50 % more with OTHERS instead of the voice
_MOST_SERIES = 200  # Prometheus series, which the process keeps until it ends
# Error codes of requests that count as refused. Other errors count as failures.
_REFUSALS = frozenset({"rate_limit_exceeded", "not_ready", "invalid_api_key", "forbidden", "headers_too_large"})

_FOLDER = "usage"  # in the store
Label = tuple[str, str, str, str]  # values of LABELS, any of which may be empty
_Value = Annotated[str, Field(max_length=4096)]  # the name of a model may be a path
LABELS = ("key", "model", "voice", "dialect")


@dataclass(slots=True)
class Used:
    """Usage counts of one row."""

    requests: int = 0  # with audio
    characters: int = 0  # in the texts as sent
    audio_s: float = 0.0  # duration at playback speed
    codes: int = 0  # frames
    refused: int = 0  # rejected by a limit, for lack of capacity, or without a valid key
    failed: int = 0  # ended by other errors, including invalid requests

    def add(self, other: "Used") -> None:
        for name in Used.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @classmethod
    def of(cls, record: RequestRecord) -> Self:
        usage = record.usage
        refused = int(record.error in _REFUSALS)
        failed = int(record.is_failure and not refused)
        if not usage.samples:
            return cls(refused=refused, failed=failed)
        audio_s = usage.samples / record.samples_per_s
        return cls(1, record.characters, audio_s=audio_s, codes=usage.frames, refused=refused, failed=failed)


@dataclass(slots=True, kw_only=True)
class UsageRow(Used):
    """One key's usage of one voice, model and dialect in an hour."""

    key: _Value
    model: _Value
    voice: _Value
    dialect: _Value


class UsageHour(BaseModel):
    """File with the usage that one process counted in one hour."""

    hour: Annotated[str, Field(max_length=13)]  # 2026-11-26T18, UTC
    rows: Annotated[tuple[UsageRow, ...], Field(max_length=10_000)] = ()


@dataclass(slots=True)
class Bounded:
    """Counts for at most `most` labels, and 50 % more labels with OTHERS as their voice."""

    most: int
    counts: dict[Label, Used] = field(default_factory=dict)

    def add(self, label: Label, used: Used) -> Label:
        """Add `used` to the counts, and return the label that contains it."""
        key, model, _, dialect = label
        if label not in self.counts and len(self.counts) >= self.most:
            label = key, model, OTHERS, dialect
        if label not in self.counts and len(self.counts) >= self.most * 3 // 2:
            label = OTHERS, model, OTHERS, dialect
        self.counts.setdefault(label, Used()).add(used)
        return label


class UsageBook:
    """Usage counts of this process. Call all methods from the same thread."""

    def __init__(self, store: VoiceStore | None, clock: Callable[[], float]) -> None:
        """If there is no store, update only the metrics. `clock` returns seconds since the epoch."""
        self._store, self._clock = store, clock
        self._writer = secrets.token_hex(8)
        self._hours: dict[str, Bounded] = {}  # the current hour, and earlier hours that have not been written yet
        self._changed: set[str] = set()
        self._series = Bounded(_MOST_SERIES)

    def receive(self, record: RequestRecord) -> None:
        usage = record.usage
        used = Used.of(record)
        label = (record.key or "", usage.model or "", usage.voice or "", record.dialect)
        hour = time.strftime("%Y-%m-%dT%H", time.gmtime(self._clock()))
        self._hours.setdefault(hour, Bounded(_MOST_ROWS)).add(label, used)
        self._changed.add(hour)
        key, model, voice, dialect = self._series.add(label, used)
        for name, instrument in metrics.USED.items():
            instrument.record(getattr(used, name), key=key, voice=voice, dialect=dialect, model=model)

    def flush(self, *, is_last: bool = False) -> None:
        """Write the file for each hour that has changed. If a write fails, a later call retries it."""
        if self._store is None:
            self._hours.clear()
            return
        with contextlib.suppress(StoreFailed):  # the store logs the error
            for hour in sorted(self._changed):
                counts = self._hours[hour].counts.items()
                rows = tuple(
                    UsageRow(key=key, model=model, voice=voice, dialect=dialect, **asdict(used))
                    for (key, model, voice, dialect), used in counts
                )
                path = f"{_FOLDER}/{hour.replace('T', '/')}-{self._writer}.json"
                self._store.put_record(path, UsageHour(hour=hour, rows=rows))
                self._changed.discard(hour)
            self._hours = {hour: self._hours[hour] for hour in sorted(self._hours)[-1:]}


def read_usage(store: VoiceStore, since: str) -> Iterator[UsageHour]:
    """Yield all files since the hour `since`, such as 2026-11-26T18. Raises StoreFailed and Damaged."""
    paths = [meta["path"] for meta in store.listed(f"{_FOLDER}/")]
    for path in sorted(paths):
        _, day, name = path.split("/")
        if f"{day}T{name[:2]}" >= since and (hour := store.get_record(path, UsageHour)) is not None:
            yield hour
