"""Measure the server's speed and capacity with load tests, whose folders are kept."""

import asyncio
import json
import shutil
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from loadtest.__main__ import run_once, sweep_rates
from loadtest.arrivals import Arrivals, Phase, Profile, SpeechLengths, Texts
from loadtest.measure import Result, read_result
from loadtest.settings import Settings
from loadtest.sweep import Plan, Sweep, read_sweep
from loadtest.tables import BRIEF, FULL_RATES
from loadtest.traces import TraceFolder
from talkray_tools.plan.measure import LOAD_PROCESSES, gpu_names
from talkray_tools.report.bench import Recorded, ReportBench
from talkray_tools.verify import Check

_RATES, _QUICK_RATES = (1.0, 10.0, 20.0, 40.0), (1.0, 10.0)
_MIXED_SHARE = 0.5  # rate of mixed traffic as a share of the capacity
_MOST_ADDED_MS = 25.0  # on a GPU, the most that HTTP, Ray and the codec may add to the engine's time to first audio
_LENGTHS = SpeechLengths(6.0, 0.35)  # for checkpoints whose speech does not end by itself
_CLONE_REQUESTS = 3  # per recording; the recording is new to the server only in the first request


def speed(bench: ReportBench) -> Iterator[Check]:
    """Measure open-loop rates, capacity, mixed traffic and clones; then start-up time and memory."""
    quick = bench.options.quick
    engine = bench.verified if bench.options.model else {}  # run first, because the server needs the memory
    ends = [each.passed for name, each in engine.items() if name.startswith("speech ends")]
    settings = replace(bench.settings, warmup=3, lengths=_LENGTHS if ends and not any(ends) else None)
    if settings.lengths:
        yield Check("lengths of speech", None, "set by the load tests, because speech does not end by itself")
    duration_s, least, rates = (8.0, 10, _QUICK_RATES) if quick else (20.0, 30, _RATES)
    steps = _sweep(bench, "rates", settings, Plan(duration_s=duration_s, min_requests=least, rates=rates)).steps
    for step in steps:
        yield _first_audio(step, f"{step.rate:g} requests per second")
    failed, sent = (sum(getattr(step.summary, name) for step in steps) for name in ("failed", "sent"))
    causes = ", ".join(f"{cause}: {count}" for step in steps for cause, count in step.summary.causes.items())
    detail = f"{failed} of {sent} failed (limit: 0); refusals of a full server are allowed ({causes or 'none'})"
    yield Check("no request fails", not failed, detail, {"share": failed / max(1, sent)})
    if "first audio" in engine:  # compared with untrimmed speech, because the engine does not trim silence
        own = replace(settings, options={**settings.options, "leading_silence": True}, arrivals=Arrivals.CONSTANT)
        yield _added(engine, _run(bench, "added", replace(own, phases=(Phase("measured", 1.0, 8.0),))))
    first, factor = (8.0, 4.0 if quick else 2.0) if gpu_names() else (1.0, 2.0)
    search = Plan(first, 512.0, factor, 5.0 if quick else 15.0, refinements=1 if quick else 3, min_requests=5)
    search = replace(search, most_s=40.0 if quick else 400.0)
    found = _sweep(bench, "capacity", replace(settings, texts=Texts.PARAGRAPHS, processes=LOAD_PROCESSES), search)
    most, held = found.capacity_per_s or 0.0, "at least " if found.missed is None else ""
    within = [step for step in found.steps if step.rate <= most]
    audio = max((step.audio_made_per_s for step in within), default=0.0)
    spoken = max((step.summary.succeeded for step in within if step.rate == most), default=0)
    detail = f"{held}{most:.3g} requests per second ({found.steps[0].limits}) with {audio:.3g} s of audio per second"
    detail += f", in {spoken} responses"
    yield Check("capacity", None, detail, {"requests_per_s": most, "audio_s_per_s": audio, "requests": spoken})
    if bench.options.dialect == "talkray":
        rate = max(0.25, _MIXED_SHARE * most)
        phases = (Phase("measured", rate, max(10.0 if quick else 30.0, 5 / rate)),)
        mixed = _run(bench, "mixed", replace(settings, profile=Profile.MIXED, phases=phases, warmup=0))
        yield _first_audio(mixed, f"mixed traffic at {rate:.3g} requests per second")
    if bench.server.kind == "base":
        yield from _clones(bench, replace(settings, warmup=0, arrivals=Arrivals.CONSTANT, texts=Texts.ONE_SENTENCE))
    if bench.server.start_s is not None:
        yield from _resources(bench, bench.server.start_s)


def _sweep(bench: ReportBench, name: str, settings: Settings, plan: Plan) -> Sweep:
    folder = TraceFolder(_fresh(bench, name, "sweep.json"))
    if not folder.path.exists():
        titles = FULL_RATES if plan.rates else BRIEF
        asyncio.run(sweep_rates(settings, plan, folder, titles=titles))
    swept = read_sweep(folder)
    _check_whole(folder, swept.steps)
    return swept


def _run(bench: ReportBench, name: str, settings: Settings) -> Result:
    folder = TraceFolder(_fresh(bench, name, "summary.json"))
    if not folder.path.exists():
        asyncio.run(run_once(settings, folder))
    result = read_result(folder)
    _check_whole(folder, [result])
    return result


def _check_whole(folder: TraceFolder, runs: Sequence[Result]) -> None:
    """Raise `KeyboardInterrupt` if Ctrl-C ended a load test, because load tests end normally on Ctrl-C."""
    if any(run.summary.interrupted or run.summary.sent < run.summary.planned for run in runs):
        shutil.rmtree(folder.path)
        raise KeyboardInterrupt


def _fresh(bench: ReportBench, name: str, last: str) -> Path:
    """Return the folder of a load test, after removing the remains of an interrupted test."""
    bench.say(f"load test: {name}")
    if not (bench.raw / name / last).exists():
        shutil.rmtree(bench.raw / name, ignore_errors=True)
    return bench.raw / name


def _first_audio(run: Result, what: str) -> Check:
    """Measure the time to first audible audio at the client."""
    summary, name = run.summary, f"first audio, {what}"
    if summary.ttfa_s is None:
        return Check(name, None, f"no audio from {summary.sent} requests: {summary.causes}")
    p50, p95 = 1000 * summary.ttfa_s.p50, 1000 * summary.ttfa_s.p95
    shares = {"c50": summary.c50, "c100": summary.c100, "c200": summary.c200}
    smooth = ", ".join(f"{name.upper()} {share:.1%}" for name, share in shares.items() if share is not None)
    detail = (
        f"{p50:.0f} ms (p50), {p95:.0f} ms (p95) to the first audible sample; {smooth}; {summary.succeeded} of "
        f"{summary.sent} requests spoken, {summary.refused} refused"
    )
    values = {"p50_ms": p50, "p95_ms": p95, **shares, "spoken": summary.succeeded / summary.sent}
    return Check(name, None, detail, {**values})


def _added(engine: dict[str, Check], step: Result) -> Check:
    """Compute the time that the server adds to the engine. Only GPUs get a bound, because CPUs are shared."""
    own, heard = engine["first audio"].values["first_audio_ms"], step.summary.ttfb_s
    name = "the server adds little to the first audio"
    is_bounded = not str(engine["it loads"].values["device"]).startswith("CPU")
    if heard is None or not isinstance(own, float):
        return Check(name, None, "nothing was heard")
    added = 1000 * heard.p50 - own
    bound = f"; limit {_MOST_ADDED_MS:.0f} ms" if is_bounded else ""
    detail = f"{added:.0f} ms: {own:.0f} ms in the engine, {1000 * heard.p50:.0f} ms at the client (p50){bound}"
    return Check(name, added <= _MOST_ADDED_MS if is_bounded else None, detail, {"added_ms": added})


def _clones(bench: ReportBench, settings: Settings) -> Iterator[Check]:
    """Clone recordings cut for this test. Each is new to the server only in its first request."""
    times_s: dict[str, list[float]] = {"an unknown recording": [], "a known recording": []}
    settings = replace(settings, phases=(Phase("clones", 1.0, _CLONE_REQUESTS),))
    for number, (name, takes) in enumerate(bench.recordings.items(), 1):
        cut = Recorded(takes[-1].audio[number * 97 :], takes[-1].text)
        own = replace(settings, options={**settings.options, **cut.fields})
        for trace in _run(bench, f"clones-{name}", own).measured:
            if trace.ttfa_s is not None:
                times_s["a known recording" if trace.index else "an unknown recording"].append(trace.ttfa_s)
    for name, times in times_s.items():
        middle = 1000 * statistics.median(times) if times else None
        detail = f"{middle:.0f} ms (median of {len(times)})" if times else "no audio"
        yield Check(f"first audio of {name}", None, detail, {"p50_ms": middle})


def _resources(bench: ReportBench, start_s: float) -> Iterator[Check]:
    file = bench.raw / "resources.json"
    if not file.exists():  # written at the first start, because later starts use caches
        file.write_text(json.dumps({"start_s": start_s} | bench.memory_gib()), encoding="utf-8")
    found = json.loads(file.read_text(encoding="utf-8"))
    yield Check("start-up", None, f"{found['start_s']:.0f} s until the first speech", {"start_s": found.pop("start_s")})
    used = ", ".join(f"{value:.1f} GiB of the {name.removesuffix('_gib')}" for name, value in found.items())
    yield Check("memory", None, f"{used}, while it serves", found)
