"""Measure whether a CPU pool of codec replicas keeps up with one GPU.
`python -m tools.experiments.gpu.pool --model ckpt --out results`.

Runs the application with `codec.placement: pool` for each layout of the pool (replicas x workers), a minute per rate.
With `--kill 8,8`, two more runs follow in which a codec replica dies. A small run on CPUs:
`--model embedded --cpu --layouts 1x2 --rates 0.3 --duration 20 --speech-s 1.5`.
"""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator

import aiohttp

from serve_app.config import AppConfig
from tools.experiments.gpu.bench import Row, adapted, benched, common_options, report
from tools.suites.pools import CODEC

PROGRAM = "tools.experiments.gpu.pool"
_OF_CODEC = 'pool="codec"'
_EXPORTED_S = 11.0  # time until events appear in the metrics


def numbers(value: str) -> list[float]:
    """Parse a list such as 4,8,10."""
    return [float(part) for part in value.split(",")]


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = common_options(PROGRAM, __doc__, config="cluster/serve/one-gpu.yaml", placements="pool")
    add = parser.add_argument
    add("--layouts", default="16x1,4x4,4x3", help="codec replicas x workers per replica")
    add("--rates", type=numbers, default=[4.0, 8.0, 10.0, 14.0], help="requests a second")
    add("--kill", type=numbers, default=[], help="rates for additional runs in which a codec replica is killed")
    return parser.parse_args(arguments)


def application(options: argparse.Namespace, layout: str, placement: str) -> AppConfig:
    """Return the config file with such a pool. 4x3 means four replicas with three workers each."""
    replicas, workers = map(int, layout.split("x"))
    return adapted(options, placement=placement, replicas={"codec": replicas}, workers=workers)


def measured(options: argparse.Namespace) -> Iterator[Row]:
    for placement in options.placements.split(","):
        for layout in options.layouts.split(","):
            yield from _measured(options, layout, placement)


def _measured(options: argparse.Namespace, layout: str, placement: str) -> Iterator[Row]:
    app = application(options, layout, placement)
    with benched(app, options, f"{placement}, {layout}") as bench:
        service = bench.service

        def kill() -> None:
            os.kill(service.processes(CODEC)[0], signal.SIGKILL)

        def kill_worker() -> None:
            os.kill(service.decoders()[0], signal.SIGKILL)

        loads: list[tuple[float, str, Callable[[], None] | None]] = [(rate, "load", None) for rate in options.rates]
        loads += [(rate, "a codec replica killed", kill) for rate in options.kill]
        if options.kill and app.codec.workers > 1:
            loads.append((options.kill[0], "a decoder process killed", kill_worker))
        for rate, what, act in loads:
            service.wait_for(CODEC, app.codec_pool.replicas)  # wait for the replacement of the replica killed before
            yield bench.load(rate, options.duration, what=what, act=act)
        print(asyncio.run(behind(service.url)), flush=True)


async def behind(url: str) -> str:
    """Summarize from `/metrics` the audio that this pool decoded, without the counts of killed replicas."""
    await asyncio.sleep(_EXPORTED_S)
    async with aiohttp.ClientSession(url) as http, http.get("/metrics") as answer:
        lines = (await answer.text()).splitlines()

    def total(name: str, *labels: str) -> float:
        found = [line for line in lines if line.startswith(f"ray_talkray_{name}{{")]
        return sum(float(line.split()[-1]) for line in found if all(label in line for label in labels))

    codec, talker = (total("decoded_seconds_total", f'pool="{pool}"') for pool in ("codec", "talker"))
    calls, alone = total("batch_size_count", _OF_CODEC), total("batch_size_bucket", _OF_CODEC, 'le="1.0"')
    return (
        f"{codec:.0f} s of audio decoded by the pool, {codec / (codec + talker):.1%} of all; "
        f"streams shared {1 - alone / calls:.1%} of its calls"
    )


def main(arguments: list[str]) -> int:
    """Run the command line. Return 0 if every row holds."""
    options = parsed(arguments)
    return report(options.out, ["python -m", PROGRAM, *arguments], measured(options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
