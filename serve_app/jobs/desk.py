"""All jobs of a server, in one process: takes them in, makes their segments, and tells how far they are.

What is made lies in the store. A process that dies loses the segments that were running, and its successor makes these
again: `JobDesk.run` begins with what the store has.
"""

import asyncio
import hashlib
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from deployments.errors import Conflict, EngineError, InvalidRequest, NotFound, NotReady, Overloaded, ReplicaLost
from serve_app.api.requests.ignored_fields import Reasons
from serve_app.api.requests.speech_request import Offer
from serve_app.config import JobSettings
from serve_app.jobs.job_store import JobStore
from serve_app.jobs.planning import planned
from serve_app.jobs.segment_maker import JobStopped, SegmentMaker
from serve_app.jobs.stored_job import JobState, MadeSegment, SegmentId, StoredJob
from serve_app.jobs.webhooks import WEBHOOK, Webhooks
from serve_app.jobs.work import Json, Track, Work
from serve_app.visitor import VISITOR, Visitor
from serve_app.voices.stored_voice import now
from serve_app.voices.voice_store import Damaged, StoreFailed

logger = logging.getLogger(__name__)

_FIRST_SEGMENTS = 2.0  # at once, until the pools are known to have room for more
_RETRY_S, _LONGEST_RETRY_S = 0.25, 15.0  # after a refusal, and of a store that cannot be written
_LOOK_S = 1.0  # between two looks whether a hindrance is over
_REMOVAL_S = 2.0  # for the segments of a job that is deleted; a bucket may go on for longer
_SWEEP_S, _ABANDONED_S = 600.0, 3600.0
_MOST_FAILURES = 3  # of the engine, on one segment
_MOST_CALLS, _CALL_AGAIN_S = 8, 2.0  # of a webhook; the wait is four times as long after each: six hours in all


# How the HTTP surface asks the desk, by the name of a method of `JobDesk` and its arguments: by `JobDesk.call`, or by a
# call of the deployment that holds the desk, which also raises NotReady while there is no replica.
AskDesk = Callable[..., Awaitable[Any]]


class JobDesk:
    """The one process that makes the segments of jobs. All methods belong to one event loop."""

    def __init__(
        self,
        offer: Offer,
        maker: SegmentMaker,
        settings: JobSettings,
        *,
        hindrance: Callable[[str], str | None] = lambda model: None,
    ) -> None:
        """`hindrance` says why jobs may not use a model now, by its name."""
        self._offer, self._maker, self._settings, self._hindrance = offer, maker, settings, hindrance
        self._webhooks = Webhooks(settings)
        self._works: dict[str, Work] = {}
        self._limit = min(_FIRST_SEGMENTS, float(settings.max_segments))
        self._failure: str | None = None  # why the store takes nothing now
        self._changed = asyncio.Event()
        self._creating = asyncio.Lock()
        self._has_read = False
        self._swept_s = 0.0

    async def call(self, method: str, *arguments: object) -> Any:
        methods: dict[str, Callable[..., Awaitable[Any]]]
        methods = {"create": self.create, "all_of": self.all_of, "ask": self.ask, "track": self.track}
        return await methods[method](*arguments)

    async def create(self, visitor: Visitor, fields: Json, key: str | None) -> tuple[Json, Reasons]:
        """A new job, and its fields without effect; with a `key` that its owner has used the job of that time.

        Raises InvalidRequest, Conflict, NotReady, StoreFailed.
        """
        await self._read()
        VISITOR.set(visitor)
        owner = visitor.name or ""
        fingerprint = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
        async with self._creating:
            if (known := self._known(owner, key, fingerprint)) is not None:
                return self._as_json(known), {}
            webhook = self._webhooks.checked(fields.pop(WEBHOOK, None))
            made = await planned(self._offer, fields)
            plan = made.plan()
            job = StoredJob(
                id=f"job_{secrets.token_hex(12)}",
                owner=owner,
                created_at=now(),
                key=key,
                fingerprint=fingerprint,
                models=made.models,
                num_segments=tuple(len(part.segments) for part in plan.parts),
                webhook=webhook,
                deterministic=made.deterministic,
            )
            await asyncio.to_thread(self._store().create, job, plan)
            self._works[job.id] = Work(job, JobState(), made={}, num_bytes=0)
        self._changed.set()
        return self._as_json(self._works[job.id]), made.ignored

    async def all_of(self, visitor: Visitor) -> list[Json]:
        """The newest first."""
        await self._read()
        visible = [work for work in self._works.values() if _sees(visitor, work)]
        return [self._as_json(work) for work in sorted(visible, key=_age, reverse=True)]

    async def ask(self, visitor: Visitor, action: str, job_id: str) -> Json:
        """The job after `action` was done: "get", "cancel", "resume" or "delete". Raises NotFound, StoreFailed."""
        work = await self._find(visitor, job_id)
        if action == "cancel" and not work.is_complete:
            await self._change(work, JobState(cancelled=True, ended_at=now()))
        elif action == "resume" and not work.is_complete:
            await self._change(work, JobState())
        elif action == "delete":
            await self._remove(work)
            return {"id": job_id, "object": "audio.job.deleted", "deleted": True}
        return self._as_json(work)

    async def track(self, visitor: Visitor, job_id: str, part: int | None) -> Track:
        """A finished part, or all of a finished job. Raises NotFound, Conflict."""
        work = await self._find(visitor, job_id)
        made = work.whole() if part is None else work.part(part)
        infos = [work.job.info(model) for model in work.job.models]
        if part is None and len({info.sample_rate for info in infos}) > 1:
            raise Conflict("Its models have different sample rates: fetch its parts.", None, "mixed_sample_rates")
        return Track(job_id, infos[0].sample_rate, frame_samples=infos[0].frame_samples, made=made)

    async def run(self) -> None:
        """Make segments until this is cancelled. Those that run then are made again by the next process."""
        try:
            while True:
                await self._take_turn()
        finally:
            await asyncio.gather(*map(_cancel_tasks, self._works.values()))

    async def _take_turn(self) -> None:
        """Begin what there is room for, and wait for a change."""
        try:
            await self._read()
            await self._clean_up()
        except StoreFailed as error:
            self._fail(error)
        self._changed.clear()
        for ended in self._works.values():
            if ended.webhook_task is None and ended.owes_webhook and ended.next_webhook_s <= time.monotonic():
                ended.webhook_task = asyncio.create_task(self._call_webhook(ended))
        while self._num_running < int(self._limit) and (work := self._next()) is not None:
            segment_id = work.todo.popleft()
            work.begin(segment_id, asyncio.create_task(self._make(work, segment_id)))
        try:
            async with asyncio.timeout(_LOOK_S):
                await self._changed.wait()
        except TimeoutError:
            return

    @property
    def _num_running(self) -> int:
        return sum(len(work.running) for work in self._works.values())

    def _next(self) -> Work | None:
        """The job whose segment begins next: of the owner, then of the job, with the fewest that run; the oldest."""
        of_owners = Counter[str]()
        for work in self._works.values():
            of_owners[work.job.owner] += len(work.running)
        ready = [work for work in self._works.values() if work.todo and not work.state.ended_at]
        ready = [work for work in ready if self._hindered(work) is None]
        return min(ready, key=lambda work: (of_owners[work.job.owner], len(work.running), *_age(work)), default=None)

    async def _make(self, work: Work, segment_id: SegmentId) -> None:
        """One segment, from the pools into the store. What cannot be made now is put back."""
        try:
            if work.plan is None:
                work.plan = await asyncio.to_thread(self._store().plan, work.job.id)
            made, content = await self._maker.make(work.job, work.plan, segment_id)
            await self._save(work, made, content)
            self._limit = min(self._limit + 0.5, self._settings.max_segments)
        except (Overloaded, NotReady, ReplicaLost) as error:
            self._limit = max(1.0, self._limit / 2)
            logger.info("%s: %s waits: %s", work.job.id, segment_id, error)
            await asyncio.sleep(_RETRY_S)  # and keeps its slot meanwhile
            work.todo.appendleft(segment_id)
        except EngineError as error:
            work.failures[segment_id] = work.failures.get(segment_id, 0) + 1
            if work.failures[segment_id] >= _MOST_FAILURES:
                await self._stop(work, f"{segment_id}: {error}")
            else:
                work.todo.appendleft(segment_id)
        except StoreFailed as error:  # its voice, or its texts, cannot be read now
            self._fail(error)
            await asyncio.sleep(_LOOK_S)
            work.todo.appendleft(segment_id)
        except (JobStopped, InvalidRequest, Damaged) as error:
            await self._stop(work, f"{segment_id}: {error}")
        except Exception:
            logger.exception("%s: %s failed", work.job.id, segment_id)
            await self._stop(work, f"{segment_id}: the server failed, see its log")
        finally:
            work.running.pop(segment_id, None)
            self._changed.set()

    async def _call_webhook(self, work: Work) -> None:
        """Tell the webhook of a job that it has ended."""
        assert work.job.webhook is not None
        before = work.state
        try:
            error = await self._webhooks.notify(work.job.webhook, self._as_json(work))
            calls = before.calls + 1
            called_at = now() if error is None or calls == _MOST_CALLS else None
            if error is not None:
                logger.warning("%s: call %d of %s failed: %s", work.job.id, calls, work.job.webhook, error)
                work.next_webhook_s = time.monotonic() + _CALL_AGAIN_S * 4**before.calls
            if work.state is before:
                outcome = {"calls": calls, "call_error": error, "called_at": called_at}
                await self._set(work, before.model_copy(update=outcome))
        finally:
            work.webhook_task = None

    async def _save(self, work: Work, made: MadeSegment, content: bytes) -> None:
        """Store a segment, however long that takes: nothing new begins while the store takes nothing."""
        delay_s = _RETRY_S
        while True:
            try:
                await asyncio.to_thread(self._store().save, work.job.id, made, content)
            except StoreFailed as error:
                self._fail(error)
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, _LONGEST_RETRY_S)
            else:
                break
        self._failure = None
        work.add(made, len(content))
        if work.is_complete:
            work.plan = None
            await self._set(work, JobState(ended_at=now()))

    def _fail(self, error: StoreFailed) -> None:
        if str(error) != self._failure:
            logger.error("jobs are paused: %s", error)
        self._failure = str(error)

    async def _stop(self, work: Work, reason: str) -> None:
        """No segment of it begins any more, until it is resumed."""
        logger.error("%s failed: %s", work.job.id, reason)
        await self._set(work, JobState(failed=reason, ended_at=now()))

    async def _set(self, work: Work, state: JobState) -> None:
        """Where the store takes nothing the state is found again: the next segment fails or ends as this one."""
        work.state = state
        writing = asyncio.create_task(asyncio.to_thread(self._store().write_state, work.job.id, work.state))
        try:
            await asyncio.shield(writing)
        except StoreFailed as error:
            self._fail(error)
        finally:  # the thread of a task that is cancelled goes on: a deletion comes after it
            await asyncio.gather(writing, return_exceptions=True)

    async def _change(self, work: Work, state: JobState) -> None:
        """What its owner wants. Raises StoreFailed, and nothing has changed then."""
        await asyncio.to_thread(self._store().write_state, work.job.id, state)
        work.state = state
        if state.cancelled:
            await _cancel_tasks(work)
        work.failures.clear()
        work.queue_all()
        self._changed.set()

    def _hindered(self, work: Work) -> str | None:
        """Why no segment of it begins now."""
        if self._failure is not None:
            return self._failure
        held = sum(other.num_bytes for other in self._works.values() if other.job.owner == work.job.owner)
        if held >= self._settings.max_bytes:
            most = self._settings.max_bytes
            return f"Its owner's jobs hold {held} bytes, api.jobs.max_bytes allows {most}: delete some."
        return next(filter(None, map(self._hindrance, work.job.models)), None)

    def _as_json(self, work: Work) -> Json:
        return work.as_json(self._hindered(work))

    def _known(self, owner: str, key: str | None, fingerprint: str) -> Work | None:
        """The job that its owner has made with this key. Raises Conflict where that was another one, and where no
        further job is kept.
        """
        own = [work for work in self._works.values() if work.job.owner == owner]
        known = next((work for work in own if key is not None and work.job.key == key), None)
        if known is None and len(own) >= self._settings.max_jobs:
            message = f"{len(own)} jobs are kept, api.jobs.max_jobs allows no more: delete some."
            raise Conflict(message, None, "quota_exceeded")
        if known is not None and known.job.fingerprint != fingerprint:
            message = f"Idempotency-Key: {known.job.id} was made with it, from another body: take another key."
            raise Conflict(message, "Idempotency-Key", "idempotency_key_reused")
        return known

    async def _find(self, visitor: Visitor, job_id: str) -> Work:
        await self._read()
        work = self._works.get(job_id)
        if work is None or not _sees(visitor, work):
            raise NotFound(f"There is no job {job_id[:80]!r}, or it is not yours.", "job_id", "job_not_found")
        return work

    async def _read(self) -> None:
        """What the store has, once. Raises StoreFailed."""
        if self._has_read:
            return
        store = self._store()
        works = await asyncio.to_thread(_works_of, store)
        if not self._has_read:
            self._works |= {work.job.id: work for work in works}
            self._has_read = True
            if await asyncio.to_thread(lambda: store.has_batch_files):
                logger.warning("files/ in the store of voices has files of OpenAI's batches, which nothing uses")

    async def _clean_up(self) -> None:
        """Remove jobs that ended long ago, and what belongs to no job. Looks whether a full store takes files again."""
        for work in list(self._works.values()):
            ended_at = work.state.ended_at or (work.job.created_at if work.is_complete else None)
            if ended_at is not None and now() - ended_at > self._settings.retention_s:
                await self._remove(work)
        if self._failure is not None and not self._num_running:  # a segment that waits to be kept tries by itself
            self._failure = None
        if time.monotonic() - self._swept_s > _SWEEP_S:
            self._swept_s = time.monotonic()
            await asyncio.to_thread(self._store().sweep, time.time() - _ABANDONED_S)

    async def _remove(self, work: Work) -> None:
        await _cancel_tasks(work)
        await asyncio.to_thread(self._store().forget, work.job.id)
        self._works.pop(work.job.id, None)
        removing = asyncio.create_task(asyncio.to_thread(self._store().remove, work.job.id))
        await asyncio.wait((removing,), timeout=_REMOVAL_S)

    def _store(self) -> JobStore:
        return JobStore(self._offer.voices.files())


def _works_of(store: JobStore) -> list[Work]:
    """Blocks."""
    works = []
    for job_id in store.jobs():
        try:
            job, state = store.job(job_id), store.state(job_id)
        except Damaged as error:
            logger.error("a job is left out: %s", error)
            continue
        if job is not None:
            stored = list(store.made(job_id))
            made = {segment.id: segment for segment, _ in stored}
            works.append(Work(job, state, made=made, num_bytes=sum(size for _, size in stored)))
    return works


async def _cancel_tasks(work: Work) -> None:
    """Cancel the segments that run, and a call of its webhook."""
    tasks = [*work.running.values(), *filter(None, (work.webhook_task,))]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _sees(visitor: Visitor, work: Work) -> bool:
    return visitor.sees_all or work.job.owner == visitor.name


def _age(work: Work) -> tuple[int, str]:
    return work.job.created_at, work.job.id
