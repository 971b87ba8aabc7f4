"""In-memory copy of the jobs in a store.

The store is authoritative. Several processes can change jobs in the store, and each one picks up the others' changes.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from deployments.errors import Conflict
from serve_app.api.access.callers import Visitor
from serve_app.api.access.keys import Keys
from serve_app.api.resolve.resolver import Resolver
from serve_app.config import ConfigError
from serve_app.extensions.jobs.job_store import JobStore
from serve_app.extensions.jobs.settings import JobSettings
from serve_app.extensions.jobs.stored_job import JobState
from serve_app.extensions.jobs.work import Work
from serve_app.extensions.voices.voice_store import Damaged, StoreFailed

logger = logging.getLogger(__name__)


class KnownJobs:
    """Map from job IDs to `Work`. Call all methods from the same event loop."""

    def __init__(
        self,
        settings: JobSettings,
        store: Callable[[], JobStore],
        failed: Callable[[StoreFailed], None],
        *,
        changed: Callable[[], None],
    ) -> None:
        """`failed` is called if the store rejects a job's state, and `changed` after a state has changed."""
        self._settings, self._store, self._failed, self._changed = settings, store, failed, changed
        self.works: dict[str, Work] = {}
        self.deleted = deque[str](maxlen=1000)  # most recently deleted IDs
        self._following = asyncio.Lock()
        self._followed_s = float("-inf")

    async def follow(self, within_s: float) -> None:
        """Read the changes of all jobs, at most once every `within_s` seconds. Raises StoreFailed."""
        async with self._following:
            if time.monotonic() - self._followed_s >= within_s:
                await self.look()
                self._followed_s = time.monotonic()

    async def look(self, job_id: str | None = None) -> None:
        """Read the changes that other processes made to a job, or to all jobs by default. Raises StoreFailed."""
        known = {each for each in self.works if job_id in (None, each)}
        marks = await asyncio.to_thread(partial(self._store().marks, job_id))
        for gone in known - marks.keys():
            self.forget(gone)
        new = [each for each in marks if each not in self.works and each not in self.deleted]
        for work in await asyncio.to_thread(_works_of, self._store(), new):
            if work.job.id not in self.deleted:  # this process may have deleted the job in the meantime
                self.works.setdefault(work.job.id, work)
        for work in [self.works[each] for each in known & marks.keys() & self.works.keys()]:
            if work.mark != marks[work.id]:
                await self.adopt(work, marks[work.id])

    async def adopt(self, work: Work, mark: str) -> None:
        """Read the state of a job, which another process may have changed."""
        async with work.lock:
            state = work.state  # kept if the stored state is damaged
            with suppress(Damaged):
                state = await asyncio.to_thread(self._store().state, work.job.id)
            work.mark = mark
            if state != work.state:
                await self._obey(work, state)

    def forget(self, job_id: str) -> None:
        """Drop a job that another process has deleted."""
        if (work := self.works.pop(job_id, None)) is not None:
            cancel_tasks(work)

    async def end(self, work: Work, state: JobState) -> None:
        """Set the final state. If there already is one, keep it, because two segments of a job may fail at once."""
        async with work.lock:
            if not work.state.ended_at:
                work.plan, work.next_webhook_s = None, 0.0
                await self.write(work, state)

    async def write(self, work: Work, state: JobState) -> None:
        """Write the state of a job. The caller must hold the job's lock. If the store fails, only this process has the
        state. The next process then synthesizes the missing segments again, with the same result.
        """
        work.state = state
        try:
            await asyncio.to_thread(self._store().write_state, work.job.id, state)
        except StoreFailed as error:
            self._failed(error)

    async def change(self, work: Work, state: JobState) -> None:
        """Apply the owner's change. Raises StoreFailed and keeps the old state if the store is not available."""
        async with work.lock:
            await asyncio.to_thread(self._store().write_state, work.job.id, state)
            await self._obey(work, state)

    async def _obey(self, work: Work, state: JobState) -> None:
        """Apply a state that the owner has set, here or in another process."""
        work.state, work.next_webhook_s = state, 0.0
        work.failures.clear()
        work.suspects.clear()
        if state.ended_at:
            work.plan = None
            await cancel_tasks(work)
        else:
            work.queue_all()
        self._changed()

    def held(self) -> Counter[str]:
        """Return the number of bytes that each owner has in the store."""
        held = Counter[str]()
        for work in self.works.values():
            held[work.job.owner] += work.num_bytes
        return held

    def known(self, owner: str, key: str | None, fingerprint: str) -> Work | None:
        """Return the job that the owner created with this idempotency key, or None.

        Raises Conflict if the owner used the key with a different body.
        """
        own = (work for work in self.works.values() if work.job.owner == owner)
        known = next((work for work in own if key is not None and work.job.key == key), None)
        if known is not None and known.job.fingerprint != fingerprint:
            message = f"Idempotency-Key: {known.job.id} used this key with a different body. Use another key."
            raise Conflict(message, "Idempotency-Key", "idempotency_key_reused")
        return known

    def check_room(self, owner: str, num_bytes: int) -> None:
        """Raise Conflict if another job of `num_bytes` bytes would exceed the owner's quota."""
        own = [work.num_bytes for work in self.works.values() if work.job.owner == owner]
        num_bytes += sum(own)
        if len(own) >= self._settings.max_jobs or num_bytes >= self._settings.max_bytes:
            limits = f"{self._settings.max_jobs} jobs (max_jobs) and {self._settings.max_bytes} bytes (max_bytes)"
            message = f"You have {len(own)} jobs, {num_bytes} bytes with the new one. Limits: {limits}. Delete a job."
            raise Conflict(message, None, "quota_exceeded")


def _works_of(store: JobStore, job_ids: list[str]) -> list[Work]:
    """Read the jobs, leaving out damaged and deleted ones. Blocks."""
    works = []
    for job_id in job_ids:
        try:
            mark = store.mark(job_id) or ""
            job, state = store.job(job_id), store.state(job_id)
        except Damaged as error:
            logger.error("skipping a damaged job: %s", error)
            continue
        if job is not None:
            stored = list(store.made(job_id))
            made = {segment.id: segment for segment, _ in stored}
            num_bytes = job.plan_bytes + sum(size for _, size in stored)
            works.append(Work(job, state, made=made, num_bytes=num_bytes, mark=mark))
    return works


def cancel_tasks(work: Work) -> asyncio.Future[list[BaseException | None]]:
    """Cancel the running segments and the webhook call of a job. Await the returned future to wait for them to end."""
    tasks = [*work.running.values(), *filter(None, (work.webhook_task,))]
    tasks = [task for task in tasks if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    return asyncio.gather(*tasks, return_exceptions=True)


def keys_of(resolver: Resolver) -> Keys | None:
    file = resolver.settings.access.keys_file
    try:
        return None if file is None else Keys(file)
    except ConfigError as error:
        logger.error("jobs do not check for revoked keys, because the keys file cannot be read: %s", error)
        return None


def sees(visitor: Visitor, work: Work) -> bool:
    return visitor.sees_all or work.job.owner == visitor.name


def age(work: Work) -> tuple[int, str]:
    return work.job.created_at, work.job.id
