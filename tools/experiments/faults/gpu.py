"""What a listener gets when a replica dies on a GPU host, over HTTP:
`python -m tools.experiments.faults.gpu codec|talker ...`.

`codec`: kill -9 of the codec replica behind a stream that is a minute long by then. `talker`: kill -9 of one of several
talker replicas under load. Clients read as fast as audio comes: `next` is the time from the kill to the next audio,
`gap` the longest time without any that begins in the two seconds behind it.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.arrivals import FRAMES_PER_S, Phase, ScheduledRequest, SpeechLengths
from loadtest.clients import open_session, speak
from loadtest.recording import Recording
from loadtest.runner import Runner
from loadtest.settings import Settings
from loadtest.traces import Clock, Trace, TraceFolder
from serve_app.config import AppConfig, read_config
from tests.faults.pools import CODEC, TALKER, Service, serving
from tools.experiments.faults.interruption import Interruption, interruption

TEXT = "The lighthouse keeper climbed the stairs, lit the lamp, and waited for the boats to come home."
MS = 1000.0
BYTES_PER_S = 48_000
BUFFERS_S = (0.0, 0.1, 0.5)  # of the players that are simulated
AFTER_S = 4.0


def cpu_ticks(process: int) -> int:
    """Processor time of a process and its threads."""
    user, system = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    return int(user) + int(system)


@dataclass(frozen=True, slots=True)
class LongStreams:
    """One kill under long streams."""

    interruptions: list[Interruption]
    not_whole: int


async def long_streams(service: Service, *, count: int, audio_s: float, kill_at_s: float) -> LongStreams:
    """Kill the codec replica that was busiest since its streams began once each has brought `kill_at_s` of audio."""
    before = {process: cpu_ticks(process) for process in service.processes(CODEC)}
    clock, frames = Clock.started(), round(audio_s * FRAMES_PER_S)
    requests = [ScheduledRequest(index, 0.0, TEXT, frames) for index in range(count)]
    recordings = [Recording(request, clock) for request in requests]
    async with open_session() as session:
        speaking = [
            asyncio.create_task(speak(session, target(service), recording=recording)) for recording in recordings
        ]
        while any(recording.num_audio_bytes < kill_at_s * BYTES_PER_S for recording in recordings):
            assert not all(task.done() for task in speaking), [recording.trace.error for recording in recordings]
            await asyncio.sleep(0.005)
        victim = max(before, key=lambda process: cpu_ticks(process) - before[process])
        os.kill(victim, signal.SIGKILL)
        killed_s = clock.now_s()
        await asyncio.gather(*speaking)
    traces = [recording.finish() for recording in recordings]
    found = [each for trace in traces if (each := interruption(trace, killed_s)) is not None]
    return LongStreams(found, say_problems(traces, requests))


def target(service: Service) -> Settings:
    """Streamed text, as a voice agent asks."""
    options = {"model": "qwen3-tts", "voice": "ryan", "language": "english", "non_streaming_mode": False}
    return Settings(service.url, options=options | {"leading_silence": True})


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


@dataclass(frozen=True, slots=True)
class UnderLoad:
    """One kill under load."""

    sent: int
    finished: int
    refused: int
    failed: int
    not_whole: int  # refused or failed, or without all of their audio
    interruptions: list[Interruption]
    ttfa_p95_before_s: float
    ttfa_p95_after_s: float  # of requests due within AFTER_S of the kill


async def kill_under_load(
    service: Service, out: Path, *, rate: float, duration_s: float, kill_at_s: float, seed: int
) -> UnderLoad:
    """Poisson arrivals of speech of log-normal length; one talker replica is killed at `kill_at_s`."""
    phases = (Phase("measured", rate, duration_s),)
    settings = replace(target(service), phases=phases, seed=seed, lengths=SpeechLengths(5.7, 0.35))
    requests = settings.schedule()
    folder = TraceFolder(out)
    folder.write_schedule(requests)
    begun = asyncio.Event()

    async def begin() -> Clock:
        begun.set()
        return Clock.started()

    runner = Runner(settings, requests, folder=folder, begin=begin)
    running = asyncio.create_task(runner.run())
    await begun.wait()
    await asyncio.sleep(kill_at_s)
    victim = service.processes(TALKER)[0]
    os.kill(victim, signal.SIGKILL)
    assert runner.clock
    killed_s = runner.clock.now_s()
    await running
    found = [each for trace in runner.traces if (each := interruption(trace, killed_s)) is not None]
    spoken = [trace for trace in runner.traces if trace.failure is None]
    refused = sum(trace.failure == "refused" for trace in runner.traces)
    return UnderLoad(
        sent=len(runner.traces),
        finished=len(spoken),
        refused=refused,
        failed=len(runner.traces) - len(spoken) - refused,
        not_whole=say_problems(runner.traces, requests),
        interruptions=found,
        ttfa_p95_before_s=ttfa_p95_s(spoken, 0.0, killed_s),
        ttfa_p95_after_s=ttfa_p95_s(spoken, killed_s, killed_s + AFTER_S),
    )


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


def run_codec(service: Service, options: argparse.Namespace) -> list[dict[str, Any]]:
    records = []
    for trial in range(options.trials):
        service.wait_for(CODEC, 2)
        done = asyncio.run(long_streams(service, count=options.streams, audio_s=options.seconds, kill_at_s=options.at))
        outcome = f"{done.not_whole} of {options.streams} not whole, {say_gaps(done.interruptions)}"
        print(f"trial {trial}: codec replica killed at {options.at:g} s of audio: {outcome}", flush=True)
        records.append(asdict(done))
    return records


def run_talker(service: Service, options: argparse.Namespace) -> list[dict[str, Any]]:
    records = []
    for trial in range(options.trials):
        service.wait_for(TALKER, options.replicas)
        done = asyncio.run(
            kill_under_load(
                service,
                options.out / f"trial-{trial}",
                rate=options.rate,
                duration_s=options.at + options.after,
                kill_at_s=options.at,
                seed=trial,
            )
        )
        outcome = f"{done.sent} sent, {done.finished} finished, {done.refused} refused, {done.failed} failed"
        ttfa = f"TTFA p95 {done.ttfa_p95_before_s * MS:.1f} ms before, {done.ttfa_p95_after_s * MS:.1f} ms after"
        print(f"trial {trial}: talker killed at {options.rate:g} r/s: {outcome}; {ttfa}", flush=True)
        print(f"  {say_gaps(done.interruptions)}", flush=True)
        records.append(asdict(done))
    return records


def application(options: argparse.Namespace) -> AppConfig:
    """The config file with the replicas that the experiment needs."""
    app = read_config(options.config)
    app = app.model_copy(update={"model": options.model})
    if options.placement:
        app = app.model_copy(update={"codec": app.codec.model_copy(update={"placement": options.placement})})
    codecs = app.codec_pool.model_copy(update={"replicas": options.codecs})
    talkers = app.talker_pool
    if options.what == "talker":
        updates = {"replicas": options.replicas} | ({"num_gpus": options.gpus} if options.gpus is not None else {})
        talkers = talkers.model_copy(update=updates)
    return app.model_copy(update={"codec_pool": codecs, "talker_pool": talkers})


def main(arguments: list[str]) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.experiments.faults.gpu", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="what", required=True)
    codec, talker = commands.add_parser("codec"), commands.add_parser("talker")
    for each in (codec, talker):
        each.add_argument("--model", required=True, help="a checkpoint directory")
        each.add_argument("--config", type=Path, default=Path("cluster/serve/one-gpu.yaml"))
        each.add_argument("--placement", choices=("inline", "hybrid", "pool"), help="else as the config has it")
        each.add_argument("--codecs", type=int, default=3, help="codec replicas")
        each.add_argument("--trials", type=int, default=3)
        each.add_argument("--out", type=Path, required=True, help="new folder for the results")
    codec.add_argument("--streams", type=int, default=1, help="at once")
    codec.add_argument("--at", type=float, default=60.0, help="seconds of audio before the kill")
    codec.add_argument("--seconds", type=float, default=90.0, help="of audio in all")
    talker.add_argument("--replicas", type=int, default=2, help="talker replicas")
    talker.add_argument("--gpus", type=float, help="of a talker replica; 0.5: two share a GPU")
    talker.add_argument("--rate", type=float, default=20.0, help="requests per second")
    talker.add_argument("--at", type=float, default=6.0, help="seconds before the kill")
    talker.add_argument("--after", type=float, default=8.0, help="seconds of load after it")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True)
    began_s = time.monotonic()
    with serving(application(options)) as service:
        print(f"ready after {time.monotonic() - began_s:.1f} s", flush=True)
        records = run_codec(service, options) if options.what == "codec" else run_talker(service, options)
    (options.out / f"{options.what}.json").write_text(json.dumps(records, indent=1))
    return int(any(record["not_whole"] for record in records))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
