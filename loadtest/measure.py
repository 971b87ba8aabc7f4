"""One measured run from the look at the server to the summary on disk, and what it is read back as."""

import asyncio
import os
import platform
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import aiohttp

from loadtest import corpus
from loadtest.arrivals import Phase, PlacedPhase, place
from loadtest.clients import check_reachable, open_session
from loadtest.crew import Crew
from loadtest.metrics import Limits, Summary, summarize
from loadtest.replicas import NoReplicaCountsError, ReplicaWatch, Sample, parse_metrics, parse_status, read_samples
from loadtest.runner import Progress, Runner, Settings
from loadtest.timeline import time_to_recover
from loadtest.traces import NoRunError, RunFolder, ScheduledRequest, Trace

RECOVERY_WINDOW_S = 5.0  # at least
RECOVERY_REQUESTS = 20  # in a window: with fewer a single late one would make it bad
HIDDEN = "..."

Show = Callable[[Progress], None]


class UnreachableError(Exception):
    """Nothing answers at the URL."""


class NothingPlannedError(Exception):
    """Not one request falls into the run."""


@dataclass(frozen=True, slots=True)
class PhaseResult:
    """One phase of a run."""

    placed: PlacedPhase
    summary: Summary
    recovered_after_s: float | None  # until its windows were good; None: they still were not at its end

    @property
    def name(self) -> str:
        """What the phase is called."""
        return self.placed.phase.name


@dataclass(frozen=True, slots=True)
class Result:
    """A whole run: its plan, its traces, its replica counts. Every statistic follows from these."""

    title: str
    about: dict[str, Any]  # run.json
    phases: tuple[PlacedPhase, ...]
    limits: Limits
    traces: list[Trace]
    samples: list[Sample]
    planned: int

    @property
    def measured(self) -> list[Trace]:
        """Without what was due in phases in which the server settles in."""
        counted = [placed for placed in self.phases if placed.phase.measured]
        return [trace for trace in self.traces if any(placed.holds(trace.planned_s) for placed in counted)]

    @property
    def summary(self) -> Summary:
        """Of everything that is measured."""
        duration_s = sum(placed.phase.duration_s for placed in self.phases if placed.phase.measured)
        excluded = len(self.traces) - len(self.measured)
        return summarize(self.measured, planned=self.planned - excluded, duration_s=duration_s, limits=self.limits)

    @property
    def phase_results(self) -> list[PhaseResult]:
        """Each measured phase on its own."""
        return [self._phase_result(placed) for placed in self.phases if placed.phase.measured]

    @property
    def end_s(self) -> float:
        """When the schedule ends."""
        return self.phases[-1].end_s if self.phases else 0.0

    def _phase_result(self, placed: PlacedPhase) -> PhaseResult:
        inside = [trace for trace in self.traces if placed.holds(trace.planned_s)]
        summary = summarize(inside, planned=len(inside), duration_s=placed.phase.duration_s, limits=self.limits)
        window_s = max(RECOVERY_WINDOW_S, RECOVERY_REQUESTS / placed.phase.rate)
        recovered = time_to_recover(inside, placed.start_s, end_s=placed.end_s, window_s=window_s, limits=self.limits)
        return PhaseResult(placed, summary, recovered)


async def measure(settings: Settings, folder: RunFolder, *, show: Show) -> tuple[Result, bool]:
    """Plan, write the plan, run it, write the summary. False with the result if Ctrl-C ended it early.

    `show` gets the progress of the run before it starts, and may look at it at any time.
    Raises NothingPlannedError, RunExistsError, UnreachableError, WarmupFailedError.
    """
    schedule = settings.schedule()
    if not schedule:
        raise NothingPlannedError("not one request falls into the run: raise --rate or the duration, or change --seed")
    folder.check_unused()
    watch = replica_watch(settings, folder)
    await check_server(settings, watch)
    folder.write_schedule(schedule)
    about = describe(settings)
    folder.write_json("run.json", about)
    runner = _runner(settings, schedule, folder=folder, watch=watch)
    show(runner.progress)
    whole = await run_until_interrupted(runner, warmup_requests(settings))
    result = Result(
        title=folder.path.name,
        about=about,
        phases=tuple(settings.placed),
        limits=settings.limits,
        traces=sorted(runner.traces, key=lambda trace: trace.planned_s),
        samples=read_samples(folder),
        planned=len(schedule),
    )
    folder.write_json("summary.json", summary_record(result))
    return result, whole


def _runner(
    settings: Settings, schedule: Sequence[ScheduledRequest], *, folder: RunFolder, watch: ReplicaWatch | None
) -> Runner | Crew:
    target, duration_s = settings.target, settings.duration_s
    if settings.processes == 1:
        return Runner(target, schedule, folder=folder, watch=watch, duration_s=duration_s)
    return Crew(target, schedule, folder=folder, processes=settings.processes, watch=watch, duration_s=duration_s)


async def run_until_interrupted(runner: Runner | Crew, warmup: Sequence[ScheduledRequest]) -> bool:
    """Run it all; Ctrl-C ends the load and keeps what was measured."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, runner.interrupt)
    try:
        return await runner.run(warmup=warmup)
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def warmup_requests(settings: Settings) -> list[ScheduledRequest]:
    """Requests like those of the run, from a seed of their own."""
    seed = settings.seed + 1
    frames = settings.lengths.draw(settings.warmup, seed=seed) if settings.lengths else [None] * settings.warmup
    texts = corpus.choose(settings.warmup, seed=seed, texts=settings.texts)
    return [ScheduledRequest(index, 0.0, *each) for index, each in enumerate(zip(texts, frames, strict=True))]


def replica_watch(settings: Settings, folder: RunFolder) -> ReplicaWatch | None:
    """Who reads the replica counts, from Serve rather than from the metrics, which are older."""
    if settings.status_url:
        return ReplicaWatch(settings.status_url, folder, parse=parse_status)
    if settings.metrics_url:
        return ReplicaWatch(settings.metrics_url, folder, parse=parse_metrics)
    return None


async def check_server(settings: Settings, watch: ReplicaWatch | None) -> None:
    """Raises UnreachableError, with advice, unless something answers, and the one of the replica counts with counts."""
    url, option = settings.url, "--url"
    try:
        async with open_session() as session:
            await check_reachable(session, settings.target)
        if watch is not None:
            url, option = watch.url, "--serve-status-url" if settings.status_url else "--metrics-url"
            await watch.check()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise UnreachableError(
            f"Nothing answers at {url} ({error or type(error).__name__}).\n"
            f"Start the server and wait until it is ready, or correct {option}. Nothing was sent and nothing written."
        ) from error
    except NoReplicaCountsError as error:
        raise UnreachableError(
            f"{url} answers, but with {error}.\n"
            f"Give --serve-status-url the dashboard's http://HOST:8265/api/serve/applications/ or --metrics-url "
            f"Talkray's http://HOST:8000/metrics, or leave both out."
        ) from error


def describe(settings: Settings) -> dict[str, Any]:
    """What run.json says: enough to run the same again."""
    try:
        own_version = version("talkray")
    except PackageNotFoundError:
        own_version = "not installed"
    return {
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "url": settings.url,
        "command": without_secrets(shlex.join(["python", "-m", "loadtest", *sys.argv[1:]]), settings),
        "settings": asdict(replace(settings, headers=dict.fromkeys(settings.headers, HIDDEN))),
        "versions": {
            "talkray": own_version,
            "python": platform.python_version(),
            "aiohttp": version("aiohttp"),
            "numpy": version("numpy"),
        },
        "machine": {"platform": platform.platform(), "cpus": os.cpu_count()},
    }


def without_secrets(text: str, settings: Settings) -> str:
    """The text without the values of headers: they may be keys, and results are passed around."""
    for value in settings.headers.values():
        text = text.replace(value, HIDDEN)
    return text


def summary_record(result: Result) -> dict[str, object]:
    """What summary.json says: the whole run, then phase by phase."""
    phases = [
        {
            "name": phase.name,
            "rate": phase.placed.phase.rate,
            "start_s": phase.placed.start_s,
            "end_s": phase.placed.end_s,
            "recovered_after_s": phase.recovered_after_s,
            **flat(phase.summary),
        }
        for phase in result.phase_results
    ]
    return flat(result.summary) | {"limits": asdict(result.limits), "phases": phases}


def flat(summary: Summary) -> dict[str, Any]:
    """A summary with what follows from it."""
    return asdict(summary) | {"good_share": summary.good_share, "client_was_slow": summary.client_was_slow}


def read_result(folder: RunFolder, *, limits: Limits | None = None) -> Result:
    """The run in a folder, judged by its own limits or by others. Raises NoRunError."""
    about = folder.read_json("run.json")
    try:
        settings = about["settings"]
        phases = tuple(place([Phase(**phase) for phase in settings["phases"]]))
        own_limits = Limits(**settings["limits"])
    except (KeyError, TypeError) as error:
        raise NoRunError(f"{folder.path / 'run.json'} was written by another version: {error!r}") from error
    return Result(
        title=folder.path.name,
        about=about,
        phases=phases,
        limits=limits or own_limits,
        traces=folder.read_traces(),
        samples=read_samples(folder),
        planned=len(folder.read_lines("schedule.jsonl")),
    )
