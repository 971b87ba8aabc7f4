"""How long a client that left still costs the GPU:
`python -m tools.experiments.faults.cancellation --config FILE --model MODEL`.

Times are from closing the client's connection to the moment at which the talker holds neither a row nor a KV block of
it any more, with what it takes to ask the talker included.
"""

import argparse
import asyncio
import sys
import time
from pathlib import Path

import aiohttp
import numpy as np

from serve_app.cli import ray_settings

ray_settings.apply_local()

import ray
from ray import serve

from serve_app.cli.serve.local_server import APP_NAME
from serve_app.config import AppConfig, read_config
from tests.e2e.application import running
from tests.e2e.speech import BOUND_S, PATH, endless


@ray.remote(num_cpus=0)
class Watch:
    """Asks the talker inside Ray: handles want an event loop that ends with it."""

    def __init__(self) -> None:
        self._talker = serve.get_deployment_handle("Talker", APP_NAME)

    async def reach(self, *, rows: int) -> float:
        """When the talker held so many rows, and KV blocks only with rows: of time.time()."""
        async with asyncio.timeout(BOUND_S):
            while True:
                record = await self._talker.record_autoscaling_stats.remote()
                now_s = time.time()
                if record["running"] == rows and bool(record["kv_used_ratio"]) == bool(rows):
                    return now_s


async def freed_after_s(url: str, watch: ray.actor.ActorHandle, *, streams: int, voice: str) -> float:
    """Let as many clients as `streams` hear something and leave together."""
    async with aiohttp.ClientSession(url) as session:
        answers = [await session.post(PATH, json=endless(voice=voice)) for _ in range(streams)]
        for answer in answers:
            assert await answer.content.readany()
        await watch.reach.remote(rows=streams)
        left_s = time.time()
        for answer in answers:
            answer.close()
        freed_s: float = await watch.reach.remote(rows=0)
        return freed_s - left_s


async def measure(url: str, *, times: int, streams: int, voice: str) -> float:
    """The same so many times; prints what it took, returns the longest in milliseconds."""
    watch = Watch.remote()
    took_ms = [1000 * await freed_after_s(url, watch, streams=streams, voice=voice) for _ in range(times)]
    p50, p95 = np.percentile(took_ms, (50, 95))
    print(
        f"{streams} left, {times} times: freed after p50 {p50:.1f} ms, p95 {p95:.1f} ms, longest {max(took_ms):.1f} ms"
    )
    return max(took_ms)


def main(arguments: list[str]) -> int:
    """Command line; the exit code is 1 where a client cost more than --bound-ms."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.experiments.faults.cancellation", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--config", type=Path, help="as for `talkray serve`")
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--voice", default="alloy")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--streams", type=int, nargs="+", default=[1], help="that leave together")
    parser.add_argument("--bound-ms", type=float, default=500.0)
    options = parser.parse_args(arguments)
    config = (read_config(options.config) if options.config else AppConfig()).model_copy(
        update={"model": options.model}
    )
    with running(config) as url:
        longest_ms = max(
            asyncio.run(measure(url, times=options.times, streams=streams, voice=options.voice))
            for streams in options.streams
        )
    return int(longest_ms > options.bound_ms)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
