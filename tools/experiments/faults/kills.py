"""Kill replicas during streams: `python -m tools.experiments.faults.kills --streams 500 --kills 50`.

Every stream is compared with the same request in an undisturbed run.
"""

import argparse
import itertools
import math
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from serve_app.speech.segments import Utterance
from tools.suites.listening import Heard, Speaking, gaps_after, requests, wrong
from tools.suites.pools import CODEC, ENGINE, TALKER, Service, config, serving, tiny_model

VICTIMS = (TALKER, CODEC, ENGINE)  # in rotation
NOTICED_S = 3.0  # time until Serve notices that a replica is dead


@dataclass(frozen=True, slots=True)
class Kill:
    """One killed process."""

    what: str
    at_s: float  # by time.time()


class Killer:
    """Kills replicas in rotation, as soon as at most one replica of the pools is missing."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._victims = itertools.cycle(VICTIMS)
        self._last_s = 0.0
        self.kills: list[Kill] = []

    def try_one(self) -> bool:
        """Kill the next victim if the pools can spare it."""
        running = {pool: self._service.num_running(pool) for pool in (TALKER, CODEC)}
        wanted = self._service.app.talker_pool.replicas + self._service.app.codec_pool.replicas
        if time.monotonic() - self._last_s < NOTICED_S or sum(running.values()) < wanted - 1:
            return False
        what = next(self._victims)
        if running[CODEC if what is CODEC else TALKER] == 1:
            return False
        self._service.kill(random.choice(self._service.processes(what)))
        self._last_s = time.monotonic()
        self.kills.append(Kill(what, time.time()))
        return True


def speak(
    service: Service, streams: list[Utterance], *, at_once: int, kills: int, within_s: float = math.inf
) -> tuple[Speaking, Killer]:
    """Run all streams with `kills` spread over them. Starts no stream after `within_s`."""
    speaking = Speaking(streams, at_once=at_once)
    killer, began_s = Killer(service), time.monotonic()
    while not speaking.done:
        due = kills * (len(speaking.heard) + at_once // 2) // len(streams)
        if len(killer.kills) < min(due, kills) and killer.try_one():
            print(f"{len(speaking.heard)} of {len(streams)} streams have ended, {len(killer.kills)} of {kills} kills")
        if time.monotonic() - began_s > within_s:
            speaking.drop_rest()
        speaking.go_on(may_begin=len(killer.kills) >= due - 1)
    return speaking, killer


def report(quiet: list[Heard], heard: list[Heard], kills: list[Kill]) -> int:
    """Print the results. Return 1 if streams differ from the undisturbed run."""
    problems = Counter(each.partition(": ")[2] for each in wrong(heard, quiet))
    print(f"streams: {len(heard)}, as without kills (codes equal, PCM within 1 LSB): {len(heard) - problems.total()}")
    for problem, count in problems.items():
        print(f"  {count} x {problem}")
    usual_s = np.median([gap_s for stream in quiet for gap_s in np.diff(stream.arrivals_s)])
    print(f"median time between chunks without kills: {usual_s:.3f} s")
    print(f"{'killed':<16}{'times':>6}{'streams then':>14}{'gap p50, s':>12}{'p95':>8}{'longest':>9}")
    for what, name in zip(VICTIMS, ("talker", "codec", "engine process"), strict=True):
        moments = [kill.at_s for kill in kills if kill.what is what]
        gaps = [max(0.0, gap - usual_s) for at_s in moments for gap in gaps_after(at_s, heard)] or [0.0]
        p50, p95 = np.percentile(gaps, (50, 95))
        print(f"{name:<16}{len(moments):>6}{len(gaps):>14}{p50:>12.3f}{p95:>8.3f}{max(gaps):>9.3f}")
    return int(problems.total() > 0)


def main(arguments: list[str]) -> int:
    """Run the command line and return the exit code."""
    program = "python -m tools.experiments.faults.kills"
    parser = argparse.ArgumentParser(prog=program, description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--at-once", type=int, default=10)
    parser.add_argument("--frames", type=int, default=50, help="frames of each stream, 80 ms each")
    parser.add_argument("--within-s", type=float, default=900, help="seconds after which no stream is started")
    parser.add_argument("--replicas", type=int, default=3, help="of each pool")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        model = tiny_model(Path(scratch) / "tiny")
        with serving(config(model, talkers=options.replicas, codecs=options.replicas)) as service:
            asked = requests(2 * options.at_once, frames=options.frames)
            quiet = Speaking(asked, at_once=options.at_once).finish()
            repeated = list(itertools.islice(itertools.cycle(asked), options.streams))
            limits = {"at_once": options.at_once, "kills": options.kills, "within_s": options.within_s}
            speaking, killer = speak(service, repeated, **limits)
            return report(quiet, speaking.heard, killer.kills)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
