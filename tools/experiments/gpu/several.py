"""Measure whether N talkers on N GPUs of one host carry N times the load of one.
`python -m tools.experiments.gpu.several --model ckpt --out ...`.

Runs the application for each placement and each N, with N talkers, for a minute at N x `--rate`. `--kill` and `--roll`
then measure the other talkers while one is killed, and while a rolling update replaces all. No response may be
lost.

A small run on CPUs: `--model embedded --cpu --talkers 1,2 --rate 0.9 --duration 20 --speech-s 1.5 --codecs 1`.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

from serve_app.config import AppConfig
from tools.experiments.gpu.bench import Bench, Row, adapted, benched, common_options, report
from tools.suites.pools import CODEC, TALKER, redeploy

PROGRAM = "tools.experiments.gpu.several"


def parsed(arguments: list[str]) -> argparse.Namespace:
    config, placements = "cluster/serve/four-gpus.yaml", "inline,hybrid"
    parser = common_options(PROGRAM, __doc__, config=config, placements=placements)
    add = parser.add_argument
    add("--talkers", default="1,2,4,8")
    add("--rate", type=float, default=99.0, help="requests per second for each talker")
    add("--ingresses", type=int, default=2, help="ingress replicas per talker")
    add("--codecs", type=int, default=8, help="codec replicas per talker, for hybrid placement")
    add("--kill", action="store_true", help="then kill a talker under load")
    add("--fault-duration", type=float, default=30.0, help="seconds of load with that fault")
    add("--roll", action="store_true", help="then replace all talkers under load")
    add("--roll-duration", type=float, default=240.0, help="seconds that the update may take")
    return parser.parse_args(arguments)


def application(options: argparse.Namespace, talkers: int, placement: str) -> AppConfig:
    """Return the config file with `talkers` talkers and the matching other replicas."""
    codecs = options.codecs if placement == "hybrid" else 1
    sizes = {"talker": talkers, "codec": codecs * talkers, "ingress": options.ingresses * talkers}
    return adapted(options, placement=placement, replicas=sizes)


def measured(options: argparse.Namespace) -> Iterator[Row]:
    for placement in options.placements.split(","):
        for talkers in map(int, options.talkers.split(",")):
            app = application(options, talkers, placement)
            with benched(app, options, f"{placement}, {talkers} talkers") as bench:
                yield bench.load(talkers * options.rate, options.duration)
                for is_wanted, fault in ((options.kill, killed), (options.roll, rolled)):
                    if is_wanted and talkers > 1:
                        yield fault(bench, (talkers - 1) * options.rate)


def killed(bench: Bench, rate: float) -> Row:
    """Kill one talker under load. The replacement is running at the end."""

    def kill() -> None:
        os.kill(bench.service.processes(TALKER)[0], signal.SIGKILL)

    row = bench.load(rate, bench.options.fault_duration, what="talker killed", act=kill)
    bench.service.wait_for(TALKER, bench.service.app.talker_pool.replicas)
    return row


def rolled(bench: Bench, rate: float) -> Row:
    """Replace all talkers under load. Talkers that are not replaced in time count as lost."""
    service, within_s = bench.service, bench.options.roll_duration
    old, app = {*service.processes(TALKER)}, service.app
    sizes = {TALKER: app.talker_pool.replicas, CODEC: app.codec_pool.replicas}
    talker = app.talker.model_copy(update={"max_num_waiting": app.talker.max_num_waiting + 1})

    def roll() -> None:
        until_s = time.monotonic() + within_s
        redeploy(app.model_copy(update={"talker": talker}), sizes)
        while old & {*service.processes(TALKER)} or service.num_running(TALKER) < len(old):
            if time.monotonic() > until_s:
                return
            time.sleep(0.5)
        print(f"all talkers were replaced after {time.monotonic() - until_s + within_s:.0f} s", flush=True)

    row = bench.load(rate, 1.5 * within_s, what="rolling update", act=roll)
    return replace(row, lost=row.lost + len(old & {*service.processes(TALKER)}), interrupted=())


def main(arguments: list[str]) -> int:
    """Run the command line. Return 0 if every row holds."""
    options = parsed(arguments)
    return report(options.out, ["python -m", PROGRAM, *arguments], measured(options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
