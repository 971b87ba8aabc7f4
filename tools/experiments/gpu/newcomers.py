"""Listeners' first audio with lanes and without, alone and beside jobs: `python -m tools.experiments.gpu.newcomers`.

An engine by itself with random weights: listeners come at random, and jobs fill the rest. Needs a GPU.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from deployments.config import TalkerConfig
from deployments.protocol import ALL_FRAMES, Sampling, SynthesisRequest
from deployments.serving.collector import leave_loaded_alone
from deployments.talker.engine.engine import Engine
from deployments.talker.engine.startup import StartClock, load_engine
from deployments.talker.runner.model_runner import ModelRunner
from talkray_tools.bench_engine import LENGTH_SIGMA, STREAM_FRAMES, TEXT
from talkray_tools.random_checkpoint import Options, write_checkpoint
from talkray_tools.released import SHAPES

_JOB_FRAMES, _JOBS_WAITING = 300, 4
_FIRST_JOB = 1_000_000  # listeners have smaller ids
_SETTLE_S = 1.0


class EngineTraffic:
    """Listeners at `rate` a second, and jobs, at one engine."""

    def __init__(self, engine: Engine, rate: float, *, jobs: bool) -> None:
        self._engine, self._rate, self._jobs = engine, rate, jobs
        self._draw, self._due_s, self._num_jobs = random.Random(2), 0.0, 0
        self._added_s: dict[int, float] = {}
        self.waited_ms: dict[int, float] = {}  # until the first audio, by listener
        self.job_frames = 0

    def run(self, seconds: float) -> None:
        engine, begins_s = self._engine, time.perf_counter() + _SETTLE_S
        self._due_s = begins_s
        while time.perf_counter() < begins_s + seconds:
            self._arrive()
            output = engine.step(self._arrive)
            now_s = time.perf_counter()
            assert output.failures == (), output.failures
            for number, chunk in output.chunks:
                if number >= _FIRST_JOB:
                    self.job_frames += len(chunk.codes) * (now_s >= begins_s)
                elif chunk.pcm:
                    self.waited_ms.setdefault(number, 1000 * (now_s - self._added_s[number]))
        for number in (*self._added_s, *range(_FIRST_JOB, _FIRST_JOB + self._num_jobs)):
            engine.abort(number)
        while not engine.is_idle:
            engine.step()

    def _arrive(self) -> None:
        while self._jobs and len(self._engine.scheduler.waiting_background) < _JOBS_WAITING:
            self._engine.add(_FIRST_JOB + self._num_jobs, self._request(_JOB_FRAMES, background=True))
            self._num_jobs += 1
        while self._due_s <= (now_s := time.perf_counter()):
            number, frames = len(self._added_s), STREAM_FRAMES * self._draw.lognormvariate(0.0, LENGTH_SIGMA)
            self._added_s[number] = now_s
            self._engine.add(number, self._request(round(frames), background=False))
            self._due_s += self._draw.expovariate(self._rate)

    def _request(self, frames: int, *, background: bool) -> SynthesisRequest:
        """Half of the listeners ask for a text that stands in the prompt."""
        return SynthesisRequest(
            "newcomer", TEXT, voice="ryan", language="english", sampling=Sampling(max_new_tokens=frames + 1),
            seed=len(self._added_s), non_streaming_mode=not background and self._draw.random() < 0.5, ignore_eos=True,
            background=background, gpu_frames=ALL_FRAMES,
        )  # fmt: skip


def compare(engine: Engine, rate: float, seconds: float) -> None:
    """Print a line for each way."""
    with_lanes, without = engine.lanes.runners, list[ModelRunner]()
    for jobs in (False, True):
        for lanes in (without, with_lanes):
            engine.lanes.runners = lanes
            traffic = EngineTraffic(engine, rate, jobs=jobs)
            traffic.run(seconds)
            job_s = traffic.job_frames * engine.info.frame_samples / engine.info.sample_rate
            p50, p95 = np.percentile(list(traffic.waited_ms.values()), [50, 95])
            print(
                f"{rate:g} r/s, {'jobs' if jobs else 'no jobs'}, {len(lanes)} lanes: first audio p50 {p50:.2f}, p95"
                f" {p95:.2f} ms ({len(traffic.waited_ms)} listeners), jobs"
                f" {job_s / seconds:.0f} s of audio a second",
                flush=True,
            )


def main(arguments: list[str]) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.experiments.gpu.newcomers", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--random", metavar="NAME", default="1.7B-CustomVoice", help="random weights of this shape")
    parser.add_argument("--max-num-seqs", type=int, default=192)
    parser.add_argument("--rate", type=float, default=20.0, help="listeners a second")
    parser.add_argument("--duration", type=float, default=8.0, help="seconds for each of four ways")
    options = parser.parse_args(arguments)
    config = TalkerConfig(max_num_seqs=options.max_num_seqs, max_num_waiting=1024, kv_cache_bytes=16 << 30)
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "checkpoint"
        write_checkpoint(directory, SHAPES[options.random], Options())
        engine = load_engine(directory, config, StartClock())
    leave_loaded_alone()
    compare(engine, options.rate, options.duration)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
