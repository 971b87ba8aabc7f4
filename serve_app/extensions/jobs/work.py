"""A job's progress in the process that runs it: finished, running and remaining segments."""

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import nsmallest
from operator import attrgetter

from deployments.errors import Conflict, NotFound
from serve_app.extensions.jobs.stored_job import JobPlan, JobState, JobStatus, MadeSegment, Part, SegmentId, StoredJob

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class Track:
    """The finished audio of a part or job, described by its segment names."""

    job_id: str
    sample_rate: int
    frame_samples: int
    names: tuple[str, ...]  # of the segments, in order; strings save memory, because a job may have 100,000


@dataclass(slots=True, eq=False)
class Work:
    """A job and its progress. While the job runs, this object holds only one piece of the plan, to save memory."""

    job: StoredJob
    state: JobState
    made: dict[SegmentId, MadeSegment]
    num_bytes: int  # storage used, including the plan
    mark: str = ""  # changes with the stored state
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while the state is written or read
    todo: deque[SegmentId] = field(default_factory=deque)
    running: dict[SegmentId, asyncio.Task[None]] = field(default_factory=dict)
    plan: JobPlan | None = None
    webhook_task: asyncio.Task[None] | None = None  # notifies the webhook that the job has ended
    next_webhook_s: float = 0.0
    failures: dict[SegmentId, int] = field(default_factory=dict)  # number of failures of each retried segment
    suspects: dict[SegmentId, None] = field(default_factory=dict)  # segments lost with a replica; each is retried alone
    parts: dict[int, list[int]] = field(default_factory=dict)  # [finished segments, their samples] by part
    samples: int = 0  # total of all parts
    problems: list[MadeSegment] = field(default_factory=list)
    num_parts_done: int = 0
    _began_s: float = 0.0  # start of the first segment in this process
    _num_new: int = 0  # number of segments finished in this process
    num_segments: int = 0

    def __post_init__(self) -> None:
        self.num_segments = sum(self.job.num_segments)
        self.num_parts_done = self.job.num_segments.count(0)
        for made in self.made.values():
            self._count(made)
        self.queue_all()

    def queue_all(self) -> None:
        """Queue all segments that are neither finished nor running, in order."""
        ids = self._ids(range(len(self.job.num_segments)))
        self.todo = deque(segment for segment in ids if segment not in self.made and segment not in self.running)

    def _ids(self, parts: Iterable[int]) -> Iterator[SegmentId]:
        return (SegmentId(part, number) for part in parts for number in range(self.job.num_segments[part]))

    @property
    def id(self) -> str:
        return self.job.id

    @property
    def is_complete(self) -> bool:
        return len(self.made) == self.num_segments

    def status(self, hindrance: str | None) -> JobStatus:
        """Return the status. `hindrance` is why the job cannot start a segment now, if it cannot."""
        if self.state.cancelled:
            return JobStatus.CANCELLED
        if self.state.failed is not None:
            return JobStatus.FAILED
        if self.is_complete:
            return JobStatus.COMPLETED
        if hindrance is not None:
            return JobStatus.PAUSED
        return JobStatus.RUNNING if self.made or self.running else JobStatus.QUEUED

    def begin(self, segment_id: SegmentId, task: asyncio.Task[None]) -> None:
        self._began_s = self._began_s or time.monotonic()
        self.running[segment_id] = task

    def add(self, made: MadeSegment, num_bytes: int) -> None:
        """Count a stored segment. `num_bytes` is its size in the store."""
        self.num_bytes += num_bytes
        self._num_new += 1
        if made.id not in self.made:
            self.made[made.id] = made
            self._count(made)

    def _count(self, made: MadeSegment) -> None:
        part = self.parts.setdefault(made.id.part, [0, 0])
        part[0] += 1
        part[1] += made.samples
        self.samples += made.samples
        self.num_parts_done += part[0] == self.job.num_segments[made.id.part]
        if made.was_redrawn or not made.finish_reason.is_good:
            self.problems.append(made)

    def has_part(self, number: str) -> bool:
        return number.isascii() and number.isdigit() and len(number) < 10 and int(number) < len(self.job.num_segments)

    def names(self, part: str | None) -> tuple[str, ...]:
        """Return the segment names of a finished part, or of the complete job if `part` is None. Blocks for long jobs.

        Raises NotFound if the part is unknown, and Conflict if the part or job is not finished.
        """
        last = len(self.job.num_segments) - 1
        if part is not None and not self.has_part(part):
            message = f"part {part[:80]!r} is unknown. {self.job.id} has parts 0 to {last}."
            raise NotFound(message, "part", "part_not_found")
        if part is None and (not self.is_complete or self.state.failed is not None):
            message = f"{self.job.id} is not finished: {len(self.made)} of {self.num_segments} segments are ready."
            raise Conflict(message, None, "job_not_finished")
        ids = [*self._ids(range(last + 1) if part is None else [int(part)])]
        done = sum(segment_id in self.made for segment_id in ids)
        if done < len(ids):
            message = f"Part {part} of {self.job.id} is not finished: {done} of {len(ids)} segments are ready."
            raise Conflict(message, "part", "part_not_finished")
        return tuple(self.made[segment_id].name for segment_id in ids)

    def as_json(self, hindrance: str | None, *, most_problems: int) -> Json:
        """Return the object that the API sends to the owner, with at most `most_problems` problems."""
        status = self.status(hindrance)
        rate = next((self.job.info(name).sample_rate for name in self.job.models), 1)  # some old jobs have no model
        reason = self.state.failed if status is JobStatus.FAILED else hindrance if status is JobStatus.PAUSED else None
        return {
            "id": self.job.id,
            "object": "audio.job",
            "status": status,
            "created_at": self.job.created_at,
            "deterministic": self.job.deterministic,
            "parts": {"total": len(self.job.num_segments), "done": self.num_parts_done},
            "segments": {"total": self.num_segments, "done": len(self.made)},
            "bytes": self.num_bytes,
            "audio_s": round(self.samples / rate, 3),
            "eta_s": self._eta_s() if status is JobStatus.RUNNING else None,
            "reason": reason,
            "ended_at": self.state.ended_at,
            "webhook": self.job.webhook
            and {
                "url": self.job.webhook,
                "calls": self.state.calls,
                "error": self.state.call_error,
                "delivered": self.state.called_at is not None and self.state.call_error is None,
            },
            "problems": [made.as_json() for made in nsmallest(most_problems, self.problems, key=attrgetter("id"))],
        }

    def part_as_json(self, number: int, part: Part, model: str) -> Json:
        """Return one entry for the list of parts."""
        done, samples = self.parts.get(number, (0, 0))
        return {
            "part": number,
            "custom_id": part.custom_id,
            "seed": part.seed,
            "segments": {"total": self.job.num_segments[number], "done": done},
            "audio_s": round(samples / self.job.info(model).sample_rate, 3),
        }

    @property
    def owes_webhook(self) -> bool:
        """Whether the server still has to notify the webhook that the job has ended."""
        has_ended = self.status(None) in (JobStatus.COMPLETED, JobStatus.FAILED)
        return has_ended and self.job.webhook is not None and self.state.called_at is None

    def _eta_s(self) -> float | None:
        """Estimate the remaining seconds from this process's pace. Return None before the first segment."""
        if not self._num_new:
            return None
        left = self.num_segments - len(self.made)
        return round(left * (time.monotonic() - self._began_s) / self._num_new, 1)
