"""Job files in the voice store. All methods block and raise StoreFailed.

    jobs/ID.json           description, written after the plan: a job exists if this file exists
    plans/ID/N.json        texts of the job in pieces; older versions wrote plans/ID.json
    states/ID.json         whether the job was cancelled or failed
    segments/ID/NAME       a finished segment: codes, FLAC audio, times of its text. NAME is `MadeSegment.name`.

The store writes each segment atomically, so a crash never leaves a partial segment.
"""

import contextlib
import io
import logging
import zipfile
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deployments.protocol import Codes
from serve_app.extensions.jobs.stored_job import JOB_ID, JobPlan, JobState, MadeSegment, Part, SegmentId, StoredJob
from serve_app.extensions.voices.voice_store import Damaged, StoreFailed, VoiceStore, record_file

if TYPE_CHECKING:
    import obstore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Content:
    """Codes, audio and text positions of a finished segment."""

    codes: Codes
    pcm: bytes  # s16le, mono, at the sample rate of the model
    positions: tuple[tuple[float, float], ...]  # (seconds into the segment, characters of its text)


class JobStore:
    """Reads and writes the jobs in one voice store. Only one process writes segments; any process can read them."""

    def __init__(self, files: VoiceStore) -> None:
        self._files = files

    def jobs(self) -> list[str]:
        names = [meta["path"].removeprefix("jobs/").removesuffix(".json") for meta in self._files.listed("jobs/")]
        return sorted(name for name in names if JOB_ID.fullmatch(name))

    def create(self, job: StoredJob) -> None:
        """Write the description of a job. The caller must have stored the plan."""
        self._files.put_record(f"jobs/{job.id}.json", job)

    def keep_piece(self, job_id: str, number: int, plan: JobPlan) -> int:
        """Store a piece of the plan. Return its size in bytes."""
        content = record_file(plan)
        self._files.put(f"plans/{job_id}/{number:06d}.json", content)
        return len(content)

    def parts(self, job: StoredJob, start: int, end: int) -> Iterator[tuple[int, Part, str]]:
        """Yield the number, plan and model of each part, keeping one piece of the plan in memory. Raises Damaged."""
        while start < end:
            plan = self.plan(job, start)
            for part in plan.parts[start - plan.first : end - plan.first]:
                yield start, part, plan.manners[part.manner].model
                start += 1

    def marks(self, job_id: str | None = None) -> dict[str, str]:
        """Return marks by job ID, for one job or for all. A job's mark changes whenever its state does."""
        if job_id is not None:
            mark = self.mark(job_id)
            return {} if mark is None else {job_id: mark}
        states = {meta["path"]: _mark(meta) for meta in self._files.listed("states/")}
        return {job_id: states.get(f"states/{job_id}.json", "") for job_id in self.jobs()}

    def mark(self, job_id: str) -> str | None:
        """Return the mark of a job, or None if the job was deleted."""
        if self._files.meta(f"jobs/{job_id}.json") is None:
            return None
        state = self._files.meta(f"states/{job_id}.json")
        return "" if state is None else _mark(state)

    def idle_s(self, job_id: str) -> float:
        """Return the seconds since the job or its state last changed, according to the store's clock."""
        metas = [self._files.meta(f"{kind}/{job_id}.json") for kind in ("jobs", "states")]
        latest_s = max((meta["last_modified"].timestamp() for meta in metas if meta is not None), default=0.0)
        return self._files.now_s() - latest_s

    def job(self, job_id: str) -> StoredJob | None:
        """Return the description, or None if the job was deleted. Raises Damaged."""
        return self._files.get_record(f"jobs/{job_id}.json", StoredJob)

    def plan(self, job: StoredJob, part: int) -> JobPlan:
        """Return the piece of the plan that contains the part. Raises Damaged."""
        number = bisect_right(job.pieces, part) - 1
        path = f"plans/{job.id}/{number:06d}.json" if job.pieces else f"plans/{job.id}.json"
        plan = self._files.get_record(path, JobPlan)
        if plan is None or not plan.has(part):
            raise Damaged(f"the text of part {part} of {job.id} is missing")
        return plan

    def state(self, job_id: str) -> JobState:
        return self._files.get_record(f"states/{job_id}.json", JobState) or JobState()

    def write_state(self, job_id: str, state: JobState) -> None:
        """Write the state of a job, and delete it again if the job has been deleted in the meantime."""
        self._files.put_record(f"states/{job_id}.json", state)
        if self.mark(job_id) is None:
            self._files.delete(f"states/{job_id}.json")

    def made(self, job_id: str) -> Iterator[tuple[MadeSegment, int]]:
        """Yield each finished segment once, with its size in bytes."""
        segments: dict[SegmentId, tuple[MadeSegment, int]] = {}
        prefix = f"segments/{job_id}/"
        for meta in self._files.listed(prefix):
            made = MadeSegment.of(meta["path"].removeprefix(prefix))
            if made is not None and (made.id not in segments or made.name < segments[made.id][0].name):
                segments[made.id] = made, meta["size"]  # the lowest name, so that all processes choose alike
        return iter(segments.values())

    def save(self, job_id: str, made: MadeSegment, content: bytes) -> str | None:
        """Store a finished segment as returned by `packed`. Return the mark of the job, or None if it was deleted.

        If the job is deleted in the meantime, either `save` or the deletion removes the segment, because a deletion
        removes the description first.
        """
        self._files.put(f"segments/{job_id}/{made.name}", content)
        mark = self.mark(job_id)
        if mark is None:
            self._files.delete(f"segments/{job_id}/{made.name}")
        return mark

    def content(self, job_id: str, made: MadeSegment, *, with_audio: bool = True) -> Content:
        """Read a segment. `pcm` is empty unless `with_audio` is set. Raises Damaged."""
        packed = self._files.get(f"segments/{job_id}/{made.name}")
        try:
            with np.load(io.BytesIO(packed or b""), allow_pickle=False) as arrays:  # the zip format contains checksums
                positions = tuple((float(seconds), float(chars)) for seconds, chars in arrays["positions"])
                pcm = _from_flac(arrays["flac"].tobytes()) if with_audio else b""
                return Content(arrays["codes"], pcm, positions=positions)
        except (ValueError, KeyError, OSError, EOFError, RuntimeError, zipfile.BadZipFile):
            fault = "missing" if packed is None else "damaged"
            raise Damaged(f"{made.id} of {job_id} is {fault}") from None

    def forget(self, job_id: str) -> None:
        """Delete the description of a job. Call `remove` to delete the other files."""
        self._files.delete(f"jobs/{job_id}.json")

    def discard(self, job_id: str) -> None:
        """Delete a job whose creation failed. Its description may exist if the store's response was lost."""
        with contextlib.suppress(StoreFailed):
            self.forget(job_id)
            self.remove(job_id)

    def remove(self, job_id: str) -> None:
        """Delete the files of a job without a description. For thousands of segments, a bucket takes about a minute."""
        with contextlib.suppress(StoreFailed):  # `sweep` later deletes the remaining files
            if self._files.meta(f"jobs/{job_id}.json") is None:
                self._files.delete(f"plans/{job_id}.json", f"states/{job_id}.json")
                for kind in ("plans", "segments"):
                    paths = [meta["path"] for meta in self._files.listed(f"{kind}/{job_id}/", unnamed=True)]
                    self._files.delete(*paths)

    def log_files_of_batches(self) -> None:
        if next(self._files.listed("files/"), None) is not None:
            logger.warning(
                "the folder files/ of the store contains data of OpenAI's files and batches, which this version does "
                "not support. Delete the folder to free its space"
            )

    def sweep(self, older_s: float) -> None:
        """Delete the files of any job that has no description if one of them is older than `older_s` seconds."""
        before_s = self._files.now_s() - older_s
        old = {
            meta["path"].split("/")[1].removesuffix(".json")
            for kind in ("states", "plans", "segments")
            for meta in self._files.listed(f"{kind}/")
            if meta["last_modified"].timestamp() < before_s
        }
        for job_id in old.difference(self.jobs()):
            self.remove(job_id)


def _mark(meta: "obstore.ObjectMeta") -> str:
    return f"{meta['e_tag']} {meta['last_modified']}"


def packed(codes: Codes, pcm: bytes, positions: list[tuple[float, float]], sample_rate: int) -> bytes:
    """Encode a segment for the store, as an NPZ archive with FLAC audio. Blocks."""
    import soundfile

    flac, file = io.BytesIO(), io.BytesIO()
    soundfile.write(flac, np.frombuffer(pcm, "<i2"), sample_rate, format="FLAC", subtype="PCM_16")
    times = np.array(positions, np.float32).reshape(-1, 2)
    np.savez(file, codes=codes, flac=np.frombuffer(flac.getvalue(), np.uint8), positions=times)
    return file.getvalue()


def _from_flac(flac: bytes) -> bytes:
    import soundfile

    samples: NDArray[np.int16] = soundfile.read(io.BytesIO(flac), dtype="int16")[0]
    return samples.astype("<i2", copy=False).tobytes()
