"""Where jobs lie: in the store of voices, beside them. All methods block, and raise StoreFailed.

    jobs/ID.json           the description: a job is there once it is written
    plans/ID.json          its texts, written before
    states/ID.json         whether it was cancelled or failed
    segments/ID/NAME       a finished segment: codes, audio as FLAC, times of its text. `MadeSegment.name` is its NAME.

A segment is one object, which is complete once it has its name, so a death leaves no half of one.
"""

import contextlib
import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deployments.protocol import Codes
from serve_app.jobs.stored_job import JOB_ID, JobPlan, JobState, MadeSegment, SegmentId, StoredJob
from serve_app.voices.voice_store import Damaged, StoreFailed, VoiceStore


@dataclass(frozen=True, slots=True)
class Content:
    """What is kept of a segment."""

    codes: Codes
    pcm: bytes  # s16le, mono, at the model's sample rate
    positions: tuple[tuple[float, float], ...]  # seconds of the segment, characters of its text


class JobStore:
    """The jobs of one store. One process writes segments, any number reads."""

    def __init__(self, files: VoiceStore) -> None:
        self._files = files

    def jobs(self) -> list[str]:
        names = [meta["path"].removeprefix("jobs/").removesuffix(".json") for meta in self._files.listed("jobs/")]
        return sorted(name for name in names if JOB_ID.fullmatch(name))

    @property
    def has_batch_files(self) -> bool:
        return next(self._files.listed("files/"), None) is not None

    def create(self, job: StoredJob, plan: JobPlan) -> None:
        self._files.put_record(f"plans/{job.id}.json", plan)
        self._files.put_record(f"jobs/{job.id}.json", job)

    def job(self, job_id: str) -> StoredJob | None:
        """None where it has gone. Raises Damaged."""
        return self._files.get_record(f"jobs/{job_id}.json", StoredJob)

    def existing_job(self, job_id: str) -> StoredJob:
        """The same of a job that was there. Raises Damaged."""
        if (job := self.job(job_id)) is None:
            raise Damaged(f"the description of {job_id} is missing: it was deleted meanwhile")
        return job

    def plan(self, job_id: str) -> JobPlan:
        """Raises Damaged."""
        plan = self._files.get_record(f"plans/{job_id}.json", JobPlan)
        if plan is None:
            raise Damaged(f"the texts of {job_id} are missing")
        return plan

    def state(self, job_id: str) -> JobState:
        return self._files.get_record(f"states/{job_id}.json", JobState) or JobState()

    def write_state(self, job_id: str, state: JobState) -> None:
        self._files.put_record(f"states/{job_id}.json", state)

    def made(self, job_id: str) -> Iterator[tuple[MadeSegment, int]]:
        """The finished segments, each once, with the bytes that it takes."""
        segments: dict[SegmentId, tuple[MadeSegment, int]] = {}
        prefix = f"segments/{job_id}/"
        for meta in self._files.listed(prefix):
            made = MadeSegment.of(meta["path"].removeprefix(prefix))
            if made is not None and (made.id not in segments or made.name < segments[made.id][0].name):
                segments[made.id] = made, meta["size"]  # two runners may have made one: the same one counts everywhere
        return iter(segments.values())

    def save(self, job_id: str, made: MadeSegment, content: bytes) -> None:
        """Keep a finished segment. `content` is made by `packed`."""
        self._files.put(f"segments/{job_id}/{made.name}", content)

    def content(self, job_id: str, made: MadeSegment) -> Content:
        """Raises Damaged."""
        packed = self._files.get(f"segments/{job_id}/{made.name}")
        try:
            with np.load(io.BytesIO(packed or b""), allow_pickle=False) as arrays:  # a zip: it checks its sums
                positions = tuple((float(seconds), float(chars)) for seconds, chars in arrays["positions"])
                return Content(arrays["codes"], _from_flac(arrays["flac"].tobytes()), positions=positions)
        except (ValueError, KeyError, OSError, RuntimeError, zipfile.BadZipFile):
            fault = "missing" if packed is None else "damaged"
            raise Damaged(f"{made.id} of {job_id} is {fault}") from None

    def forget(self, job_id: str) -> None:
        """Remove the description: what is left belongs to no job."""
        self._files.delete(f"jobs/{job_id}.json")

    def remove(self, job_id: str) -> None:
        """Remove what `forget` leaves; a bucket takes a minute for some thousand segments. `sweep` takes the rest."""
        with contextlib.suppress(StoreFailed):
            self._files.delete(f"plans/{job_id}.json", f"states/{job_id}.json")
            self._files.delete(*(meta["path"] for meta in self._files.listed(f"segments/{job_id}/")))

    def sweep(self, before_s: float) -> None:
        """Remove what belongs to no job and is older than `before_s`, of time.time()."""
        known = set(self.jobs())
        for kind in ("plans", "states", "segments"):
            for meta in self._files.listed(f"{kind}/"):
                job_id = meta["path"].split("/")[1].removesuffix(".json")
                if job_id not in known and meta["last_modified"].timestamp() < before_s:
                    self._files.delete(meta["path"])


def packed(codes: Codes, pcm: bytes, positions: list[tuple[float, float]], sample_rate: int) -> bytes:
    """A segment as it is kept. Blocks."""
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
