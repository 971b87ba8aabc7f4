"""The open loop: every request leaves at its planned time, whatever became of the ones before it."""

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp

from loadtest import corpus
from loadtest.arrivals import Arrivals, Phase, PlacedPhase, place, plan_requests
from loadtest.clients import AudioFormat, Recording, Target, Transport, open_session, speak
from loadtest.lengths import SpeechLengths
from loadtest.metrics import Limits
from loadtest.replicas import ReplicaWatch
from loadtest.traces import Clock, Failure, RunFolder, ScheduledRequest, Trace

RECENT = 200  # answers in the running percentiles

# Event loops wake up to so much late.
_EARLY_S = 0.002


class WarmupFailedError(Exception):
    """A warm-up request failed, so the run did not start."""


@dataclass(frozen=True, slots=True)
class Settings:
    """One run, settled: the same settings make the same requests at the same times."""

    url: str
    phases: tuple[Phase, ...]
    arrivals: Arrivals = Arrivals.POISSON
    seed: int = 0
    audio_format: AudioFormat = AudioFormat.PCM
    transport: Transport = Transport.HTTP
    options: Mapping[str, object] = field(default_factory=dict)  # fields of every body
    headers: Mapping[str, str] = field(default_factory=dict)
    lengths: SpeechLengths | None = None
    warmup: int = 0  # requests before the run
    timeout_s: float = 120.0
    limits: Limits = field(default_factory=Limits)
    status_url: str | None = None  # of Ray Serve, for replica counts
    processes: int = 1  # that send the requests
    one_sentence: bool = False  # texts of one sentence only
    metrics_url: str | None = None  # of Talkray, for the same where Serve cannot be asked

    @property
    def target(self) -> Target:
        """Where the requests go."""
        return Target(self.url, self.audio_format, self.options, self.timeout_s, self.transport, self.headers)

    @property
    def texts(self) -> Sequence[str]:
        """What may be said."""
        return corpus.ONE_SENTENCE if self.one_sentence else corpus.SENTENCES

    @property
    def placed(self) -> list[PlacedPhase]:
        """The phases with their beginnings."""
        return place(self.phases)

    @property
    def duration_s(self) -> float:
        """Of the schedule; answers may take longer."""
        return sum(phase.duration_s for phase in self.phases)

    def schedule(self) -> list[ScheduledRequest]:
        """The requests, in the order of their planned times."""
        return plan_requests(self.arrivals, self.phases, seed=self.seed, lengths=self.lengths, texts=self.texts)


@dataclass(slots=True)
class Progress:
    """Where a run stands."""

    planned: int
    duration_s: float = 0.0  # of the schedule
    clock: Clock | None = None  # None: the run proper has not begun
    sent: int = 0
    finished: Counter[Failure | None] = field(default_factory=Counter)  # None: succeeded
    recent_ttfb_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    max_lag_s: float = 0.0

    @property
    def running(self) -> int:
        """Requests under way."""
        return self.sent - self.finished.total()

    @property
    def failed(self) -> int:
        """Requests that failed, neither refused nor interrupted."""
        others = (None, Failure.REFUSED, Failure.INTERRUPTED)
        return self.finished.total() - sum(self.finished[outcome] for outcome in others)

    @property
    def elapsed_s(self) -> float:
        """Since the run proper began."""
        return self.clock.now_s() if self.clock else 0.0

    def send(self, lag_s: float) -> None:
        """Count one request that leaves now, so late."""
        self.sent += 1
        self.max_lag_s = max(self.max_lag_s, lag_s)

    def finish(self, trace: Trace) -> None:
        """Count one finished request."""
        self.finished[trace.failure] += 1
        if trace.failure is None and trace.first_byte_s is not None:
            self.recent_ttfb_s.append(trace.first_byte_s - trace.planned_s)


async def at_once() -> Clock:
    """Begin now."""
    return Clock.started()


@contextlib.asynccontextmanager
async def watching(watch: ReplicaWatch | None, clock: Clock) -> AsyncIterator[None]:
    """Replicas are watched, where they can be, while the context lasts."""
    if watch is None:
        yield
        return
    task = asyncio.create_task(watch.watch(clock))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


class Runner:
    """One run against one server. `traces` and `progress` are good to read at any time, and after an interrupt."""

    def __init__(
        self,
        target: Target,
        schedule: Sequence[ScheduledRequest],
        *,
        folder: RunFolder,
        watch: ReplicaWatch | None = None,
        duration_s: float = 0.0,
        begin: Callable[[], Awaitable[Clock]] = at_once,
    ) -> None:
        """`begin` is awaited between warm-up and schedule; it returns the clock of the planned times."""
        self.target = target
        self.schedule = schedule
        self.folder = folder
        self.watch = watch
        self._begin = begin
        self.traces: list[Trace] = []
        self.progress = Progress(planned=len(schedule), duration_s=duration_s)
        self._load: asyncio.Task[None] | None = None

    async def run(self, warmup: Sequence[ScheduledRequest] = ()) -> bool:
        """Speak the `warmup` requests one after the other, then the schedule. True unless it was interrupted."""
        async with open_session() as session:
            self._load = asyncio.create_task(self._drive(session, warmup))
            await asyncio.wait([self._load])
        if self._load.cancelled():
            return False
        self._load.result()
        return True

    def interrupt(self) -> None:
        """Send nothing more and drop what is under way; each dropped request is recorded as interrupted."""
        if self._load is not None:
            self._load.cancel()

    async def _drive(self, session: aiohttp.ClientSession, warmup: Sequence[ScheduledRequest]) -> None:
        await self._warm_up(session, warmup)
        clock = self.progress.clock = await self._begin()
        async with watching(self.watch, clock), asyncio.TaskGroup() as requests:
            for request in self.schedule:
                await until(request.planned_s, clock)
                requests.create_task(self._measure(session, request, clock))
            await asyncio.sleep(self.progress.duration_s - clock.now_s())  # replicas are watched to the end

    async def _measure(self, session: aiohttp.ClientSession, request: ScheduledRequest, clock: Clock) -> None:
        recording = Recording(request, clock)
        self.progress.send(recording.sent_s - request.planned_s)
        try:
            await speak(session, self.target, recording=recording)
        except asyncio.CancelledError:
            recording.fail(Failure.INTERRUPTED, "the load test was interrupted")
            raise
        finally:
            trace = recording.trace()
            self.folder.append_trace(trace)
            self.traces.append(trace)
            self.progress.finish(trace)

    async def _warm_up(self, session: aiohttp.ClientSession, requests: Sequence[ScheduledRequest]) -> None:
        clock = Clock.started()
        for request in requests:
            recording = Recording(request, clock)
            await speak(session, self.target, recording=recording)
            trace = recording.trace()
            self.folder.append_trace(trace, "warmup.jsonl")
            if trace.failure:
                raise WarmupFailedError(f"Warm-up request {request.index + 1} failed ({trace.cause}): {trace.error}")


async def until(at_s: float, clock: Clock) -> None:
    """Sleeps, the last moment of it by looking at the clock."""
    await asyncio.sleep(at_s - clock.now_s() - _EARLY_S)
    while clock.now_s() < at_s:  # noqa: ASYNC110, an event would come late as well
        await asyncio.sleep(0)
