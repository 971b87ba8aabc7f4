"""Does a CPU pool of codec replicas keep up beside one GPU?
`python -m tools.experiments.gpu.pool --model ckpt --out results`.

For each layout of the pool (replicas x workers, and how chunks grow) the application with `codec.placement: pool`, a
minute at each rate, and at the end, with `--kill 8,8`, two in which a codec replica dies. On CPUs, in miniature:
`--model embedded --cpu --layouts 1x2 --rates 0.3 --duration 20 --speech-s 1.5`.
"""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from loadtest.metrics import Summary
from loadtest.tables import COLUMNS
from serve_app.config import AppConfig, read_config
from tools.experiments.gpu.several import PATIENT, Bench, about
from tools.suites.pools import CODEC, serving

IN_TIME = 0.99  # of the requests have no underrun
TTFA_MS = {4.0: 90.0, 10.0: 120.0}  # p95, at the rates for which one is asked
_OF_CODEC = 'pool="codec"'
_EXPORTED_S = 11.0  # until what happened shows in the metrics
TITLES = ("sent", "TTFA p50/p95/p99, ms", "audio s/s", "in time", "underruns", "refused", "failed")


@dataclass(frozen=True, slots=True)
class Layout:
    """How the cores of the pool are cut."""

    replicas: int
    workers: int

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Such as 4x3: four replicas of three workers."""
        replicas, workers = text.split("x")
        return cls(int(replicas), int(workers))

    def __str__(self) -> str:
        return f"{self.replicas}x{self.workers}"


@dataclass(frozen=True, slots=True)
class PlacementRow:
    """What was heard at one rate."""

    placement: str
    layout: Layout
    what: str
    rate: float
    summary: Summary

    @property
    def problems(self) -> list[str]:
        share, found = self.summary.request_viability or 0.0, []
        if share < IN_TIME:
            found.append(f"{share:.1%} in time, not {IN_TIME:.0%}")
        if self.summary.refused or self.summary.failed:
            found.append(f"{self.summary.refused} refused, {self.summary.failed} failed")
        most_ms, ttfa_s = TTFA_MS.get(self.rate), self.summary.ttfa_s
        if most_ms is not None and (ttfa_s is None or 1000 * ttfa_s.p95 > most_ms):
            found.append(f"TTFA p95 above {most_ms:.0f} ms")
        return found

    def cells(self) -> list[str]:
        known = [COLUMNS[title](self.summary) for title in TITLES]
        return [
            self.placement,
            str(self.layout),
            self.what,
            f"{self.rate:g}",
            *known,
            "; ".join(self.problems) or "holds",
        ]


def table(rows: Sequence[PlacementRow]) -> str:
    titles = ["placement", "replicas x workers", "what", "r/s", *TITLES, "aim"]
    lines = [titles, ["---"] * len(titles), *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def application(options: argparse.Namespace, layout: Layout, placement: str) -> AppConfig:
    """The config file with such a pool."""
    app = read_config(options.config)
    codec: dict[str, object] = {"placement": placement, "workers": layout.workers}
    pool = {"replicas": layout.replicas, "num_cpus": float(layout.workers)}
    talker, talker_pool, ingress_pool, api = app.talker, app.talker_pool, app.ingress_pool, app.api
    if options.cpu:
        small = {"num_cpus": 0.1, "num_gpus": 0.0}
        pool |= {"num_cpus": 0.1}
        talker = talker.model_copy(update={"device": "cpu", "max_num_seqs": 8, "gpu_memory_fraction": None})
        talker_pool, ingress_pool = (each.model_copy(update=small) for each in (talker_pool, ingress_pool))
        api = api.model_copy(update={"admission": PATIENT})
    changes = {"model": options.model, "api": api, "talker": talker, "codec": app.codec.model_copy(update=codec)}
    pools = {"talker_pool": talker_pool, "ingress_pool": ingress_pool}
    return app.model_copy(update={**changes, **pools, "codec_pool": app.codec_pool.model_copy(update=pool)})


def measured(options: argparse.Namespace, layout: Layout, placement: str) -> Iterator[PlacementRow]:
    print(f"starting {placement}, {layout}", flush=True)
    with serving(application(options, layout, placement), print) as service:
        bench = Bench(service, options, placement=f"{placement}-{layout}", talkers=1)

        def kill() -> None:
            os.kill(service.processes(CODEC)[0], signal.SIGKILL)

        def kill_worker() -> None:
            os.kill(service.decoders()[0], signal.SIGKILL)

        loads: list[tuple[float, str, Callable[[], None] | None]] = [(rate, "load", None) for rate in options.rates]
        loads += [(rate, "a codec replica killed", kill) for rate in options.kill]
        if options.kill and layout.workers > 1:
            loads.append((options.kill[0], "a decoder process killed", kill_worker))
        for rate, what, act in loads:
            service.wait_for(CODEC, layout.replicas)  # the one that was killed before is there again
            row, _ = bench.load(rate, options.duration, what=what.replace(" ", "-"), act=act)
            yield PlacementRow(placement, layout, what, rate, row.result.summary)
        print(asyncio.run(behind(service.url)), flush=True)


async def behind(url: str) -> str:
    """What `/metrics` says of all that this pool has decoded; a replica that was killed takes its counts along."""
    await asyncio.sleep(_EXPORTED_S)
    async with aiohttp.ClientSession(url) as http, http.get("/metrics") as answer:
        lines = (await answer.text()).splitlines()

    def total(name: str, *labels: str) -> float:
        found = [line for line in lines if line.startswith(f"ray_talkray_{name}{{")]
        return sum(float(line.split()[-1]) for line in found if all(label in line for label in labels))

    codec, talker = (total("decoded_seconds_total", f'pool="{pool}"') for pool in ("codec", "talker"))
    # Batches have 1, 2, 4, ... streams. Ray's sums of histograms are of the middles of their buckets.
    calls = total("batch_size_count", _OF_CODEC)
    up_to = {size: total("batch_size_bucket", _OF_CODEC, f'le="{size}.0"') for size in (1, 2, 4, 8, 16)}
    streams = sum(size * (count - up_to.get(size // 2, 0.0)) for size, count in up_to.items())
    return (
        f"{codec:.0f} s of audio decoded by the pool, {codec / (codec + talker):.1%} of all; "
        f"streams shared {1 - up_to[1] / calls:.1%} of its calls, {streams / calls:.2f} each on average"
    )


def numbers(value: str) -> list[float]:
    """Such as 4,8,10."""
    return [float(part) for part in value.split(",")]


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.experiments.gpu.pool", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", required=True, help="a checkpoint directory, or embedded")
    add("--out", type=Path, required=True, help="new folder for the results")
    add("--config", type=Path, default=Path("cluster/serve/one-gpu.yaml"))
    add("--placements", default="pool", help="such as pool,hybrid")
    add("--layouts", default="16x1,4x4,4x3", help="codec replicas x workers of each")
    add("--rates", type=numbers, default=[4.0, 8.0, 10.0, 14.0], help="requests a second")
    add("--kill", type=numbers, default=[], help="at each of these rates, then, a codec replica is killed")
    add("--duration", type=float, default=60.0, help="seconds of each rate")
    add("--settle", type=float, default=3.0, help="seconds of load before it, not measured")
    add("--speech-s", type=float, default=5.7, help="median length of the answers")
    add("--extra", default="{}", help="JSON: more fields of every request")
    add("--processes", type=int, help="client processes")
    add("--rate-per-process", type=float, default=30.0, help="requests a second that a client process sends")
    add("--cpu", action="store_true", help="the talker on a CPU, to try the command itself")
    options = parser.parse_args(arguments)
    options.arguments = arguments
    return options


def main(arguments: list[str]) -> int:
    """Command line; 0 where every row holds."""
    options = parsed(arguments)
    options.out.mkdir(parents=True)
    facts, rows = about(options), list[PlacementRow]()
    head = f"`python -m tools.experiments.gpu.pool {' '.join(arguments)}`; commit `{facts['commit']}`; {facts['host']}."
    for placement in options.placements.split(","):
        for layout in map(Layout.parse, options.layouts.split(",")):
            for row in measured(options, layout, placement):
                rows.append(row)
                print(f"\n{table(rows)}", flush=True)
                (options.out / "table.md").write_text(f"{head}\n\n{table(rows)}\n", encoding="utf-8")
    missed = [row for row in rows if row.problems]
    print(f"\n{len(rows) - len(missed)} of {len(rows)} rows hold; {options.out / 'table.md'}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
