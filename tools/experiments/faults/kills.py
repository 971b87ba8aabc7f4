"""Streams among kills: `python -m tools.experiments.faults.kills --streams 500 --kills 50`.

Every stream is compared with the same request as it was spoken when nothing was killed.
"""

import argparse
import itertools
import math
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from serve_app.speech.segments import Utterance
from tools.suites.listening import Heard, Speaking, difference, gaps_after, requests
from tools.suites.pools import CODEC, ENGINE, TALKER, Service, config, serving, tiny_model

VICTIMS = (TALKER, CODEC, ENGINE)  # in turn
NOTICED_S = 3.0  # Serve has noticed by then that a replica is dead
PROGRESS_S = 10.0


@dataclass(frozen=True, slots=True)
class Kill:
    """One process that was killed."""

    what: str
    at_s: float  # of time.time()


class ProgressLog:
    """Lines that say how far it has come, none sooner than `every_s` after the last."""

    def __init__(self, every_s: float = PROGRESS_S) -> None:
        self._began_s = self._said_s = time.monotonic()
        self._every_s = every_s

    def __call__(self, line: str) -> None:
        now_s = time.monotonic()
        if now_s - self._said_s >= self._every_s:
            self._said_s = now_s
            print(f"{now_s - self._began_s:6.0f} s: {line}", flush=True)


class Killer:
    """Takes replicas away in turn: the next one when all but one of both pools run."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._victims = itertools.cycle(VICTIMS)
        self._last_s = 0.0
        self.kills: list[Kill] = []

    def try_one(self) -> None:
        """Kill the next victim if the pools can spare it."""
        running = {pool: self._service.num_running(pool) for pool in (TALKER, CODEC)}
        wanted = self._service.app.talker_pool.replicas + self._service.app.codec_pool.replicas
        if time.monotonic() - self._last_s < NOTICED_S or sum(running.values()) < wanted - 1:
            return
        what = next(self._victims)
        if running[CODEC if what is CODEC else TALKER] > 1:
            self._service.kill(random.choice(self._service.processes(what)))
            self._last_s = time.monotonic()
            self.kills.append(Kill(what, time.time()))


def speak(
    service: Service,
    streams: list[Utterance],
    *,
    at_once: int,
    kills: int,
    within_s: float = math.inf,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Speaking, Killer]:
    """Speak all streams, with that many kills spread over them; begin none when the time is up."""
    speaking = Speaking(streams, at_once=at_once)
    killer, began_s = Killer(service), time.monotonic()
    while not speaking.done:
        due = kills * (len(speaking.heard) + at_once // 2) // len(streams)
        if len(killer.kills) < min(due, kills):
            killer.try_one()
        if time.monotonic() - began_s > within_s:
            speaking.drop_rest()
        speaking.go_on(may_begin=len(killer.kills) >= due - 1)
        say(f"{len(speaking.heard)} of {len(streams)} streams have ended, {len(killer.kills)} of {kills} kills")
    return speaking, killer


def medians(heard: list[Heard]) -> float:
    """Median time between two chunks of a stream."""
    return statistics.median(
        later - earlier for stream in heard for earlier, later in itertools.pairwise(stream.arrivals_s)
    )


def percentile(values: list[float], share: float) -> float:
    """The value that `share` of all are not above."""
    return sorted(values)[min(len(values) - 1, round(share * (len(values) - 1)))]


def report(quiet: Speaking, speaking: Speaking, killer: Killer) -> int:
    """Print what happened; the number of streams that were not as they should have been."""
    expected = {heard.request_id.split(".")[0]: heard for heard in quiet.heard}
    wrong = Counter(difference(expected[heard.request_id.split(".")[0]], heard) for heard in speaking.heard)
    same = wrong.pop(None, 0)
    usual_s = medians(quiet.heard)
    print(f"streams: {len(speaking.heard)}, as without kills (codes equal, PCM within 1 LSB): {same}")
    for problem, count in wrong.items():
        print(f"  {count} x {problem}")
    print(f"median time between chunks without kills: {usual_s:.3f} s")
    print(f"{'killed':<16}{'times':>6}{'streams then':>14}{'gap p50, s':>12}{'p95':>8}{'longest':>9}")
    names = {TALKER: "talker", CODEC: "codec", ENGINE: "engine process"}
    for what in VICTIMS:
        moments = [kill.at_s for kill in killer.kills if kill.what is what]
        gaps = [max(0.0, gap - usual_s) for at_s in moments for gap in gaps_after(at_s, speaking.heard)] or [0.0]
        columns = f"{statistics.median(gaps):>12.3f}{percentile(gaps, 0.95):>8.3f}{max(gaps):>9.3f}"
        print(f"{names[what]:<16}{len(moments):>6}{len(gaps):>14}{columns}")
    return len(speaking.heard) - same


def main(arguments: list[str]) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.experiments.faults.kills", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--at-once", type=int, default=10)
    parser.add_argument("--frames", type=int, default=50, help="of each stream, 80 ms each")
    parser.add_argument("--within-s", type=float, default=900, help="begin no stream after that")
    parser.add_argument("--replicas", type=int, default=3, help="of each pool")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        model = tiny_model(Path(scratch) / "tiny")
        with serving(config(model, talkers=options.replicas, codecs=options.replicas)) as service:
            asked = requests(2 * options.at_once, frames=options.frames)
            quiet = Speaking(asked, at_once=options.at_once)
            quiet.finish()
            repeated = list(itertools.islice(itertools.cycle(asked), options.streams))
            began_s = time.monotonic()
            speaking, killer = speak(
                service,
                repeated,
                at_once=options.at_once,
                kills=options.kills,
                within_s=options.within_s,
                say=ProgressLog(),
            )
            took_s, audio_s = time.monotonic() - began_s, options.frames * 0.08
            print(f"{took_s:.0f} s, {options.at_once} streams of {audio_s:.1f} s at once")
            print(f"replicas in each pool: {options.replicas}")
            return min(1, report(quiet, speaking, killer))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
