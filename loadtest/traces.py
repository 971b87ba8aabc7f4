"""Store schedules and results as one JSON line per request, in a write-once folder.

All times are seconds since the start of the run, from `time.perf_counter_ns()`.
"""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Self

from loadtest.arrivals import RequestKind, ScheduledRequest
from loadtest.playback import Playback, heard_at, simulate

SAMPLE_BYTES = 2  # s16le


class LoadTestError(Exception):
    """Base class for expected errors, whose messages say how to fix the problem."""

    exit_code = 1


class RunExistsError(LoadTestError):
    """Raised if a folder already contains a run."""

    exit_code = 2


class NoRunError(LoadTestError):
    """Raised if a folder does not contain readable results."""


class Failure(StrEnum):
    """Reason why a request did not complete with audio."""

    REFUSED = "refused"  # HTTP 429, or rate_limit_exceeded on a WebSocket
    HTTP = "http error"
    CONNECTION = "no connection"
    TIMEOUT = "timeout"
    BROKEN_BODY = "broken body"
    NOT_AUDIO = "not the requested audio"
    INTERRUPTED = "interrupted"  # by the load test


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds since `start_ns`."""

    start_ns: int

    @classmethod
    def started(cls) -> Self:
        return cls(time.perf_counter_ns())

    def now_s(self) -> float:
        """Return the seconds since the start, with microsecond precision."""
        return round((time.perf_counter_ns() - self.start_ns) / 1e9, 6)


@dataclass(frozen=True, slots=True)
class PcmLayout:
    """Format of a stream with s16le samples."""

    sample_rate: int
    channels: int = 1

    @property
    def frame_bytes(self) -> int:
        """Size of one sample of every channel, in bytes."""
        return SAMPLE_BYTES * self.channels


@dataclass(slots=True)
class Trace:
    """Observations of one request. Further values are available as properties once the request has finished."""

    index: int
    planned_s: float
    sent_s: float
    finished_s: float = 0.0
    first_byte_s: float | None = None  # of the body, not the headers
    status: int | None = None  # None: no response
    failure: Failure | None = None
    error: str | None = None
    request_id: str | None = None
    retry_after_s: float | None = None  # from a refusal
    num_bytes: int = 0  # of the body
    layout: PcmLayout | None = None  # None: no audio arrived
    audible_sample: int | None = None  # index of the first audible sample; None: silent
    chunks: Sequence[tuple[float, int]] = ()  # (arrival, total audio bytes) for each read with audio
    server_timing_s: Mapping[str, float] | None = None  # by stage, up to the first audio, if reported
    frames: int | None = None  # planned length; None: the model decided, or the result is old
    first_word_s: float | None = None  # when the first word of live text was sent
    interrupted_s: float | None = None  # when the client interrupted the turn
    kind: RequestKind | None = None  # set in mixed traffic
    left_s: float | None = None  # when a client left early, as planned

    @property
    def cause(self) -> str | None:
        """The failure in one or two words, plus the HTTP status if there is one."""
        if self.failure in (Failure.REFUSED, Failure.HTTP) and self.status is not None:
            return f"HTTP {self.status}"
        return self.failure and self.failure.value

    @property
    def asked_s(self) -> float:
        """Start of the caller's wait: the planned arrival, or the first word of live text."""
        return self.planned_s if self.first_word_s is None else self.first_word_s

    @property
    def ttfb_s(self) -> float | None:
        """Seconds from the request to the first byte; None unless the request succeeded and was streamed."""
        return None if self.failure or self.first_byte_s is None or self.is_file else self.first_byte_s - self.asked_s

    @property
    def ttfa_s(self) -> float | None:
        """Seconds from the request to the first audible sample; None if `ttfb_s` is None or the audio is silent."""
        return None if self.ttfb_s is None or self.first_audible_s is None else self.first_audible_s - self.asked_s

    @property
    def is_file(self) -> bool:
        """Whether the response is a complete file, which cannot be played until it is complete."""
        return self.kind is RequestKind.WHOLE

    @property
    def silence_s(self) -> float | None:
        """Seconds from an interruption to the last audio, 0 if none followed; None without an interruption or audio."""
        if self.interrupted_s is None or not self.chunks:
            return None
        return max(0.0, self.chunks[-1][0] - self.interrupted_s)

    @property
    def playable(self) -> tuple[list[float], list[int]]:
        """Arrival times and cumulative samples of the chunks that completed at least one sample."""
        arrivals_s: list[float] = []
        samples: list[int] = []
        for arrival_s, audio_bytes in self.chunks:
            total = audio_bytes // self.layout.frame_bytes if self.layout else 0
            if total > (samples[-1] if samples else 0):
                arrivals_s.append(arrival_s)
                samples.append(total)
        return arrivals_s, samples

    @property
    def first_playable_s(self) -> float | None:
        """Arrival time of the first complete sample."""
        arrivals_s, _ = self.playable
        return arrivals_s[0] if arrivals_s else None

    @property
    def first_audible_s(self) -> float | None:
        """Time at which a zero-buffer player plays the first audible sample, after any leading silence."""
        if self.layout is None or self.audible_sample is None:
            return None
        arrivals_s, samples = self.playable
        return round(heard_at(self.audible_sample, arrivals_s, samples, sample_rate=self.layout.sample_rate), 6)

    @property
    def audio_s(self) -> float:
        _, samples = self.playable
        return samples[-1] / self.layout.sample_rate if self.layout and samples else 0.0

    def arrived_s(self, begin_s: float, end_s: float) -> float:
        arrivals_s, samples = self.playable
        if self.layout is None:
            return 0.0
        came = zip(arrivals_s, samples, [0, *samples], strict=False)
        return sum(after - before for at_s, after, before in came if begin_s <= at_s < end_s) / self.layout.sample_rate

    @property
    def playback(self) -> Playback | None:
        """Simulated playback of the stream, or None if there is no audio."""
        arrivals_s, samples = self.playable
        return simulate(arrivals_s, samples, sample_rate=self.layout.sample_rate) if self.layout and samples else None

    def to_json(self) -> dict[str, object]:
        """Return the stored values, and derived times for readers that do not use this module."""
        derived = {"first_playable_s": self.first_playable_s, "first_audible_s": self.first_audible_s}
        return asdict(self) | derived

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        stored: dict[str, Any] = {field.name: record.get(field.name) for field in fields(cls)}
        stored["failure"] = Failure(stored["failure"]) if stored["failure"] else None
        stored["kind"] = RequestKind(stored["kind"]) if stored["kind"] else None
        stored["layout"] = PcmLayout(**stored["layout"]) if stored["layout"] else None
        stored["chunks"] = [(arrival_s, audio_bytes) for arrival_s, audio_bytes in stored["chunks"]]
        return cls(**stored)


class TraceFolder:
    """Files of one run. Every file is created once and never overwritten."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def check_unused(self) -> None:
        """Raise `RunExistsError` if the folder contains files of a run, even an unfinished one."""
        if self.path.exists() and any(self.path.iterdir()):
            try:
                run = self.read_json("run.json")
                about = f"{run['started_at']}, {run['url']}"
            except (NoRunError, KeyError):
                about = "unfinished, or of several rates"
            raise RunExistsError(
                f"{self.path} already contains a run ({about}). Results are never overwritten: "
                f"choose another --out, or move the folder away."
            )

    def write_json(self, name: str, content: Mapping[str, object]) -> None:
        with self._create(name) as file:
            file.write(json.dumps(content, indent=2, allow_nan=False) + "\n")

    def write_schedule(self, schedule: Iterable[ScheduledRequest]) -> None:
        with self._create("schedule.jsonl") as file:
            file.writelines(json.dumps(asdict(request)) + "\n" for request in schedule)

    def append_trace(self, trace: Trace, name: str = "requests.jsonl") -> None:
        """Write one finished request, unbuffered."""
        self.append(name, trace.to_json())

    def append(self, name: str, record: Mapping[str, object]) -> None:
        """Write one line with one system call, so several processes can write concurrently."""
        line = json.dumps(record, allow_nan=False) + "\n"
        with (self.path / name).open("ab", buffering=0) as file:
            file.write(line.encode())

    def read_traces(self) -> list[Trace]:
        """Return all finished requests, in the order of the schedule."""
        traces = [Trace.from_json(record) for record in self.read_lines("requests.jsonl")]
        return sorted(traces, key=lambda trace: trace.planned_s)

    def read_lines(self, name: str) -> list[dict[str, Any]]:
        """Return the records of a JSON Lines file, or an empty list if the file does not exist."""
        path = self.path / name
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []

    def read_json(self, name: str) -> dict[str, Any]:
        """Read a JSON file. Raises `NoRunError` with its path if the file is missing or invalid."""
        try:
            document = json.loads((self.path / name).read_text(encoding="utf-8"))
        except OSError as error:
            raise NoRunError(
                f"{self.path} has no results: {name} cannot be read ({error.strerror}). "
                f"Use the --out folder of a run or sweep."
            ) from error
        except ValueError as error:
            raise NoRunError(f"{self.path / name} is not JSON: {error}") from error
        if not isinstance(document, dict):
            raise NoRunError(f"{self.path / name} is not a JSON object")
        return document

    def _create(self, name: str) -> TextIOWrapper:
        self.path.mkdir(parents=True, exist_ok=True)
        return (self.path / name).open("x", encoding="utf-8")
