"""Hours in minutes: `python -m tests.faults.soak --minutes 20`.

Streams without end among kills, at a share of what the machine can do; reports what grows.
"""

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import ray
from ray import serve

from serve_app.local_server import APP_NAME
from tests.faults.kills import Killer, Progress, percentile
from tests.faults.listener import gaps_after
from tests.faults.pools import CODEC, TALKER, Service, config, serving, tiny_model
from tests.faults.speaking import Speaking, requests, wrong

INGRESS = "Ingress"
CONTROLLER = "ServeController"
FRAMES = 60
PROGRESS_S = 60.0


@dataclass(frozen=True, slots=True)
class Held:
    """What one process holds."""

    mebibytes: float
    handles: int


def held(process: int) -> Held:
    """Resident memory and open files of a process."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return Held(pages * 4096 / 2**20, len(list(Path(f"/proc/{process}/fd").iterdir())))


def survey(service: Service) -> dict[int, Held]:
    """Of the processes that nobody kills, and of the replicas."""
    titles = (f"ServeReplica:{APP_NAME}:{INGRESS}", CONTROLLER, "raylet", "gcs_server")
    processes = {each for title in titles for each in service.processes_titled(title)}
    return {process: held(process) for process in processes | {*service.processes(TALKER), *service.processes(CODEC)}}


@ray.remote(num_cpus=0)
def sequences_left() -> tuple[int, int]:
    """Sequences that run or wait on a talker when nobody listens any more."""
    handle = serve.get_deployment_handle(TALKER, APP_NAME)
    handle._init(_run_router_in_separate_loop=True)
    record: dict[str, float] = handle.record_autoscaling_stats.remote().result(timeout_s=10)
    return int(record["running"]), int(record["waiting"])


def main(arguments: list[str]) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--at-once", type=int, default=8, help="streams")
    parser.add_argument("--kill-every-s", type=float, default=20)
    parser.add_argument("--replicas", type=int, default=3, help="of each pool")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        model = tiny_model(Path(scratch) / "tiny")
        with serving(config(model, talkers=options.replicas, codecs=options.replicas)) as service:
            return soak(service, options)


def soak(service: Service, options: argparse.Namespace) -> int:
    """Speak and kill until the time is up, then report."""
    asked = requests(4 * options.at_once, frames=FRAMES)
    expected = Speaking(asked, at_once=options.at_once).finish()
    before, began_s, killer, bad, gaps, count = survey(service), time.monotonic(), Killer(service), [], [], 0
    say = Progress(PROGRESS_S)
    while time.monotonic() - began_s < 60 * options.minutes:
        speaking, num_kills = Speaking(asked, at_once=options.at_once), len(killer.kills)
        while not speaking.done:
            speaking.go_on(may_begin=True)
            if time.monotonic() - began_s > options.kill_every_s * (len(killer.kills) + 1):
                killer.try_one()
        bad += wrong(speaking.heard, expected)
        gaps += [gap for kill in killer.kills[num_kills:] for gap in gaps_after(kill.at_s, speaking.heard)]
        count += len(speaking.heard)
        say(f"{count} streams, {len(killer.kills)} kills, {len(bad)} streams not as without them")
    service.wait_for(TALKER, options.replicas)
    service.wait_for(CODEC, options.replicas)
    after = survey(service)
    minutes = (time.monotonic() - began_s) / 60
    print(f"{minutes:.1f} minutes, {count} streams of {FRAMES * 0.08:.1f} s, {options.at_once} at once")
    print(f"kills: {len(killer.kills)}, streams not as without them: {len(bad)}")
    for problem in bad:
        print(f"  {problem}")
    if gaps:
        print(f"from a kill to the next audio: p50 {percentile(gaps, 0.5):.2f} s, longest {max(gaps):.2f} s")
    print("sequences left on a talker, running and waiting:", ray.get(sequences_left.remote()))
    report_growth(service, before, after)
    return min(1, len(bad))


def report_growth(service: Service, before: dict[int, Held], after: dict[int, Held]) -> None:
    """Print what the processes that lived all the time hold more than at the beginning."""
    titles = {INGRESS: "ingress", CONTROLLER: "controller", "raylet/raylet": "raylet", "gcs_server": "gcs"}
    titles |= {TALKER: "talker", CODEC: "codec"}
    print(f"{'process':<12}{'MiB before':>12}{'after':>8}{'handles before':>16}{'after':>8}")
    for process in sorted(before.keys() & after.keys()):
        names = [name for title, name in titles.items() if process in service.processes_titled(title)]
        old, new = before[process], after[process]
        print(
            f"{(names or ['other'])[0]:<12}{old.mebibytes:>12.0f}{new.mebibytes:>8.0f}{old.handles:>16}{new.handles:>8}"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
