"""Open-loop runner: send every request at its planned time, regardless of earlier requests."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import aiohttp

from loadtest.arrivals import ScheduledRequest
from loadtest.clients import open_session, speak
from loadtest.recording import Recording
from loadtest.replicas import watch
from loadtest.settings import Settings
from loadtest.traces import Clock, Failure, LoadTestError, Trace, TraceFolder

_EARLY_S = 0.002  # the most by which an event loop's timers are late
_WARMUP_TRIES = 5  # attempts per request, as long as the server returns a retry time


class WarmupFailedError(LoadTestError):
    """Raised if a warm-up request fails. The run then does not start."""


class Runner:
    """One run against one server. Its attributes are valid at any time, even after an interrupt."""

    def __init__(
        self,
        settings: Settings,
        schedule: Sequence[ScheduledRequest],
        *,
        folder: TraceFolder,
        begin: Callable[[], Awaitable[Clock]] | None = None,
    ) -> None:
        """Prepare a run. `begin` returns the clock after the warm-up. By default, it starts immediately."""
        self.settings = settings
        self.schedule = schedule
        self.folder = folder
        self._begin = begin
        self.traces: list[Trace] = []  # of finished requests
        self.sent = 0
        self.max_lag_s = 0.0
        self.clock: Clock | None = None  # None before the measurement starts
        self._load: asyncio.Task[None] | None = None

    async def run(self, warmup: Sequence[ScheduledRequest] = ()) -> bool:
        """Send the warm-up requests sequentially, then the schedule. Return False if the run was interrupted."""
        async with open_session() as session:
            self._load = asyncio.create_task(self._drive(session, warmup))
            await asyncio.wait([self._load])
        if self._load.cancelled():
            return False
        self._load.result()
        return True

    def interrupt(self) -> None:
        """Stop sending, drop the requests in flight, and record them as interrupted."""
        if self._load is not None:
            self._load.cancel()

    def note(self, event: float | Trace) -> None:
        """Count an event: the lateness of a sent request in seconds, or a finished request."""
        if isinstance(event, Trace):
            self.traces.append(event)
        else:
            self.sent += 1
            self.max_lag_s = max(self.max_lag_s, event)

    @contextlib.asynccontextmanager
    async def watching(self, clock: Clock) -> AsyncIterator[None]:
        """Record replica counts within the context, if a URL is configured."""
        url = self.settings.replicas_url
        task = asyncio.create_task(watch(url, clock, folder=self.folder)) if url else None
        try:
            yield
        finally:
            if task is not None:
                task.cancel()
                await asyncio.wait([task])

    async def _drive(self, session: aiohttp.ClientSession, warmup: Sequence[ScheduledRequest]) -> None:
        await self._warm_up(session, warmup)
        clock = self.clock = await self._begin() if self._begin else Clock.started()
        async with self.watching(clock), asyncio.TaskGroup() as requests:
            for request in self.schedule:
                await until(request.planned_s, clock)
                requests.create_task(self._measure(session, request, clock))
            await asyncio.sleep(self.settings.duration_s - clock.now_s())  # record replica counts until the planned end

    async def _measure(self, session: aiohttp.ClientSession, request: ScheduledRequest, clock: Clock) -> None:
        recording = Recording(request, clock)
        self.note(recording.trace.sent_s - request.planned_s)
        try:
            await speak(session, self.settings, recording=recording)
        except asyncio.CancelledError:
            recording.fail(Failure.INTERRUPTED, "the load test was interrupted")
            raise
        finally:
            trace = recording.finish()
            self.folder.append_trace(trace)
            self.note(trace)

    async def _warm_up(self, session: aiohttp.ClientSession, requests: Sequence[ScheduledRequest]) -> None:
        """Send warm-up requests. If the server is still busy with an earlier run, retry when it advises."""
        clock = Clock.started()
        for request in requests:
            for attempt in range(_WARMUP_TRIES):
                recording = Recording(request, clock)
                await speak(session, self.settings, recording=recording)
                trace = recording.finish()
                self.folder.append_trace(trace, "warmup.jsonl")
                if not trace.failure:
                    break
                if trace.retry_after_s is None or attempt + 1 == _WARMUP_TRIES:
                    raise WarmupFailedError(
                        f"Warm-up request {request.index + 1} failed ({trace.cause}): {trace.error}"
                    )
                await asyncio.sleep(trace.retry_after_s)


async def until(at_s: float, clock: Clock) -> None:
    """Sleep until `at_s`. The last milliseconds are polled for precision."""
    await asyncio.sleep(at_s - clock.now_s() - _EARLY_S)
    while clock.now_s() < at_s:  # noqa: ASYNC110, an event would also be late
        await asyncio.sleep(0)
