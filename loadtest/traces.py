"""Plans and results, one JSON line per request, in a write-once folder.

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
    """An expected error. Its message names the remedy."""

    exit_code = 1


class RunExistsError(LoadTestError):
    """The folder already holds a run."""

    exit_code = 2


class NoRunError(LoadTestError):
    """The folder has no readable results."""


class Failure(StrEnum):
    """Why a request did not end in a whole spoken answer."""

    REFUSED = "refused"  # HTTP 429, or a WebSocket's rate_limit_exceeded
    HTTP = "http error"
    CONNECTION = "no connection"
    TIMEOUT = "timeout"
    BROKEN_BODY = "broken body"
    NOT_AUDIO = "not the audio asked for"
    INTERRUPTED = "interrupted"  # by us


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds since `start_ns`."""

    start_ns: int

    @classmethod
    def started(cls) -> Self:
        return cls(time.perf_counter_ns())

    def now_s(self) -> float:
        """Seconds since the start, to the microsecond."""
        return round((time.perf_counter_ns() - self.start_ns) / 1e9, 6)


@dataclass(frozen=True, slots=True)
class PcmLayout:
    """Format of a stream of s16le samples."""

    sample_rate: int
    channels: int = 1

    @property
    def frame_bytes(self) -> int:
        """Bytes of one sample of every channel."""
        return SAMPLE_BYTES * self.channels


@dataclass(slots=True)
class Trace:
    """One request. Fields are observations; properties are derived from them once it has finished."""

    index: int
    planned_s: float
    sent_s: float
    finished_s: float = 0.0
    first_byte_s: float | None = None  # of the body; headers do not count
    status: int | None = None  # None: no answer
    failure: Failure | None = None
    error: str | None = None
    request_id: str | None = None
    retry_after_s: float | None = None  # advised by a refusal
    num_bytes: int = 0  # of the body
    layout: PcmLayout | None = None  # None: no audio arrived
    audible_sample: int | None = None  # first audible one; None: all quiet
    chunks: Sequence[tuple[float, int]] = ()  # (arrival, audio bytes so far) for each read with audio
    server_timing_s: Mapping[str, float] | None = None  # by stage, up to the first audio, if reported
    frames: int | None = None  # planned; None: the model decided, or an old result
    first_word_s: float | None = None  # when it was sent, if the text was written while spoken
    interrupted_s: float | None = None  # when we interrupted it
    kind: RequestKind | None = None  # of mixed traffic
    left_s: float | None = None  # when a client that leaves early left, as planned

    @property
    def cause(self) -> str | None:
        """The failure in one or two words, with the HTTP status if that is the reason."""
        if self.failure in (Failure.REFUSED, Failure.HTTP) and self.status is not None:
            return f"HTTP {self.status}"
        return self.failure and self.failure.value

    @property
    def asked_s(self) -> float:
        """Start of the caller's wait: the planned arrival, or the first word of a text written while spoken."""
        return self.planned_s if self.first_word_s is None else self.first_word_s

    @property
    def ttfb_s(self) -> float | None:
        """From when the caller asked to the first byte; None unless the request succeeded and was streamed."""
        return None if self.failure or self.first_byte_s is None or self.is_file else self.first_byte_s - self.asked_s

    @property
    def ttfa_s(self) -> float | None:
        """From when the caller asked to the first audible sample; None as for `ttfb_s`, or if all is quiet."""
        return None if self.ttfb_s is None or self.first_audible_s is None else self.first_audible_s - self.asked_s

    @property
    def is_file(self) -> bool:
        """Whether the answer is not streamed, and so cannot be played before its end."""
        return self.kind is RequestKind.WHOLE

    @property
    def silence_s(self) -> float | None:
        """From an interruption to the last audio after it, 0 if none arrived; None without an interruption or audio."""
        if self.interrupted_s is None or not self.chunks:
            return None
        return max(0.0, self.chunks[-1][0] - self.interrupted_s)

    @property
    def playable(self) -> tuple[list[float], list[int]]:
        """Arrival times, and samples so far, of the chunks that completed at least one more sample."""
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
        """When the first whole sample had arrived."""
        arrivals_s, _ = self.playable
        return arrivals_s[0] if arrivals_s else None

    @property
    def first_audible_s(self) -> float | None:
        """When a zero-buffer player would have played the first audible sample: leading silence counts."""
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
        """The simulated player, None without audio."""
        arrivals_s, samples = self.playable
        return simulate(arrivals_s, samples, sample_rate=self.layout.sample_rate) if self.layout and samples else None

    def to_json(self) -> dict[str, object]:
        """Stored values, and the derived times for readers without this module."""
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
    """The files of one run. Every file is created once; nothing is ever overwritten."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def check_unused(self) -> None:
        """Raises RunExistsError if anything, such as an unfinished run, was written here."""
        if self.path.exists() and any(self.path.iterdir()):
            try:
                run = self.read_json("run.json")
                about = f"{run['started_at']}, {run['url']}"
            except (NoRunError, KeyError):
                about = "unfinished, or of several rates"
            raise RunExistsError(
                f"{self.path} already holds a run ({about}). Results are never overwritten: "
                f"choose another --out, or move the folder away."
            )

    def write_json(self, name: str, content: Mapping[str, object]) -> None:
        with self._create(name) as file:
            file.write(json.dumps(content, indent=2, allow_nan=False) + "\n")

    def write_schedule(self, schedule: Iterable[ScheduledRequest]) -> None:
        with self._create("schedule.jsonl") as file:
            file.writelines(json.dumps(asdict(request)) + "\n" for request in schedule)

    def append_trace(self, trace: Trace, name: str = "requests.jsonl") -> None:
        """Write one finished request; the operating system has it when this returns."""
        self.append(name, trace.to_json())

    def append(self, name: str, record: Mapping[str, object]) -> None:
        """Write one line with one system call, so that several processes may write concurrently."""
        line = json.dumps(record, allow_nan=False) + "\n"
        with (self.path / name).open("ab", buffering=0) as file:
            file.write(line.encode())

    def read_traces(self) -> list[Trace]:
        """Every finished request, in the order of the plan."""
        traces = [Trace.from_json(record) for record in self.read_lines("requests.jsonl")]
        return sorted(traces, key=lambda trace: trace.planned_s)

    def read_lines(self, name: str) -> list[dict[str, Any]]:
        """The records of a file of JSON lines, none if there is no such file."""
        path = self.path / name
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []

    def read_json(self, name: str) -> dict[str, Any]:
        """One JSON file. Raises NoRunError with its path if it is missing or broken."""
        try:
            document = json.loads((self.path / name).read_text(encoding="utf-8"))
        except OSError as error:
            raise NoRunError(
                f"{self.path} holds no results: {name} cannot be read ({error.strerror}). "
                f"Give the --out folder of a run or of a sweep."
            ) from error
        except ValueError as error:
            raise NoRunError(f"{self.path / name} is not JSON: {error}") from error
        if not isinstance(document, dict):
            raise NoRunError(f"{self.path / name} is not a JSON object")
        return document

    def _create(self, name: str) -> TextIOWrapper:
        self.path.mkdir(parents=True, exist_ok=True)
        return (self.path / name).open("x", encoding="utf-8")
