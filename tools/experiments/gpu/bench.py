"""Shared parts of these experiments: a table of loads on an application with disturbances, and a client that sends
requests at given times as an ingress does."""

import argparse
import asyncio
import itertools
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from rich.console import Console

from loadtest.arrivals import FRAMES_PER_S, ScheduledRequest, SpeechLengths, Texts, settled
from loadtest.measure import Result, measure
from loadtest.runner import Runner
from loadtest.settings import Settings
from loadtest.tables import COLUMNS
from loadtest.terminal import Screen
from loadtest.traces import LoadTestError, Trace, TraceFolder
from serve_app.config import AdmissionSettings, AppConfig
from serve_app.config_file import read_config
from serve_app.speech.segments import Utterance
from talkray_tools.plan.measure import commit, gpu_names
from tools.suites.listening import Heard, Listener
from tools.suites.pools import TALKER, Service, serving

IN_TIME = 0.98  # share of the requested audio
LAG_S = 0.005  # if the p99 of the client's lateness exceeds this, the row says nothing about the server
WHOLE = {"leading_silence": True}  # keeps leading silence, so the length shows missing audio
PATIENT = AdmissionSettings(max_line_s=60, max_wait_s=60, max_late_s=100)  # CPUs are slow, so all requests may wait
TITLES = ("sent", "TTFA p50/p95/p99, ms", "audio s/s", "audio in time", "underruns", "refused", "failed")


@dataclass(frozen=True, slots=True)
class Interruption:
    """One stream that was active during a disturbance."""

    buffered_s: float  # audio that a zero-buffer player had not yet played at that time
    next_s: float  # time to the next audio minus the usual time between chunks; 0.0 if not longer
    heard_s: float  # later silence of such a player


def interruption(trace: Trace, moment_s: float) -> Interruption | None:
    """Return the effect at `moment_s` of the run's clock, or None if the stream had not begun or was complete."""
    arrivals_s, samples = trace.playable
    if trace.layout is None or not arrivals_s or not arrivals_s[0] < moment_s < arrivals_s[-1]:
        return None
    usual_s = statistics.median(later - earlier for earlier, later in itertools.pairwise(arrivals_s))
    playback = trace.playback
    assert playback is not None
    late_s = [late_s for late_s, at_s in zip(playback.lateness_s, arrivals_s[1:], strict=True) if at_s > moment_s]
    had = max(total for total, at_s in zip(samples, arrivals_s, strict=True) if at_s <= moment_s)
    return Interruption(
        buffered_s=max(0.0, had / trace.layout.sample_rate - (moment_s - arrivals_s[0])),
        next_s=max(0.0, min(at_s for at_s in arrivals_s if at_s > moment_s) - moment_s - usual_s),
        heard_s=sum(late for late in late_s if late > playback.sample_s),
    )


@dataclass(frozen=True, slots=True)
class Row:
    """One measured rate."""

    place: str
    rate: float
    result: Result
    what: str = "load"  # or the disturbance
    lost: int = 0  # responses that failed or lack audio
    interrupted: Sequence[Interruption] = ()

    @property
    def problems(self) -> list[str]:
        summary = self.result.summary
        found = [f"{self.lost} not whole"] if self.lost else []
        if summary.scheduling_lag_s is not None and (lag_s := summary.scheduling_lag_s.p99) > LAG_S:
            found.append(f"the client was {1000 * lag_s:.1f} ms late: more --processes")
        if self.what == "load" and (share := summary.audio_in_time_share or 0.0) < IN_TIME:
            found.append(f"{share:.1%} in time, not {IN_TIME:.0%}")
        return found

    @property
    def note(self) -> str:
        """Effect of the disturbance on listeners."""
        if not self.interrupted:
            return ""
        next_ms, buffered_ms = (
            [1000 * getattr(each, name) for each in self.interrupted] for name in ("next_s", "buffered_s")
        )
        paused = sum(each.heard_s > 0 for each in self.interrupted)
        return (
            f"{len(self.interrupted)} streams under way: next audio after {statistics.median(next_ms):.0f} ms, at most "
            f"{max(next_ms):.0f}; at least {min(buffered_ms):.0f} ms in hand; {paused} paused"
        )

    def cells(self) -> list[str]:
        known = [COLUMNS[title](self.result.summary) for title in TITLES]
        return [self.place, self.what, f"{self.rate:.3g}", *known, "; ".join(self.problems) or "holds"]


def table(rows: Sequence[Row]) -> str:
    titles = ["placement, size", "what", "r/s", *TITLES, "aim"]
    lines = [titles, ["---"] * len(titles), *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def adapted(
    options: argparse.Namespace, *, placement: str, replicas: dict[str, int], workers: int | None = None
) -> AppConfig:
    """Return the config file with the given replicas per pool and workers per codec replica."""
    app = read_config(options.config)
    codec = {"placement": placement} | ({"workers": workers} if workers else {})
    changes: dict[str, object] = {"model": options.model, "codec": app.codec.model_copy(update=codec)}
    small = {"num_cpus": 0.1, "num_gpus": 0.0} if options.cpu else {}
    for name, pool in (("talker", app.talker_pool), ("codec", app.codec_pool), ("ingress", app.ingress_pool)):
        cores = {"num_cpus": float(workers)} if workers and name == "codec" else {}
        size = {"replicas": replicas[name]} if name in replicas else {}
        changes[f"{name}_pool"] = pool.model_copy(update=cores | size | small)
    if options.cpu:
        on_cpu = {"device": "cpu", "max_num_seqs": 8, "gpu_memory_fraction": None}
        changes["talker"] = app.talker.model_copy(update=on_cpu)
        changes["api"] = app.api.model_copy(update={"admission": PATIENT})
    return app.model_copy(update=changes)


class Bench:
    """One running application."""

    def __init__(self, service: Service, options: argparse.Namespace, place: str) -> None:
        self.service, self.options, self.place = service, options, place
        self._number = 0

    def load(self, rate: float, duration_s: float, *, what: str = "load", act: Callable[[], None] | None = None) -> Row:
        """Run a load. `act` runs in a thread once a third of the load has been sent."""
        self._number += 1
        options, name = self.options, f"{self.place}-{self._number:02d}-{what}".replace(" ", "-").replace(",", "")
        settings = Settings(
            self.service.url,
            settled(rate, duration_s, settle_s=options.settle),
            seed=self._number,
            lengths=SpeechLengths(options.speech_s, 0.35),
            options={"model": "tts-1", "voice": "alloy"} | (WHOLE if act else {}) | json.loads(options.extra),
            texts=Texts.ONE_SENTENCE,
            warmup=8,
            processes=options.processes or max(2, math.ceil(rate / options.rate_per_process)),
        )
        folder = TraceFolder(options.out / name)
        try:
            result, acted_s = asyncio.run(loaded(settings, folder, act, at_s=options.settle + duration_s / 3))
        except* LoadTestError as problems:
            sys.exit("\n".join(map(str, problems.exceptions)))
        if acted_s is None:
            return Row(self.place, rate, result)
        found = [each for trace in result.traces if (each := interruption(trace, acted_s)) is not None]
        lost = say_problems(result.traces, settings.schedule()) - result.summary.refused
        return Row(self.place, rate, result, what, lost, found)


async def loaded(
    settings: Settings, folder: TraceFolder, act: Callable[[], None] | None, *, at_s: float
) -> tuple[Result, float | None]:
    """Run one load, which an error of `act` ends. Return the result, and the time of `act` on the run's clock."""
    screen, runners, acted_s = Screen(Console(stderr=True)), list[Runner](), list[float]()

    def show(runner: Runner) -> None:
        runners.append(runner)
        screen.show(runner)

    async def meanwhile(act: Callable[[], None]) -> None:
        while not runners or (clock := runners[0].clock) is None:  # noqa: ASYNC110, it begins when the warm-up is over
            await asyncio.sleep(0.01)
        await asyncio.sleep(at_s - clock.now_s())
        acted_s.append(clock.now_s())
        await asyncio.to_thread(act)

    async with screen.shown(), asyncio.TaskGroup() as tasks:
        acting = tasks.create_task(meanwhile(act)) if act is not None else None
        result, whole = await measure(settings, folder, show=show)
        if not whole and acting is not None:
            acting.cancel()
    if not whole:
        sys.exit("interrupted")
    return result, acted_s[0] if acted_s else None


def say_problems(traces: Sequence[Trace], requests: Sequence[ScheduledRequest]) -> int:
    """Print the streams that lack audio, and return their number."""
    lengths, count = {request.index: request.frames for request in requests}, 0
    for trace in traces:
        frames = round(trace.audio_s * FRAMES_PER_S, 3)
        if trace.failure is not None or frames != lengths[trace.index]:
            count += 1
            why = trace.error if trace.failure is not None else f"{lengths[trace.index]} were asked for"
            print(f"  NOT WHOLE: {trace.request_id}: {frames:g} frames, {why}", flush=True)
    return count


@contextmanager
def benched(app: AppConfig, options: argparse.Namespace, place: str) -> Iterator[Bench]:
    """Run the application within the context."""
    print(f"starting {place}", flush=True)
    with serving(app, print) as service:
        service.wait_for(TALKER, app.talker_pool.replicas)
        yield Bench(service, options, place)


def as_planned(planned: Sequence[tuple[float, Utterance]], *, inline: bool) -> list[Heard]:
    """Send each request after its delay and print progress every five seconds. `inline` as in Listener."""
    listener, coming = Listener.remote(inline=inline), list[Any]()
    ray.get(listener.all_sound.remote(0))  # start the actor first: requests queued before would arrive at once
    said_s = began_s = time.monotonic()
    for at_s, request in planned:
        time.sleep(max(0.0, at_s - (time.monotonic() - began_s)))
        coming.append(listener.listen.remote(request))
        if time.monotonic() - said_s > 5:
            said_s = time.monotonic()
            print(f"asked for {len(coming)} of {len(planned)}", flush=True)
    left = coming
    while left:
        left = ray.wait(left, num_returns=len(left), timeout=5)[1]
        print(f"{len(coming) - len(left)} of {len(coming)} have ended", flush=True)
    return list(ray.get(coming))


def most_at_once(heard: Sequence[Heard]) -> int:
    """Return the maximum number of concurrent streams."""
    sounding = [each.arrivals_s for each in heard if each.arrivals_s]
    changes = sorted((at_s, change) for each in sounding for at_s, change in ((each[0], 1), (each[-1], -1)))
    return max(itertools.accumulate(change for _, change in changes), default=0)


def common_options(program: str, description: str, *, config: str, placements: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=description.splitlines()[0])
    add = parser.add_argument
    add("--model", required=True, help="a checkpoint directory, or embedded")
    add("--out", type=Path, required=True, help="new folder for the results")
    add("--config", type=Path, default=Path(config))
    add("--placements", default=placements, help="such as inline,hybrid")
    add("--duration", type=float, default=60.0, help="seconds of load")
    add("--settle", type=float, default=3.0, help="seconds of load before the measurement")
    add("--speech-s", type=float, default=5.7, help="median length of the responses")
    add("--extra", default="{}", help="JSON: additional fields of every request")
    add("--processes", type=int, help="client processes; default: derived from --rate-per-process")
    add("--rate-per-process", type=float, default=30.0, help="requests per second that one client process sends")
    add("--cpu", action="store_true", help="run on CPUs, to test the command itself")
    return parser


def report(out: Path, arguments: Sequence[str], measured: Iterable[Row]) -> int:
    """Print and write the table row by row. Return 0 if every row holds."""
    out.mkdir(parents=True)
    host = f"{platform.node()}, {len(os.sched_getaffinity(0))} cores, GPUs: {', '.join(gpu_names()) or 'none'}"
    head = f"`{' '.join(arguments)}`; commit `{commit()}`; {host}."
    rows: list[Row] = []
    for row in measured:
        rows.append(row)
        notes = [f"- {each.place}, {each.what}: {each.note}" for each in rows if each.note]
        text = "\n".join([head, "", table(rows), "", *notes, ""])
        (out / "table.md").write_text(text, encoding="utf-8")
        print(f"\n{text}", flush=True)
    holding = sum(not row.problems for row in rows)
    print(f"{holding} of {len(rows)} rows hold; {out / 'table.md'}")
    return int(holding < len(rows))
