"""Do N talkers on N GPUs of one host carry N times what one does?
`python -m tools.experiments.gpu.several --model ckpt --out ...`.

For each placement and each N: the application with N talkers, for a minute under N x 90 % of what one carries, which is
measured first, by rising rates, unless `--one` says it. Then, with `--kill` and `--roll`, what the other talkers carry
while one is killed, and while all are replaced by a rolling update: nothing may be lost.

On CPUs, in miniature: `--model embedded --cpu --talkers 1,2 --one 1 --duration 20 --speech-s 1.5 --codecs 1`.
"""

import argparse
import asyncio
import itertools
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from loadtest.arrivals import FRAMES_PER_S, ScheduledRequest, SpeechLengths, Texts, settled
from loadtest.measure import Result, measure
from loadtest.runner import Runner
from loadtest.settings import Settings
from loadtest.tables import COLUMNS
from loadtest.terminal import Screen
from loadtest.traces import LoadTestError, Trace, TraceFolder
from serve_app.config import AdmissionSettings, AppConfig, read_config
from tools.suites.pools import CODEC, TALKER, Service, redeploy, serving

MUST = {1: 0.98, 2: 0.98, 4: 0.95, 8: 0.92}  # of the audio asked for is in time, with so many talkers
TTFA_FACTOR = 1.3  # of one talker's p95
CARRIES = 0.98  # of the audio in time: one talker carries the rate
LAG_S = 0.005  # p99 of the client's own lateness, above which a row says nothing of the server
WHOLE = {"leading_silence": True}  # audio whose length says whether all of it came
PATIENT = AdmissionSettings(max_line_s=60, max_wait_s=60, max_late_s=100)  # CPUs are slow: let all wait
TITLES = ("TTFA p50/p95/p99, ms", "whole p50/p95, s", "audio s/s", "audio in time", "underruns", "refused", "failed")
MS = 1000.0
SETTLED_S = 2.0  # a gap begins within this time after the moment
BUFFERS_S = (0.0, 0.1, 0.5)  # of the players that are simulated


@dataclass(frozen=True, slots=True)
class Interruption:
    """One stream that was being delivered at that moment."""

    request_id: str | None
    delivered_s: float  # audio that its client had then
    buffered_s: float  # of it, what a player that began with the first sample had not played
    next_s: float  # from the moment to the next audio, less the usual time between two chunks; 0.0: no longer
    gap_s: float  # longest time without audio behind it, as much less
    heard_s: float  # how long such a player fell silent afterwards


def interruption(trace: Trace, moment_s: float) -> Interruption | None:
    """How a stream took it, at `moment_s` of its run's clock; None where it had not begun or was complete."""
    arrivals_s, samples = trace.playable
    if trace.layout is None or not arrivals_s or not arrivals_s[0] < moment_s < arrivals_s[-1]:
        return None
    pairs = list(itertools.pairwise(arrivals_s))
    usual_s = statistics.median(later - earlier for earlier, later in pairs)
    after = [
        later - max(earlier, moment_s)
        for earlier, later in pairs
        if later > moment_s and earlier < moment_s + SETTLED_S
    ]
    playback = trace.playback
    assert playback is not None
    late_s = [late_s for late_s, at_s in zip(playback.lateness_s, arrivals_s[1:], strict=True) if at_s > moment_s]
    had = max(total for total, at_s in zip(samples, arrivals_s, strict=True) if at_s <= moment_s)
    had_s = had / trace.layout.sample_rate
    return Interruption(
        request_id=trace.request_id,
        delivered_s=had_s,
        buffered_s=max(0.0, had_s - (moment_s - arrivals_s[0])),
        next_s=max(0.0, min(at_s for at_s in arrivals_s if at_s > moment_s) - moment_s - usual_s),
        gap_s=max(0.0, max(after) - usual_s),
        heard_s=sum(late for late in late_s if late > playback.sample_s),
    )


@dataclass(frozen=True, slots=True)
class Row:
    """One measured rate."""

    placement: str
    talkers: int
    rate: float
    result: Result
    what: str = "load"  # or what was done meanwhile
    lost: int = 0  # answers that failed, or without all of their audio
    note: str = ""

    @property
    def ttfa_p95_s(self) -> float:
        """From the planned arrival; not a number without answers."""
        found = self.result.summary.ttfa_s
        return math.nan if found is None else found.p95

    @property
    def lag_p99_s(self) -> float:
        found = self.result.summary.scheduling_lag_s
        return math.nan if found is None else found.p99

    def problems(self, one: "Row | None") -> list[str]:
        """What misses the aims; `one`: the row of one talker."""
        share, wanted = self.result.summary.audio_in_time_share or 0.0, must(self.talkers)
        found = [f"{self.lost} not whole"] if self.lost else []
        if self.lag_p99_s > LAG_S:
            found.append(f"the client was {1000 * self.lag_p99_s:.1f} ms late: more --processes")
        if self.what == "load":
            found += [f"{share:.1%} in time, not {wanted:.0%}"] if share < wanted else []
            if one is not None and self.ttfa_p95_s > TTFA_FACTOR * one.ttfa_p95_s:
                found.append(f"TTFA p95 {self.ttfa_p95_s / one.ttfa_p95_s:.2f} times that of one")
        return found

    def cells(self, one: "Row | None") -> list[str]:
        summary = self.result.summary
        known = [COLUMNS[title](summary) for title in TITLES]
        lag = f"{1000 * self.lag_p99_s:.1f}"
        said = "; ".join(self.problems(one)) or "holds"
        return [self.placement, str(self.talkers), self.what, f"{self.rate:.3g}", str(summary.sent), *known, lag, said]


def must(talkers: int) -> float:
    """The share that has to be in time: of the next known number where this one is not."""
    return next((share for count, share in MUST.items() if talkers <= count), MUST[8])


def table(rows: Sequence[Row]) -> str:
    titles = ["placement", "talkers", "what", "r/s", "requests", *TITLES, "client lag p99, ms", "aim"]
    ones = {row.placement: row for row in rows if row.talkers == 1 and row.what == "load"}
    lines = [titles, ["---"] * len(titles), *(row.cells(ones.get(row.placement)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def application(options: argparse.Namespace, *, talkers: int, placement: str) -> AppConfig:
    """The config file with so many talkers, and what belongs beside each."""
    app = read_config(options.config)
    codecs = (options.codecs if placement == "hybrid" else 1) * talkers
    talker_pool = app.talker_pool.model_copy(update={"replicas": talkers})
    codec_pool = app.codec_pool.model_copy(update={"replicas": codecs})
    ingress_pool = app.ingress_pool.model_copy(update={"replicas": options.ingresses * talkers})
    talker, api = app.talker, app.api
    if options.cpu:
        api = api.model_copy(update={"admission": PATIENT})
        small = {"num_cpus": 0.1, "num_gpus": 0.0}
        talker_pool, codec_pool, ingress_pool = (
            pool.model_copy(update=small) for pool in (talker_pool, codec_pool, ingress_pool)
        )
        talker = talker.model_copy(update={"device": "cpu", "max_num_seqs": 8, "gpu_memory_fraction": None})
    return app.model_copy(
        update={
            "model": options.model,
            "api": api,
            "talker": talker,
            "codec": app.codec.model_copy(update={"placement": placement}),
            "talker_pool": talker_pool,
            "codec_pool": codec_pool,
            "ingress_pool": ingress_pool,
        }
    )


class Bench:
    """One placement and number of talkers, running."""

    def __init__(self, service: Service, options: argparse.Namespace, *, placement: str, talkers: int) -> None:
        self.service, self.options = service, options
        self.placement, self.talkers = placement, talkers
        self._number = 0

    def load(
        self, rate: float, duration_s: float, *, what: str = "load", act: Callable[[], None] | None = None
    ) -> tuple[Row, float | None]:
        """A row, and when `act` was called: in a thread, once a third of the load has been sent."""
        self._number += 1
        folder = TraceFolder(self.options.out / f"{self.placement}-{self.talkers}-{self._number:02d}-{what}")
        settings = Settings(
            self.service.url,
            settled(rate, duration_s, settle_s=self.options.settle),
            seed=self._number,
            lengths=SpeechLengths(self.options.speech_s, 0.35),
            options={"model": "tts-1", "voice": "alloy"} | (WHOLE if act else {}) | json.loads(self.options.extra),
            texts=Texts.ONE_SENTENCE,
            warmup=8,
            processes=self.options.processes or max(2, math.ceil(rate / self.options.rate_per_process)),
        )
        try:
            result, acted_s = asyncio.run(loaded(settings, folder, act, at_s=self.options.settle + duration_s / 3))
        except* LoadTestError as problems:
            sys.exit("\n".join(map(str, problems.exceptions)))
        lost = say_problems(result.traces, settings.schedule()) if act is not None else 0
        refused = result.summary.refused
        row = Row(self.placement, self.talkers, rate, result, what, lost - refused if act is not None else 0)
        return row, acted_s

    def one_carries(self) -> float:
        """Requests per second, by rising rates: the last one at which the audio was in time."""
        rate, carried = self.options.start, 0.0
        while True:
            row, _ = self.load(rate, self.options.search_duration, what="search")
            share = row.result.summary.audio_in_time_share or 0.0
            print(f"one talker, {self.placement}: {share:.1%} in time at {rate:.3g} requests/s", flush=True)
            if share < CARRIES:
                break
            rate, carried = rate * self.options.factor, rate
        if not carried:
            sys.exit(f"one talker does not carry {rate:g} requests a second: give a lower --start")
        return carried

    def killed(self, rate: float) -> Row:
        """One talker is killed under the load; it is there again at the end."""

        def kill() -> None:
            os.kill(self.service.processes(TALKER)[0], signal.SIGKILL)

        row, killed_s = self.load(rate, self.options.fault_duration, what="talker killed", act=kill)
        traces = row.result.traces
        assert killed_s is not None
        found = [each for trace in traces if (each := interruption(trace, killed_s)) is not None]
        spoken = [trace for trace in traces if trace.failure is None]
        ttfa_ms = [1000 * ttfa_p95_s(spoken, *span) for span in ((0.0, killed_s), (killed_s, killed_s + 4.0))]
        note = f"{say_gaps(found)}; TTFA p95 {ttfa_ms[0]:.1f} ms before, {ttfa_ms[1]:.1f} in the 4 s after"
        self.service.wait_for(TALKER, self.talkers)
        return replace(row, note=note)

    def rolled(self, rate: float) -> Row:
        """All talkers are replaced under the load, which lasts as long as that takes."""
        old = {*self.service.processes(TALKER)}
        app = self.service.app
        talker = app.talker.model_copy(update={"max_num_waiting": app.talker.max_num_waiting + 1})
        sizes = {TALKER: self.talkers, CODEC: app.codec_pool.replicas}
        ended_s: list[float] = []

        def roll() -> None:
            began_s = time.monotonic()
            redeploy(app.model_copy(update={"talker": talker}), sizes)
            while old & {*self.service.processes(TALKER)} or self.service.num_running(TALKER) < self.talkers:
                if time.monotonic() - began_s > self.options.roll_duration:
                    return
                time.sleep(0.5)
            ended_s.append(time.monotonic() - began_s)

        row, _ = self.load(rate, 1.5 * self.options.roll_duration, what="rolling update", act=roll)
        left = len(old & {*self.service.processes(TALKER)})
        note = f"all replaced after {ended_s[0]:.0f} s" if ended_s else f"{left} of {len(old)} not replaced in time"
        return replace(row, note=note, lost=row.lost + (0 if ended_s else left))


async def loaded(
    settings: Settings, folder: TraceFolder, act: Callable[[], None] | None, *, at_s: float
) -> tuple[Result, float | None]:
    """One run; what `act` raises ends it. Also when it was called, on the run's clock."""
    screen, runners, acted_s = Screen(Console(stderr=True)), list[Runner](), list[float]()

    def show(runner: Runner) -> None:
        runners.append(runner)
        screen.show(runner)

    async def meanwhile() -> None:
        assert act is not None
        while not runners or (clock := runners[0].clock) is None:  # noqa: ASYNC110, it begins when the warm-up is over
            await asyncio.sleep(0.01)
        await asyncio.sleep(at_s - clock.now_s())
        acted_s.append(clock.now_s())
        await asyncio.to_thread(act)

    async with screen.shown(), asyncio.TaskGroup() as tasks:
        acting = tasks.create_task(meanwhile()) if act is not None else None
        result, whole = await measure(settings, folder, show=show)
        if not whole and acting is not None:
            acting.cancel()
    if not whole:
        sys.exit("interrupted")
    return result, acted_s[0] if acted_s else None


@contextmanager
def benched(options: argparse.Namespace, *, talkers: int, placement: str) -> Iterator[Bench]:
    """The application while the context lasts."""
    began_s = time.monotonic()
    print(f"starting {talkers} talkers, {placement}", flush=True)
    with serving(application(options, talkers=talkers, placement=placement), print) as service:
        service.wait_for(TALKER, talkers)
        print(f"ready after {time.monotonic() - began_s:.1f} s", flush=True)
        yield Bench(service, options, placement=placement, talkers=talkers)


def measured(options: argparse.Namespace, *, placement: str) -> Iterator[Row]:
    one = options.one
    for talkers in options.talkers:
        with benched(options, talkers=talkers, placement=placement) as bench:
            if one is None:
                one = bench.one_carries()
            rate = talkers * options.share * one
            yield bench.load(rate, options.duration)[0]
            if options.kill and talkers > 1:
                yield bench.killed(rate * (talkers - 1) / talkers)
            if options.roll and talkers > 1:
                yield bench.rolled(rate * (talkers - 1) / talkers)


def about(options: argparse.Namespace) -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    smi = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        gpus = subprocess.run(smi, capture_output=True, text=True, check=False).stdout.strip().replace("\n", ", ")
    except FileNotFoundError:
        gpus = "none"
    return {
        "command": " ".join(["python -m tools.experiments.gpu.several", *options.arguments]),
        "commit": commit.stdout.strip(),
        "host": f"{platform.node()}, {len(os.sched_getaffinity(0))} cores, GPUs: {gpus}",
    }


def numbers(value: str) -> list[int]:
    """Such as 1,2,4,8, in ascending order."""
    return sorted(int(part) for part in value.split(","))


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.experiments.gpu.several", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("--model", required=True, help="a checkpoint directory, or embedded")
    add("--out", type=Path, required=True, help="new folder for the results")
    add("--config", type=Path, default=Path("cluster/serve/four-gpus.yaml"))
    add("--talkers", type=numbers, default=[1, 2, 4, 8], help="such as 1,2,4,8")
    add("--placements", default="inline,hybrid")
    add("--one", type=float, help="requests per second that one talker carries; else it is measured")
    add("--share", type=float, default=0.9, help="of what one carries, for each talker")
    add("--start", type=float, default=70.0, help="first rate of that measurement")
    add("--factor", type=float, default=1.1, help="from one of its rates to the next")
    add("--search-duration", type=float, default=20.0, help="seconds at each of its rates")
    add("--duration", type=float, default=60.0, help="seconds of load")
    add("--settle", type=float, default=3.0, help="seconds of load before it, not measured")
    add("--speech-s", type=float, default=5.7, help="median length of the answers")
    add("--extra", default="{}", help="JSON: more fields of every request")
    add("--ingresses", type=int, default=2, help="ingress replicas beside each talker")
    add("--codecs", type=int, default=8, help="codec replicas beside each talker, hybrid")
    add("--processes", type=int, help="client processes; else as --rate-per-process says")
    add("--rate-per-process", type=float, default=30.0, help="requests a second that a client process sends")
    add("--kill", action="store_true", help="then kill a talker under load")
    add("--fault-duration", type=float, default=30.0, help="seconds of that load")
    add("--roll", action="store_true", help="then replace all talkers under load")
    add("--roll-duration", type=float, default=240.0, help="seconds that the update may take")
    add("--cpu", action="store_true", help="talkers on CPUs, to try the command itself")
    options = parser.parse_args(arguments)
    options.arguments = arguments
    if options.one is None and options.talkers[0] != 1:
        parser.error("without --one the first of --talkers must be 1: it is measured")
    return options


def say_problems(traces: Sequence[Trace], requests: Sequence[ScheduledRequest]) -> int:
    """Print which streams have not ended with all of their audio; how many."""
    lengths = {request.index: request.frames for request in requests}
    problems = []
    for trace in traces:
        frames = round(trace.audio_s * FRAMES_PER_S, 3)
        if trace.failure is not None:
            problems.append(f"{trace.request_id}: {trace.error} after {frames:g} frames")
        elif frames != lengths[trace.index]:
            problems.append(f"{trace.request_id}: {frames:g} frames, not {lengths[trace.index]}")
    for problem in problems:
        print(f"  NOT WHOLE: {problem}", flush=True)
    return len(problems)


def ttfa_p95_s(traces: Sequence[Trace], begin_s: float, end_s: float) -> float:
    """Of requests that were due in between, from their planned arrival."""
    inside = [
        trace.first_audible_s - trace.planned_s
        for trace in traces
        if begin_s <= trace.planned_s < end_s and trace.first_audible_s is not None
    ]
    return float(np.percentile(inside, 95)) if inside else float("nan")


def say_gaps(interruptions: Sequence[Interruption]) -> str:
    """Gaps, and who would have heard them."""
    if not interruptions:
        return "no stream was under way"
    gaps_ms = np.array([each.gap_s for each in interruptions]) * MS
    p50, p95 = np.percentile(gaps_ms, (50, 95))
    next_ms = np.array([each.next_s for each in interruptions]) * MS
    heard = ", ".join(
        f"{sum(each.heard_s > buffer_s for each in interruptions)} with {buffer_s:g} s" for buffer_s in BUFFERS_S
    )
    least_ms = min(each.buffered_s for each in interruptions) * MS
    return (
        f"{len(interruptions)} streams, next p50 {np.median(next_ms):.0f}, longest {next_ms.max():.0f} ms; "
        f"gap p50 {p50:.0f}, p95 {p95:.0f}, longest {gaps_ms.max():.0f} ms; "
        f"least buffered {least_ms:.0f} ms; heard by (player's buffer): {heard}"
    )


def main(arguments: list[str]) -> int:
    """Command line; 0 where every row holds."""
    options = parsed(arguments)
    options.out.mkdir(parents=True)
    rows: list[Row] = []
    facts = about(options)
    for placement in options.placements.split(","):
        for row in measured(options, placement=placement):
            rows.append(row)
            print(f"\n{table(rows)}\n{row.note}", flush=True)
    text = "\n\n".join([f"`{facts['command']}`; commit `{facts['commit']}`; {facts['host']}.", table(rows)])
    notes = [f"- {row.placement}, {row.talkers} talkers, {row.what}: {row.note}" for row in rows if row.note]
    (options.out / "table.md").write_text("\n".join([text, "", *notes, ""]), encoding="utf-8")
    records = [
        {"placement": row.placement, "talkers": row.talkers, "rate": row.rate, "what": row.what, "lost": row.lost}
        | {"note": row.note, "summary": asdict(row.result.summary)}
        for row in rows
    ]
    (options.out / "rows.json").write_text(json.dumps(facts | {"rows": records}, indent=1), encoding="utf-8")
    ones = {row.placement: row for row in rows if row.talkers == 1 and row.what == "load"}
    missed = [row for row in rows if row.problems(ones.get(row.placement))]
    print(f"\n{len(rows) - len(missed)} of {len(rows)} rows hold; {options.out / 'table.md'}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
