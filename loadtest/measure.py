"""Run one measurement: check the server, send the requests, write the summary, and read it back."""

import asyncio
import os
import platform
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import aiohttp

from loadtest.arrivals import Phase, RequestKind, place
from loadtest.clients import open_session
from loadtest.metrics import Limits, Summary, summarize, time_to_recover
from loadtest.processes import ClientProcesses
from loadtest.replicas import NoReplicaCountsError, ReplicaSample, read_counts, read_samples
from loadtest.runner import Runner
from loadtest.settings import Settings
from loadtest.traces import LoadTestError, NoRunError, Trace, TraceFolder

RECOVERY_WINDOW_S = 5.0  # minimum length of a window
RECOVERY_REQUESTS = 20  # per window; if there were fewer, a single late request would fail the window
REACHABLE_WITHIN = aiohttp.ClientTimeout(total=10)
HIDDEN = "..."

Show = Callable[[Runner], None]


class UnreachableError(LoadTestError):
    """Raised if no server responds at the URL."""


class NothingPlannedError(LoadTestError):
    """Raised if a run would not send any requests."""

    exit_code = 2


@dataclass(frozen=True)  # no slots, because the summary is cached
class Result:
    """Plan, traces and replica counts of a run or phase, from which all statistics are derived."""

    title: str
    about: dict[str, Any]  # run.json
    phases: tuple[Phase, ...]
    limits: Limits
    traces: list[Trace]
    samples: list[ReplicaSample]
    planned: int

    @property
    def rate(self) -> float:
        """Offered requests per second, averaged over the measured phases."""
        counted = [phase for phase in self.phases if phase.measured]
        if len(counted) == 1:
            return counted[0].rate
        return sum(each.rate * each.duration_s for each in counted) / sum(each.duration_s for each in counted)

    @property
    def end_s(self) -> float:
        return self.phases[-1].end_s

    @cached_property
    def measured(self) -> list[Trace]:
        """Traces of requests that were due in measured phases."""
        counted = [phase for phase in self.phases if phase.measured]
        return [trace for trace in self.traces if any(phase.holds(trace.planned_s) for phase in counted)]

    @cached_property
    def summary(self) -> Summary:
        excluded = len(self.traces) - len(self.measured)
        return summarize(self.measured, planned=self.planned - excluded, offered_per_s=self.rate, limits=self.limits)

    @property
    def good_share(self) -> float:
        """Share of requests that met every limit."""
        return self.summary.good_share or 0.0

    @cached_property
    def by_phase(self) -> "list[Result]":
        """Return one result for each measured phase."""
        inside = {
            phase: [trace for trace in self.traces if phase.holds(trace.planned_s)]
            for phase in self.phases
            if phase.measured
        }
        return [
            replace(self, title=phase.name, phases=(phase,), traces=traces, planned=len(traces))
            for phase, traces in inside.items()
        ]

    @cached_property
    def by_kind(self) -> "list[Result]":
        """Return one result for each kind of mixed traffic."""
        kinds = [kind for kind in RequestKind if any(trace.kind is kind for trace in self.measured)]
        inside = {kind: [trace for trace in self.measured if trace.kind is kind] for kind in kinds}
        return [replace(self, title=kind.value, traces=traces, planned=len(traces)) for kind, traces in inside.items()]

    @cached_property
    def audio_made_per_s(self) -> float:
        """Seconds of audio received per second of measurement, including audio from earlier requests."""
        counted = [phase for phase in self.phases if phase.measured]
        made_s = sum(trace.arrived_s(phase.start_s, phase.end_s) for trace in self.traces for phase in counted)
        return made_s / sum(phase.duration_s for phase in counted)

    @property
    def recovered_after_s(self) -> float | None:
        """Seconds until all later windows were good, or None if the last window was not good."""
        start_s, window_s = self.phases[0].start_s, max(RECOVERY_WINDOW_S, RECOVERY_REQUESTS / self.rate)
        return time_to_recover(self.traces, start_s, end_s=self.end_s, window_s=window_s, limits=self.limits)


async def measure(settings: Settings, folder: TraceFolder, *, show: Show) -> tuple[Result, bool]:
    """Write the plan, run it, and write the summary. Return the result, and False if the run ended early on Ctrl-C.

    `show` receives the runner before the start and may read its progress at any time. Raises `NothingPlannedError`,
    `RunExistsError`, `UnreachableError` and `WarmupFailedError`.
    """
    schedule = settings.schedule()
    if not schedule:
        raise NothingPlannedError("the plan contains no requests: raise --rate or the duration, or change --seed")
    folder.check_unused()
    await check_server(settings)
    folder.write_schedule(schedule)
    folder.write_json("run.json", describe(settings))
    runner = (Runner if settings.processes == 1 else ClientProcesses)(settings, schedule, folder=folder)
    show(runner)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, runner.interrupt)
    try:
        is_complete = await runner.run(settings.warmup_schedule())
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    result = read_result(folder)
    phases = [
        {**asdict(each.phases[0]), **flat(each.summary), "recovered_after_s": each.recovered_after_s}
        for each in result.by_phase
    ]
    whole_run = flat(result.summary) | {"audio_made_per_s": result.audio_made_per_s, "limits": asdict(result.limits)}
    kinds = {each.title: flat(each.summary) for each in result.by_kind}
    folder.write_json("summary.json", whole_run | {"phases": phases, "kinds": kinds})
    return result, is_complete


async def check_server(settings: Settings) -> None:
    """Raise `UnreachableError` if the server does not respond or the replicas URL does not return counts."""
    url, option = settings.url, "--url"
    try:
        async with open_session() as session:
            async with session.get(url, timeout=REACHABLE_WITHIN, allow_redirects=False):
                pass  # any status is acceptable
            if settings.replicas_url:
                url, option = settings.replicas_url, "--serve-status-url or --metrics-url"
                await read_counts(session, url)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise UnreachableError(
            f"No server responds at {url} ({error or type(error).__name__}).\n"
            f"Start the server and wait until it is ready, or correct {option}. Nothing was sent or written."
        ) from error
    except NoReplicaCountsError as error:
        raise UnreachableError(
            f"{url} returned {error}.\n"
            f"Set --serve-status-url to the dashboard's http://HOST:8265/api/serve/applications/ or --metrics-url "
            f"Talkray's http://HOST:8000/metrics, or omit both options."
        ) from error


def describe(settings: Settings) -> dict[str, Any]:
    """Return the content of run.json, which contains everything needed to repeat the run."""
    try:
        own_version = version("talkray")
    except PackageNotFoundError:
        own_version = "not installed"
    command = shlex.join(["python", "-m", "loadtest", *without_headers(sys.argv[1:])])
    return {
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "url": settings.url,
        "command": command,
        "settings": asdict(
            replace(settings, headers=dict.fromkeys(settings.headers, HIDDEN), phases=place(settings.phases))
        ),
        "versions": {"talkray": own_version, "python": platform.python_version(), "aiohttp": version("aiohttp")},
        "machine": {"platform": platform.platform(), "cpus": os.cpu_count()},
    }


def without_headers(arguments: Sequence[str]) -> list[str]:
    """Remove header values, because they may contain keys, and results are often shared."""
    shown = []
    for before, each in zip(("", *arguments), arguments, strict=False):
        option, equals, _ = each.partition("=")
        is_value = before.startswith("--header") and "=" not in before
        shown.append(HIDDEN if is_value else f"{option}={HIDDEN}" if equals and option.startswith("--header") else each)
    return shown


def flat(summary: Summary) -> dict[str, Any]:
    """Return the fields of a summary as a flat JSON object, together with its derived properties."""
    follows = ("good_share", "good_per_s", "request_viability", "too_few", "client_was_slow")
    return asdict(summary) | {name: getattr(summary, name) for name in follows}


def read_result(folder: TraceFolder, *, limits: Limits | None = None) -> Result:
    """Read a run from a folder. `limits` replaces the limits stored with the run. Raises `NoRunError`."""
    about = folder.read_json("run.json")
    try:
        settings = about["settings"]
        phases = place([Phase(**phase) for phase in settings["phases"]])
        own_limits = Limits(**settings["limits"])
    except (KeyError, TypeError) as error:
        raise NoRunError(f"{folder.path / 'run.json'} was written by a different version: {error!r}") from error
    return Result(
        title=folder.path.name,
        about=about,
        phases=phases,
        limits=limits or own_limits,
        traces=folder.read_traces(),
        samples=read_samples(folder),
        planned=len(folder.read_lines("schedule.jsonl")),
    )
