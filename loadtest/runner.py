"""The open loop: every request leaves at its planned time, whatever became of the ones before it."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp
import numpy as np
from rich.console import Console
from rich.live import Live
from rich.table import Table

from loadtest.arrivals import Arrivals, plan_requests
from loadtest.clients import AudioFormat, Recording, Target, open_session, speak
from loadtest.traces import Clock, Failure, RunFolder, ScheduledRequest, Trace

RECENT = 200  # answers in the running percentiles
LIVE_PERIOD_S = 0.5
PLAIN_PERIOD_S = 2.0


class WarmupFailedError(Exception):
    """A warm-up request failed, so the run did not start."""


@dataclass(frozen=True, slots=True)
class Settings:
    """One run, settled: the same settings make the same requests at the same times."""

    url: str
    rate: float  # requests per second
    duration_s: float  # of the schedule; answers may take longer
    arrivals: Arrivals = Arrivals.POISSON
    seed: int = 0
    audio_format: AudioFormat = AudioFormat.PCM
    options: Mapping[str, object] = field(default_factory=dict)  # fields of every body
    warmup: int = 0  # requests before the run
    timeout_s: float = 120.0

    @property
    def target(self) -> Target:
        """Where the requests go."""
        return Target(self.url, self.audio_format, self.options, self.timeout_s)

    def schedule(self) -> list[ScheduledRequest]:
        """The requests, in the order of their planned times."""
        return plan_requests(self.arrivals, self.rate, duration_s=self.duration_s, seed=self.seed)


@dataclass(slots=True)
class Progress:
    """Where a run stands."""

    planned: int
    sent: int = 0
    finished: Counter[Failure | None] = field(default_factory=Counter)  # None: succeeded
    recent_ttfa_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    @property
    def running(self) -> int:
        """Requests under way."""
        return self.sent - self.finished.total()

    @property
    def failed(self) -> int:
        """Requests that failed, neither refused nor interrupted."""
        others = (None, Failure.REFUSED, Failure.INTERRUPTED)
        return self.finished.total() - sum(self.finished[outcome] for outcome in others)

    def finish(self, trace: Trace) -> None:
        """Count one finished request."""
        self.finished[trace.failure] += 1
        if trace.failure is None and trace.first_audible_s is not None:
            self.recent_ttfa_s.append(trace.first_audible_s - trace.planned_s)

    def cells(self) -> dict[str, str]:
        """The numbers to show, by their title."""
        ttfa = np.percentile(self.recent_ttfa_s, (50, 95)) * 1000 if self.recent_ttfa_s else None
        return {
            "sent": f"{self.sent}/{self.planned}",
            "running": str(self.running),
            "done": str(self.finished[None]),
            "refused": str(self.finished[Failure.REFUSED]),
            "failed": str(self.failed),
            "TTFA p50": "-" if ttfa is None else f"{ttfa[0]:.0f} ms",
            "TTFA p95": "-" if ttfa is None else f"{ttfa[1]:.0f} ms",
        }


class Runner:
    """One run against one server. `traces` and `progress` are good to read at any time, and after an interrupt."""

    def __init__(self, target: Target, schedule: Sequence[ScheduledRequest], *, folder: RunFolder) -> None:
        self.target = target
        self.schedule = schedule
        self.folder = folder
        self.traces: list[Trace] = []
        self.progress = Progress(planned=len(schedule))
        self._load: asyncio.Task[None] | None = None

    async def run(self, warmup: Sequence[str] = ()) -> bool:
        """Speak the `warmup` texts one after the other, then the schedule. True unless it was interrupted."""
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

    async def _drive(self, session: aiohttp.ClientSession, warmup: Sequence[str]) -> None:
        await self._warm_up(session, warmup)
        clock = Clock.started()
        async with asyncio.TaskGroup() as requests:
            for request in self.schedule:
                await asyncio.sleep(request.planned_s - clock.now_s())
                requests.create_task(self._measure(session, request, clock))

    async def _measure(self, session: aiohttp.ClientSession, request: ScheduledRequest, clock: Clock) -> None:
        recording = Recording(request, clock)
        self.progress.sent += 1
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

    async def _warm_up(self, session: aiohttp.ClientSession, texts: Sequence[str]) -> None:
        clock = Clock.started()
        for index, text in enumerate(texts):
            recording = Recording(ScheduledRequest(index, clock.now_s(), text), clock)
            await speak(session, self.target, recording=recording)
            trace = recording.trace()
            self.folder.append_trace(trace, "warmup.jsonl")
            if trace.failure:
                raise WarmupFailedError(f"Warm-up request {index + 1} failed ({trace.cause}): {trace.error}")


async def show_progress(progress: Progress, console: Console) -> None:
    """Show `progress` until cancelled: a live table on a terminal, else a line every PLAIN_PERIOD_S."""
    if not console.is_terminal:
        await _repeat(lambda: console.print(progress_line(progress), highlight=False, soft_wrap=True), PLAIN_PERIOD_S)
        return
    with Live(progress_table(progress), console=console, auto_refresh=False, transient=True) as live:
        await _repeat(lambda: live.update(progress_table(progress), refresh=True), LIVE_PERIOD_S)


async def _repeat(show: Callable[[], None], period_s: float) -> None:
    while True:
        show()
        await asyncio.sleep(period_s)


def progress_line(progress: Progress) -> str:
    """The numbers in one line."""
    return "  ".join(f"{title} {value}" for title, value in progress.cells().items())


def progress_table(progress: Progress) -> Table:
    """The numbers as a table of one row."""
    table = Table()
    for title in progress.cells():
        table.add_column(title, justify="right", min_width=8)
    table.add_row(*progress.cells().values())
    return table
