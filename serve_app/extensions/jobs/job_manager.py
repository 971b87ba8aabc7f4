"""Accept all jobs that a server receives, synthesize their segments and report progress, in a single process.

The store is authoritative. If the process dies, its successor repeats the running segments. During an update, two
processes may use the same store, and each picks up the other's changes.
"""

import asyncio
import hashlib
import json
import logging
import math
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count

from deployments.errors import (
    Conflict,
    EngineError,
    InvalidRequest,
    Moved,
    NotFound,
    NotReady,
    Overloaded,
    ReplicaLost,
    Starting,
)
from serve_app.api.access.callers import VISITOR, Visitor
from serve_app.api.parsing.client_input import HALF_REPLACED, parse_object
from serve_app.api.resolve.ignored_fields import Reasons
from serve_app.api.resolve.resolver import Resolver
from serve_app.api.responses.listing import limit_of, run_in_thread
from serve_app.extensions.jobs.job_store import JobStore
from serve_app.extensions.jobs.known_jobs import KnownJobs, age, cancel_tasks, keys_of, sees
from serve_app.extensions.jobs.planning import Planned, plan_into
from serve_app.extensions.jobs.segment_maker import JobStopped, SegmentMaker
from serve_app.extensions.jobs.settings import JobSettings
from serve_app.extensions.jobs.stored_job import JOB_ID, LONGEST_LINE, JobState, MadeSegment, SegmentId, StoredJob
from serve_app.extensions.jobs.webhooks import WEBHOOK, Webhooks
from serve_app.extensions.jobs.work import Json, Track, Work
from serve_app.extensions.voices.clocks import SteadyClock
from serve_app.extensions.voices.library import Voices
from serve_app.extensions.voices.listing import page_of
from serve_app.extensions.voices.stored_voice import now
from serve_app.extensions.voices.voice_store import Damaged, StoreFailed

logger = logging.getLogger(__name__)

_FIRST_SEGMENTS, _MOST_SEGMENTS = 2.0, 32.0  # number of parallel segments: initial and maximum
_RETRY_S, _LONGEST_RETRY_S = 0.25, 15.0  # delay after a refusal, and maximum delay before a write is retried
_LOOK_S = 1.0  # between checks of whether a paused job can continue
_FOLLOW_S = 5.0  # between reads of other processes' changes to the store
_TOGETHER_S = 1.0  # when a replica is lost, all its streams end within this time
_NODE_LOST_S = 30.0  # when a node is lost, all its replicas end within this time
_REMOVAL_S = 2.0  # maximum wait for a deleted job's files to be gone; a bucket can take longer
_EXPIRE_S, _SWEEP_ROUNDS = 60.0, 10  # between checks for old jobs; every tenth check sweeps files without jobs
_ABANDONED_S = 180.0  # minimum age of files that have no job; planning a job takes less time
_MOST_FAILURES = 3  # maximum per segment
_MOST_CALLS, _CALL_AGAIN_S = 8, 2.0  # per webhook; each delay is four times the previous one, six hours in total
_MOST_VALUES = 1 << 20  # JSON values in a body; the parser also counts commas in texts
_MOST_LISTED = 1000  # jobs or parts on one page
_PROBLEMS, _PROBLEMS_LISTED = 1000, 10  # maximum per job: shown alone, and in a list


class JobManager:
    """Owner of all jobs, in the only process that synthesizes them. Call all methods from the same event loop."""

    def __init__(
        self,
        resolver: Resolver,
        voices: Voices,
        maker: SegmentMaker,
        *,
        hindrance: Callable[[str], str | None] = lambda model: None,
        dead_nodes: Callable[[], int] = lambda: 0,
    ) -> None:
        """`hindrance` takes a model name and returns why jobs cannot use the model at the moment, or None.
        `dead_nodes` returns the number of lost nodes.
        """
        self._resolver, self._voices, self._maker = resolver, voices, maker
        self._settings = settings = resolver.settings.of(JobSettings)
        self._hindrance, self._dead_nodes = hindrance, dead_nodes
        self._webhooks, self._keys, self._limit = Webhooks(settings), keys_of(resolver), _FIRST_SEGMENTS
        self._failure: str | None = None  # why the store is unavailable
        self._losses = deque[tuple[float, SegmentId]](maxlen=1000)  # when each segment lost its replica
        self._num_dead_nodes, self._node_lost_s = 0, float("-inf")
        self._changed, self._creating = asyncio.Event(), asyncio.Lock()
        self._jobs = KnownJobs(settings, self._store, self._fail, changed=self._changed.set)
        self._works = self._jobs.works
        self.is_stopping = False  # if True, the manager rejects changes

    async def create(self, visitor: Visitor, body: bytes, key: str | None) -> tuple[Json, Reasons]:
        """Create a job. Return the job and the fields that have no effect. If `key` repeats, return the earlier job.

        Raises InvalidRequest, Conflict, NotReady, StoreFailed.
        """
        self._check_open()
        VISITOR.set(visitor)
        owner = visitor.name or ""
        fields, fingerprint, halves = await run_in_thread(_read, body)
        await self._jobs.follow(0.0)
        if (known := self._jobs.known(owner, key, fingerprint)) is not None:
            return self._as_json(known), {}
        self._jobs.check_room(owner, 0)
        webhook = self._webhooks.checked(fields.pop(WEBHOOK, None))
        job_id, is_kept = f"job_{secrets.token_hex(12)}", False
        try:
            made = Planned(self._store(), job_id, partial(self._jobs.check_room, owner))
            await plan_into(made, self._resolver, fields)
            job = StoredJob(
                id=job_id,
                owner=owner,
                created_at=now(),
                key=key,
                fingerprint=fingerprint,
                models=made.models,
                num_segments=tuple(made.num_segments),
                pieces=tuple(made.pieces),
                plan_bytes=made.num_bytes,
                webhook=webhook,
                deterministic=made.deterministic,
            )
            async with self._creating:
                await self._jobs.follow(0.0)
                if (known := self._jobs.known(owner, key, fingerprint)) is not None:
                    return self._as_json(known), {}
                self._jobs.check_room(owner, made.num_bytes)
                self._check_open()
                is_kept = True  # even if the client disconnects now, because the thread continues
                await asyncio.to_thread(self._store().create, job)
                self._works.setdefault(job_id, Work(job, JobState(), made={}, num_bytes=job.plan_bytes))
        except StoreFailed:
            is_kept = False
            raise
        finally:
            if not is_kept:
                await asyncio.shield(asyncio.to_thread(self._store().discard, job_id))
        self._changed.set()
        return self._as_json(self._works[job_id]), made.ignored | halves

    async def all_of(self, visitor: Visitor, after: str, limit: str) -> Json:
        """Return a page of jobs, newest first. Raises InvalidRequest if `after` or `limit` is wrong."""
        await self._jobs.follow(_LOOK_S)
        visible = sorted((work for work in self._works.values() if sees(visitor, work)), key=age, reverse=True)
        held = self._jobs.held()

        def entry(work: Work) -> Json:
            return work.as_json(self._hindered(work, held), most_problems=_PROBLEMS_LISTED)

        return page_of(visible, entry, after, limit, most=_MOST_LISTED)

    async def parts(self, visitor: Visitor, job_id: str, after: str, limit: str) -> Json:
        """Return a page with the progress of each part of a job. Raises NotFound, InvalidRequest, Damaged."""
        work = await self._find(visitor, job_id)
        total = len(work.job.num_segments)
        if after and not work.has_part(after):
            message = f"after: part {after[:80]!r} is unknown. {job_id} has parts 0 to {total - 1}."
            raise InvalidRequest(message, "after")
        start = int(after) + 1 if after else 0
        end = min(total, start + limit_of(limit or str(_MOST_LISTED), most=_MOST_LISTED))
        parts = self._store().parts(work.job, start, end)
        listed = await run_in_thread(lambda: [work.part_as_json(*each) for each in parts])
        return {"object": "list", "data": listed, "has_more": end < total}

    async def ask(self, visitor: Visitor, action: str, job_id: str) -> Json:
        """Get, cancel, resume or delete a job, as named by `action`, and return the job. Raises NotFound, StoreFailed,
        and NotReady if `action` is a change while another process takes over.
        """
        if action != "get":
            self._check_open()
        if action == "delete" and JOB_ID.fullmatch(job_id):  # completes an interrupted deletion
            await asyncio.to_thread(self._store().remove, job_id)
        work = await self._find(visitor, job_id)
        if action == "cancel" and not work.is_complete:
            await self._jobs.change(work, JobState(cancelled=True, ended_at=now()))
        elif action == "resume" and not work.is_complete:
            await self._jobs.change(work, JobState())
        elif action == "delete":
            await self._remove(work)
            return {"id": job_id, "object": "audio.job.deleted", "deleted": True}
        return self._as_json(work)

    async def track(self, visitor: Visitor, job_id: str, part: str | None) -> Track:
        """Return the track of a finished part, or of the complete job if `part` is None. Raises NotFound, Conflict."""
        work = await self._find(visitor, job_id)
        names = await run_in_thread(work.names, part)
        models, number = [*work.job.models], int(part or 0)
        if part is not None and len(models) > 1:
            models = await run_in_thread(
                lambda: [each for *_, each in self._store().parts(work.job, number, number + 1)]
            )
        infos = [work.job.info(model) for model in models]
        if len({info.sample_rate for info in infos}) > 1:
            raise Conflict("The models have different sample rates. Get each part instead.", None, "mixed_sample_rates")
        return Track(job_id, infos[0].sample_rate, frame_samples=infos[0].frame_samples, names=names)

    async def run(self) -> None:
        """Synthesize segments until cancelled. The next process repeats the segments that were running."""
        self._num_dead_nodes = await asyncio.to_thread(self._dead_nodes)
        for work in self._works.values():
            work.queue_all()  # includes segments that an earlier call left unfinished
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._expire())
                while True:
                    await self._take_turn()
        finally:
            await asyncio.gather(*map(cancel_tasks, self._works.values()), return_exceptions=True)

    async def _take_turn(self) -> None:
        """Start as many segments as the current limit allows. Then wait for a change."""
        try:
            await self._jobs.follow(_FOLLOW_S)
        except StoreFailed as error:
            self._fail(error)
        else:
            if self._failure is not None and not self._num_running:  # a running segment retries the store
                self._failure = None
        self._changed.clear()
        for ended in self._works.values():
            if ended.webhook_task is None and ended.owes_webhook and ended.next_webhook_s <= time.monotonic():
                ended.webhook_task = asyncio.create_task(self._call_webhook(ended))
        while self._num_running < int(self._limit) and (begun := self._next()) is not None:
            work, segment_id = begun
            work.todo.remove(segment_id)
            work.begin(segment_id, asyncio.create_task(self._make(work, segment_id)))
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                await self._changed.wait()

    @property
    def _num_running(self) -> int:
        return sum(len(work.running) for work in self._works.values())

    def _next(self) -> tuple[Work, SegmentId] | None:
        """Select the next segment. Pick the owner with the fewest running segments, then that owner's job with the
        fewest. Break ties by age. Retry a lost segment first, while no other segment of its model runs.
        """
        held = self._jobs.held()
        of_owners = Counter(work.job.owner for work in self._works.values() for _ in work.running)
        ready = [work for work in self._works.values() if work.todo and not work.state.ended_at]
        ready = [work for work in ready if self._hindered(work, held) is None]
        taken = {model for work in self._works.values() if work.running for model in work.job.models}
        kept = {model for work in self._works.values() if work.suspects and work.running for model in work.job.models}
        for work in ready:
            if work.suspects and not taken & work.job.models.keys():
                return work, next(iter(work.suspects))
            if work.suspects:
                kept |= work.job.models.keys()
        free = [work for work in ready if not kept & work.job.models.keys()]
        first = min(free, key=lambda work: (of_owners[work.job.owner], len(work.running), *age(work)), default=None)
        return None if first is None else (first, first.todo[0])

    async def _make(self, work: Work, segment_id: SegmentId) -> None:
        """Synthesize and store one segment. Requeue the segment if no model currently has room for it."""
        try:
            async with work.lock:  # so that only one of the segments reads the piece of the plan
                if (plan := work.plan) is None or not plan.has(segment_id.part):
                    plan = work.plan = await asyncio.to_thread(self._store().plan, work.job, segment_id.part)
            made, content = await self._maker.make(work.job, plan, segment_id)
            await self._save(work, made, content)
            self._limit = min(self._limit + 0.5, _MOST_SEGMENTS)
            work.suspects.pop(segment_id, None)
        except (Overloaded, NotReady, Moved) as error:
            self._limit = max(1.0, self._limit / 2)
            logger.info("%s: %s waits: %s", work.job.id, segment_id, error)
            await asyncio.sleep(_RETRY_S)  # the waiting segment still counts as running
            work.todo.appendleft(segment_id)
        except ReplicaLost as error:
            logger.warning("%s: %s was lost: %s", work.job.id, segment_id, error)
            lost_s = time.monotonic()
            self._losses.append((lost_s, segment_id))
            work.suspects[segment_id] = None
            await asyncio.sleep(_TOGETHER_S)  # more losses with the same cause may follow
            is_culprit = await self._is_culprit(lost_s, error)
            await self._count_failure(work, segment_id, f"the replica was lost: {error}" if is_culprit else None)
        except EngineError as error:
            await self._count_failure(work, segment_id, str(error))
        except StoreFailed as error:  # while reading the voice or the texts
            self._fail(error)
            await asyncio.sleep(_LOOK_S)
            work.todo.appendleft(segment_id)
        except Damaged as error:
            logger.error("%s: %s: %s", work.job.id, segment_id, error)
            await self._stop(work, f"{segment_id}: the text or the voice is missing or damaged in the store")
        except (JobStopped, InvalidRequest) as error:
            await self._stop(work, f"{segment_id}: {error}")
        except Exception:
            logger.exception("%s: %s failed", work.job.id, segment_id)
            await self._stop(work, f"{segment_id}: the server failed. See the log of the server")
        finally:
            work.running.pop(segment_id, None)
            self._changed.set()

    async def _is_culprit(self, lost_s: float, error: ReplicaLost) -> bool:
        """Return whether the segment could have crashed its replica. Return False if a node, other segments or live
        streams were lost at the same time.
        """
        num_dead = await asyncio.to_thread(self._dead_nodes)
        if num_dead > self._num_dead_nodes:
            self._num_dead_nodes, self._node_lost_s = num_dead, lost_s
            for work in self._works.values():  # the cluster may be late to report a lost node
                for suspect in work.suspects:
                    work.failures.pop(suspect, None)
        together = [other for other_s, other in self._losses if abs(other_s - lost_s) <= _TOGETHER_S]
        return len(together) == 1 and not error.beside and lost_s - self._node_lost_s > _NODE_LOST_S

    async def _count_failure(self, work: Work, segment_id: SegmentId, reason: str | None) -> None:
        """Queue the segment again, or stop the job after too many failures. Count only failures with a `reason`."""
        work.failures[segment_id] = work.failures.get(segment_id, 0) + (reason is not None)
        if work.failures[segment_id] >= _MOST_FAILURES:
            await self._stop(work, f"{segment_id}: {reason}")
        else:
            work.todo.appendleft(segment_id)

    async def _call_webhook(self, work: Work) -> None:
        """Notify a job's webhook that the job has ended, and store the result of the call."""
        assert work.job.webhook is not None
        before = work.state
        try:
            error = await self._webhooks.notify(work.job.webhook, work.job.owner, self._as_json(work))
            calls = before.calls + 1
            called_at = now() if error is None or calls == _MOST_CALLS else None
            if error is not None:
                logger.warning("%s: call %d of %s failed: %s", work.job.id, calls, work.job.webhook, error)
            async with work.lock:
                if work.state == before:
                    work.next_webhook_s = time.monotonic() + _CALL_AGAIN_S * 4**before.calls
                    outcome = {"calls": calls, "call_error": error and error[:LONGEST_LINE], "called_at": called_at}
                    await self._jobs.write(work, before.model_copy(update=outcome))
        finally:
            work.webhook_task = None

    async def _save(self, work: Work, made: MadeSegment, content: bytes) -> None:
        """Store a segment, and retry until the write succeeds. No segment starts while the store is unavailable."""
        delay_s = _RETRY_S
        while True:
            try:
                mark = await asyncio.to_thread(self._store().save, work.job.id, made, content)
                break
            except StoreFailed as error:
                self._fail(error)
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, _LONGEST_RETRY_S)
        self._failure = None
        if mark is None or work.job.id not in self._works:  # some process has deleted the job in the meantime
            self._jobs.forget(work.job.id)
            return
        work.add(made, len(content))
        if mark != work.mark:
            with suppress(StoreFailed):  # the next check reads the state again
                await self._jobs.adopt(work, mark)
        if work.is_complete:
            await self._jobs.end(work, JobState(ended_at=now()))

    def _fail(self, error: StoreFailed) -> None:
        """Pause all jobs. The reason that clients see contains neither paths nor bucket names."""
        problem = error.__cause__.strerror if isinstance(error.__cause__, OSError) else None
        failure = f"The job store is not available{f': {problem}' if problem else ''}. The server retries."
        if failure != self._failure:
            logger.error("jobs are paused: %s", error.__cause__ or error)
        self._failure = failure

    async def _stop(self, work: Work, reason: str) -> None:
        """Mark the job as failed, so that none of its segments start until the owner resumes it."""
        logger.error("%s failed: %s", work.job.id, reason)
        await self._jobs.end(work, JobState(failed=reason[:LONGEST_LINE], ended_at=now()))

    def _hindered(self, work: Work, held: Counter[str]) -> str | None:
        """Return why the job cannot start a segment now, or None. `held` has the number of stored bytes by owner."""
        if self._failure is not None:
            return self._failure
        owner, most = work.job.owner, self._settings.max_bytes
        if self._keys is not None and owner and not self._keys.has_name(owner):
            return f"No valid key is named {owner!r}. Create a key with this name to continue the job."
        if held[owner] >= most:
            return f"Your jobs take {held[owner]} bytes, and api.jobs.max_bytes allows {most}. Delete a job."
        return next(filter(None, map(self._hindrance, work.job.models)), None)

    def _as_json(self, work: Work) -> Json:
        return work.as_json(self._hindered(work, self._jobs.held()), most_problems=_PROBLEMS)

    def _check_open(self) -> None:
        if self.is_stopping:
            raise Starting("Another replica is taking over the jobs.")

    async def _find(self, visitor: Visitor, job_id: str) -> Work:
        if JOB_ID.fullmatch(job_id) and job_id not in self._jobs.deleted:
            try:
                await self._jobs.look(job_id)
            except StoreFailed:
                if job_id not in self._works:
                    raise
        work = self._works.get(job_id)
        if work is None or not sees(visitor, work):
            raise NotFound(f"Job {job_id[:80]!r} is unknown or belongs to another key.", "job_id", "job_not_found")
        return work

    async def _expire(self) -> None:
        """Delete jobs that ended more than `retention_s` ago, and files that an interrupted deletion left behind."""
        store, retention_s = self._store(), self._settings.retention_s
        clock = SteadyClock(shortest_s=retention_s)
        for number in count():
            time_s = clock.now()
            try:
                if number == 0:
                    await asyncio.to_thread(store.log_files_of_batches)
                if number % _SWEEP_ROUNDS == 0 and (number == 0 or time_s is not None):
                    await asyncio.to_thread(store.sweep, _ABANDONED_S)
                for work in list(self._works.values()):
                    ended_at = work.state.ended_at or (work.job.created_at if work.is_complete else math.inf)
                    is_old = (time_s or 0.0) - max(ended_at, work.state.called_at or 0) > retention_s
                    if is_old and await asyncio.to_thread(store.idle_s, work.job.id) > retention_s:
                        await self._remove(work)
            except StoreFailed as error:
                self._fail(error)
            await asyncio.sleep(min(_EXPIRE_S, retention_s))

    async def _remove(self, work: Work) -> None:
        """Stop and delete a job. If the store fails, raise StoreFailed; the job then continues."""
        self._works.pop(work.job.id, None)
        self._jobs.deleted.append(work.job.id)
        try:
            await cancel_tasks(work)
            await asyncio.to_thread(self._store().forget, work.job.id)
        except BaseException:
            self._jobs.deleted.remove(work.job.id)  # the next check reads the job again
            raise
        removing = asyncio.create_task(asyncio.to_thread(self._store().remove, work.job.id))
        await asyncio.wait((removing,), timeout=_REMOVAL_S)

    def _store(self) -> JobStore:
        return JobStore(self._voices.files())


def _read(body: bytes) -> tuple[Json, str, Reasons]:
    """Return the fields of the body, their fingerprint, and the fields that contained a lone surrogate.

    Blocks if the body is long. Raises InvalidRequest.
    """
    repaired: list[str] = []
    fields = parse_object(body, most_values=_MOST_VALUES, repaired=repaired)
    fingerprint = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    return fields, fingerprint, dict.fromkeys(repaired, HALF_REPLACED)
