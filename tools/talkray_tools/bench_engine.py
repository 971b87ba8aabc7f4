"""Measure the talker engine alone, without Ray and HTTP.

    python -m talkray_tools.bench_engine --random 1.7B-CustomVoice [--batches 1 8 32 64] [--json FILE]
    python -m talkray_tools.bench_engine --max-num-seqs 128 --load 80 100    # device time by kind of work

The `device` column is measured with CUDA events around back-to-back captured steps. The `loop` column is the wall-clock
time of complete engine steps. The `host` column is the part of `loop` in which the host computes; otherwise it waits.
The `floor` column is the time to read all weights and contexts once at the given memory bandwidth.
"""

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from deployments.config import TalkerConfig
from deployments.protocol import ALL_FRAMES, ModelKind, Sampling, SynthesisRequest, Tail
from deployments.talker.engine.engine import Engine
from deployments.talker.engine.startup import StartClock, load_engine
from deployments.talker.state.kv_cache import KVCache
from talkray_tools.arguments import CommandParser, checkpoint
from talkray_tools.random_checkpoint import Options, write_checkpoint
from talkray_tools.released import SHAPES
from talkray_tools.step_profile import Busy, Share, profile_load, profile_step

TEXT = "The quick brown fox jumps over the lazy dog, and then it rests in the shade of a tree."
_WARM_UP_STEPS = 5
STREAM_FRAMES = 71  # 5.7 s of speech
_TAILS = (12, 25)  # lengths of earlier speech in frames: one and two seconds
LENGTH_SIGMA = 0.35  # standard deviation of the logarithm of a stream's length under load
_SETTLE_S, _LOAD_S = 1.5, 1.0


@dataclass(frozen=True, slots=True)
class StepTime:
    """Step times for one batch size, in milliseconds."""

    batch: int
    device: float
    loop: float
    host: float
    floor: float


@dataclass(frozen=True, slots=True)
class PrefillTime:
    """Prefill times of prompts arriving together at an idle engine, in milliseconds."""

    prompts: int
    tail_frames: int  # frames of earlier speech that each prompt continues
    first_codes: float  # from the first request to the codes of all first frames, including host work
    first_codes_p95: float


@dataclass(frozen=True, slots=True)
class Load:
    """Results for an engine that generates codes and audio for randomly arriving streams."""

    rate: float  # requests per second
    frame_ms: float  # between two steps
    rows: float  # mean rows per step
    traced_frame_ms: float  # between two steps, under the profiler
    busy: list[Busy]

    def lines(self) -> Iterator[str]:
        yield (
            f"{self.rate:g} r/s: {self.rows:.0f} rows, one step every {self.frame_ms:.2f} ms"
            f" ({self.traced_frame_ms:.2f} under the profiler); of a second of the device, ms:"
        )
        yield from (f"  {each.part:10} {each.ms:5.0f}, alone {each.alone_ms:4.0f}" for each in self.busy)
        frames = self.rows * 1000 / self.traced_frame_ms  # per second
        yield from (f"  codec: {1000 * each.ms / frames:.0f} us/frame" for each in self.busy if each.part == "codec")


@dataclass(slots=True)
class EngineReport:
    """All results of one benchmark run."""

    device: str
    networks: str
    startup_s: dict[str, float] = field(default_factory=dict)
    steps: list[StepTime] = field(default_factory=list)
    prefills: list[PrefillTime] = field(default_factory=list)
    breakdown: list[Share] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    eager_passes: int = 0
    memory_gib: float = 0.0

    def table(self) -> str:
        lines = [f"{self.device}, {self.networks}: {self.memory_gib:.1f} GiB, {self.eager_passes} eager passes"]
        lines += [f"  {name}: {seconds:.1f} s" for name, seconds in self.startup_s.items()]
        lines.append("batch  device    loop    host   floor   ms per frame step")
        lines += [f"{s.batch:5} {s.device:7.2f} {s.loop:7.2f} {s.host:7.2f} {s.floor:7.2f}" for s in self.steps]
        lines.append("prompts  tail, frames  first codes p50 / p95, ms")
        lines += [
            f"{p.prompts:7}  {p.tail_frames:12}  {p.first_codes:.2f} / {p.first_codes_p95:.2f}" for p in self.prefills
        ]
        lines += [f"batch {s.batch:3} {s.half:9} {s.part:24} {s.launches:4} {s.ms:7.3f} ms" for s in self.breakdown]
        lines += itertools.chain.from_iterable(load.lines() for load in self.loads)
        return "\n".join(lines)


class EngineBench:
    """Benchmarks for one loaded engine."""

    def __init__(self, engine: Engine, *, steps: int, bandwidth: float) -> None:
        self.engine, self.steps, self.bandwidth = engine, steps, bandwidth

    def step_time(self, batch: int) -> StepTime:
        """Measure steps in which all `batch` sequences are decoding."""
        engine = self.engine
        for number in range(batch):
            engine.add(number, self._request(number, frames=self.steps * 3 + 2 * _WARM_UP_STEPS))
        self._steps(_WARM_UP_STEPS)
        waited, start = engine.waited_ns, time.perf_counter_ns()
        lingered = self._steps(self.steps)
        loop = (time.perf_counter_ns() - start) / self.steps / 1e6
        host = loop - (engine.waited_ns - waited + lingered) / self.steps / 1e6
        device = self._device_time() if torch.cuda.is_available() else loop
        floor = self._floor(batch)
        for number in range(batch):
            engine.abort(number)
        return StepTime(batch, device, loop, host, floor)

    def _steps(self, count: int) -> int:
        """Run steps for `count` frames, and return the nanoseconds that the engine would have waited for requests."""
        lingered, wanted = 0, self._num_frames() + count
        while self._num_frames() < wanted:
            start = time.perf_counter_ns()
            while self.engine.poll_timeout_s:
                pass
            lingered += time.perf_counter_ns() - start
            self.engine.step()
        return lingered

    def _num_frames(self) -> int:
        """Return the longest running sequence's frame count. Chunks cannot be counted, because steps may share one."""
        return max((sequence.num_frames for sequence in self.engine.scheduler.running.values()), default=0)

    def prefill_time(self, prompts: int, *, tail_frames: int = 0) -> PrefillTime:
        """Measure prompts of one sentence; with `tail_frames`, each continues a first sentence of that many frames."""
        engine, times = self.engine, list[float]()
        codes = np.zeros((tail_frames, engine.model_config.num_code_groups), np.int16)
        tail = Tail(f"{TEXT} ", codes) if tail_frames else None
        for trial in range(max(3, self.steps // 2)):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            start = time.perf_counter_ns()
            for number in range(prompts):
                request = self._request(trial, frames=5)
                engine.add(number, replace(request, tail=tail))
            made: set[int] = set()
            while len(made) < prompts:
                made |= {number for number, _ in engine.step().chunks}
            times.append((time.perf_counter_ns() - start) / 1e6)
            for number in range(prompts):
                engine.abort(number)
        return PrefillTime(prompts, tail_frames, statistics.median(times), statistics.quantiles(times, n=20)[-1])

    def load(self, rate: float) -> Load:
        """Measure device utilisation while `rate` streams per second arrive at random, including audio."""
        arriving = _Arriving(self.engine, self._request, rate)
        arriving.run(_SETTLE_S)
        frame_ms, rows = arriving.run(_LOAD_S)
        traced: list[tuple[float, float]] = []
        busy = profile_load(lambda: traced.append(arriving.run(_LOAD_S)), rate=rate)
        arriving.end()
        return Load(rate, frame_ms, rows, traced[0][0], busy)

    def breakdown(self, batch: int) -> list[Share]:
        """Measure the time of each kind of kernel in a step of `batch` sequences."""
        engine = self.engine
        for number in range(batch):
            engine.add(number, self._request(number, frames=self.steps * 3 + 2 * _WARM_UP_STEPS))
        self._steps(_WARM_UP_STEPS)
        sequences = list(engine.scheduler.running.values())
        torch.cuda.synchronize()
        shares = profile_step(lambda: engine.runner.repeat_step(sequences), batch=batch)
        for number in range(batch):
            engine.abort(number)
        return shares

    def _device_time(self) -> float:
        """Return the device time of the running batch's step, replayed with no host work in between."""
        sequences = list(self.engine.scheduler.running.values())
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        begin.record()
        for _ in range(self.steps):
            self.engine.runner.repeat_step(sequences)
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / self.steps

    def _floor(self, batch: int) -> float:
        """Return the milliseconds to read a step's data: the contexts, and each weight as often as it is used."""
        talker, config = self.engine.runner.networks.talker, self.engine.model_config
        size = talker.codec_head.weight.element_size()
        layers = sum(weight.numel() for weight in talker.model.layers.parameters())
        predictor = sum(weight.numel() for weight in talker.code_predictor.model.layers.parameters())
        heads = sum(weight.numel() for weight in talker.code_predictor.lm_head.parameters())
        weights = layers + talker.codec_head.weight.numel() + predictor * config.num_code_groups + heads
        context = sum(sequence.num_positions for sequence in self.engine.scheduler.running.values())
        per_position = KVCache.bytes_per_position(config.talker, talker.codec_head.weight.dtype)
        return (weights * size + context * per_position) / self.bandwidth * 1e3

    def _request(self, seed: int, *, frames: int, audio: bool = False) -> SynthesisRequest:
        """Build a request for the codes of a streamed text or, with `audio`, for a paragraph's codes and audio."""
        model = self.engine.model_config
        options = Sampling(max_new_tokens=frames + 1)
        voice = next(iter(model.speakers)) if model.kind is ModelKind.CUSTOM_VOICE else None
        language = "english" if "english" in model.languages else "auto"
        return SynthesisRequest(
            "bench", " ".join([TEXT] * 3) if audio else TEXT, voice=voice, language=language, sampling=options,
            seed=seed, non_streaming_mode=None if audio else False, ignore_eos=True,
            gpu_frames=ALL_FRAMES if audio else 0,
        )  # fmt: skip


class _Arriving:
    """Load generator for an engine: streams arrive at random and have log-normal lengths."""

    def __init__(self, engine: Engine, request: Callable[..., SynthesisRequest], rate: float) -> None:
        self._engine, self._request, self._rate = engine, request, rate
        self._draw, self._number = random.Random(0), 0
        self._due_s = time.perf_counter()

    def run(self, seconds: float) -> tuple[float, float]:
        """Run for `seconds`. Return the mean time between steps in milliseconds, and the mean rows per step."""
        end_s = time.perf_counter() + seconds
        steps, rows, last = 0, 0, self._engine.num_steps
        while (now_s := time.perf_counter()) < end_s:
            while self._due_s <= now_s:
                self._add()
            self._engine.step()
            if self._engine.num_steps > last:
                last = self._engine.num_steps
                steps, rows = steps + 1, rows + len(self._engine.scheduler.running)
        return 1000 * seconds / steps, rows / steps

    def end(self) -> None:
        for number in range(self._number):
            self._engine.abort(number)
        while not self._engine.is_idle:
            self._engine.step()

    def _add(self) -> None:
        frames = STREAM_FRAMES * self._draw.lognormvariate(0.0, LENGTH_SIGMA)
        self._engine.add(self._number, self._request(self._number, frames=round(frames), audio=True))
        self._number += 1
        self._due_s += self._draw.expovariate(self._rate)


def measure(
    directory: Path, config: TalkerConfig, options: argparse.Namespace, report: Callable[[str], None]
) -> EngineReport:
    clock = StartClock(report)
    engine = load_engine(directory, config, clock)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    result = EngineReport(name, engine.runner.networks.name, clock.seconds)
    bench = EngineBench(engine, steps=options.steps, bandwidth=options.bandwidth * 1e12)
    before = engine.runner.graphs.num_eager
    result.prefills = [bench.prefill_time(prompts) for prompts in (1, 2, 4, 8) if prompts <= config.max_num_seqs]
    result.prefills += [bench.prefill_time(1, tail_frames=frames) for frames in _TAILS]
    result.steps = [bench.step_time(batch) for batch in options.batches if batch <= config.max_num_seqs]
    result.eager_passes = engine.runner.graphs.num_eager - before
    if torch.cuda.is_available():
        result.memory_gib = torch.cuda.max_memory_reserved() / 2**30
        result.breakdown = list(itertools.chain.from_iterable(bench.breakdown(batch) for batch in options.profile))
        result.loads = [bench.load(rate) for rate in options.load]
    return result


def main(arguments: list[str]) -> int:
    parser = CommandParser(prog="talkray bench engine", description="Measure the talker engine.")
    parser.add_argument("--model", type=checkpoint, help="checkpoint directory, released name, or embedded")
    parser.add_argument("--random", metavar="NAME", default="1.7B-CustomVoice", help="random weights of this shape")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 48, 64], help="batch sizes")
    parser.add_argument("--steps", type=int, default=40, help="steps of each measurement")
    parser.add_argument("--max-num-seqs", type=int, default=64, help="maximum batch size of the engine")
    parser.add_argument("--max-model-len", type=int, default=4096, help="maximum length of a sequence")
    parser.add_argument("--deterministic", action="store_true", help="run with talker.deterministic")
    parser.add_argument("--profile", type=int, nargs="+", default=[], help="batch sizes to profile")
    parser.add_argument("--load", type=float, nargs="+", default=[], help="requests per second to measure")
    parser.add_argument("--plain", action="store_true", help="plain PyTorch instead of fused kernels")
    parser.add_argument("--bandwidth", type=float, default=4.3, help="memory bandwidth in TB/s, for the lower bound")
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    parser.add_argument("--smoke", action="store_true", help="test run with tiny weights")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.random, options.steps, options.max_num_seqs, options.max_model_len = "tiny-CustomVoice", 3, 2, 128
    config = TalkerConfig(
        max_num_seqs=options.max_num_seqs,
        max_num_waiting=1024,
        max_model_len=options.max_model_len,
        kv_cache_bytes=16 << 30,
        deterministic=options.deterministic,
        kernels="plain" if options.plain else "auto",
    )
    with _checkpoint(options) as directory:
        report = measure(directory, config, options, lambda stage: print(stage, file=sys.stderr, flush=True))
    print(report.table())
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(report), indent=1), encoding="utf-8")
    return 0


@contextmanager
def _checkpoint(options: argparse.Namespace) -> Iterator[Path]:
    if options.model is not None:
        yield options.model
        return
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "checkpoint"
        write_checkpoint(directory, SHAPES[options.random], Options())
        yield directory


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
