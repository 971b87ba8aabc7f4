"""Does a long job come through kills? `python -m tools.experiments.faults.long_job --model ckpt --out results`.

One job of a million characters is made while ten kills end its engine process, its talker, the replica that makes jobs,
and all replicas at once, after which the server starts again. At the end the store must hold each segment once. With
`--deterministic` the job is made twice, the first time undisturbed, and both must have the same codes.

On a CPU, in miniature: `--model tiny --cpu --characters 20000 --frames 25`, where `tiny` is a random checkpoint.
"""

import argparse
import contextlib
import itertools
import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serve_app.config import AppConfig, JobSettings, VoiceSettings, read_config
from serve_app.jobs.job_store import JobStore
from serve_app.voices.voice_store import VoiceStore
from tests.faults.pools import CODEC, ENGINE, TALKER, Service, serving

PATH, JOBS, SERVER = "/v1/audio/jobs", "Jobs", "server"
KILLS = (ENGINE, JOBS, TALKER, SERVER, ENGINE, JOBS, TALKER, JOBS, ENGINE, SERVER)
CHAPTER = 50_000  # characters of a part
AT_ONCE = 32  # segments that may be under way
_PATIENCE_S, _LOOK_S, _SAY_S = 180.0, 0.2, 5.0
_WORDS = (
    *("the", "harbour", "was", "quiet", "that", "evening", "and", "two", "lamps", "were", "lit"),
    *("along", "the", "wall", "while", "boats", "moved", "on", "the", "water"),
)


def prose(characters: int, first: int) -> str:
    """Sentences of eight to sixteen words, no two chapters alike."""
    sentences, length = list[str](), 0
    for number in itertools.count(first):
        words = [_WORDS[(number * 7 + place * (1 + number % 5)) % len(_WORDS)] for place in range(8 + number % 9)]
        sentences.append(f"{' '.join(words).capitalize()}.")
        length += len(sentences[-1]) + 1
        if length >= characters:
            return " ".join(sentences)
    raise AssertionError


@dataclass
class JobRun:
    """One job, from its creation to its end, across servers."""

    options: argparse.Namespace
    application: AppConfig
    kills: Sequence[str]
    job: str = ""
    killed: list[str] = field(default_factory=list)
    memory_mb: list[tuple[int, dict[str, int]]] = field(default_factory=list)  # by segments done, of each process
    making_s: float = 0.0  # with a server up
    audio_s: float = 0.0

    def through(self) -> str:
        """The finished job's id. Raises AssertionError where it fails or stands still."""
        left = list(self.kills)
        while True:
            began_s = time.monotonic()
            with serving(self.application) as service:
                print(f"ready after {time.monotonic() - began_s:.1f} s", flush=True)
                began_s = time.monotonic()
                self.job = self.job or self._create(service)
                stopped = self._kill(service, left)
                self.making_s += time.monotonic() - began_s
                if not stopped:
                    return self.job

    def _create(self, service: Service) -> str:
        count = max(1, self.options.characters // CHAPTER)
        each = self.options.characters // count
        inputs = [{"input": prose(each, 10_000 * chapter)} for chapter in range(count)]
        manner = {"voice": self.options.voice, "seed": 3, "ignore_eos": True, "max_new_tokens": self.options.frames}
        began_s = time.monotonic()
        extra = {"deterministic": self.options.deterministic, "max_segment_chars": self.options.segment}
        told = ask(service, PATH, {**manner, **extra, "inputs": inputs})
        print(f"{told['segments']['total']} segments, planned in {time.monotonic() - began_s:.1f} s", flush=True)
        return str(told["id"])

    def _kill(self, service: Service, left: list[str]) -> bool:
        """Whether all replicas were killed; else the job is complete."""
        for told in self._watch(service):
            done, total = told["segments"]["done"], told["segments"]["total"]
            self.audio_s = told.get("audio_s", 0.0)
            due = total * (len(self.kills) - len(left) + 1) / (len(self.kills) + 1)
            if not left or done < due:
                continue
            what = left.pop(0)
            print(f"{done:6} of {total} segments: kill {what}", flush=True)
            if what == SERVER:
                for process in service.processes_titled("ServeReplica"):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                self.killed.append(f"{what} at {done}")
                return True
            service.kill(service.processes(what)[0])
            began_s = time.monotonic()
            next(each for each in self._watch(service) if each["segments"]["done"] > done + AT_ONCE)
            self.killed.append(f"{what} at {done}: {time.monotonic() - began_s:.1f} s to new segments")
        return False

    def _watch(self, service: Service) -> Iterator[dict[str, Any]]:
        """What the job says, until it is complete."""
        moved_s, said_s, most = time.monotonic(), 0.0, -1
        while True:
            told = ask(service, f"{PATH}/{self.job}")
            assert told["status"] in ("queued", "running", "paused", "completed"), told
            now_s, done = time.monotonic(), told["segments"]["done"]
            if done > most:
                moved_s, most = now_s, done
            assert now_s < moved_s + _PATIENCE_S, f"nothing for {_PATIENCE_S:g} s: {told}"
            if now_s >= said_s + _SAY_S:
                print(f"{done:6} of {told['segments']['total']} segments, {told.get('audio_s', 0):.0f} s", flush=True)
                if not self.kills:  # processes that were replaced are not compared
                    self.memory_mb.append((done, memory_mb(service)))
                said_s = now_s
            yield told
            if told["status"] == "completed":
                return
            time.sleep(_LOOK_S)


def memory_mb(service: Service) -> dict[str, int]:
    """What the processes of each kind have in memory."""
    held = {}
    for kind in (JOBS, "Ingress", TALKER, CODEC, ENGINE):
        statuses = [Path(f"/proc/{process}/status").read_text() for process in service.processes(kind)]
        held[kind] = sum(int(status.partition("VmRSS:")[2].split()[0]) for status in statuses) // 1024
    return held


def ask(service: Service, path: str, body: object = None) -> dict[str, Any]:
    """The answer; asked again while no replica answers."""
    until_s = time.monotonic() + _PATIENCE_S
    content = None if body is None else json.dumps(body).encode()
    while True:
        try:
            with urllib.request.urlopen(service.url + path, content, timeout=_PATIENCE_S) as answer:
                told: dict[str, Any] = json.load(answer)
                return told
        except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
            if (isinstance(error, urllib.error.HTTPError) and error.code < 500) or time.monotonic() > until_s:
                raise
        time.sleep(_LOOK_S)


def found(folder: Path, job_id: str) -> dict[str, bytes]:
    """Codes of each segment in the store. Raises AssertionError where one is missing or there twice."""
    store = JobStore(VoiceStore(str(folder)))
    made = [each for each, _ in store.made(job_id)]
    wanted = sum(store.existing_job(job_id).num_segments)
    assert len({each.id for each in made}) == len(made), "a segment is there twice"
    assert len(made) == wanted, f"{wanted - len(made)} of {wanted} segments are missing"
    return {str(each.id): store.content(job_id, each).codes.tobytes() for each in made}


def application(options: argparse.Namespace, store: Path) -> AppConfig:
    """The config file with a store."""
    app = read_config(options.config)
    jobs = JobSettings(max_bytes=1 << 40)
    api = app.api.model_copy(update={"voices": VoiceSettings(store=str(store)), "jobs": jobs})
    changes: dict[str, Any] = {"deterministic": options.deterministic and not options.cpu}
    pools: dict[str, Any] = {}
    if options.cpu:
        changes |= {"device": "cpu", "max_num_seqs": 8, "gpu_memory_fraction": None}
        small = {"num_cpus": 0.1, "num_gpus": 0.0}
        pools = {name: getattr(app, name).model_copy(update=small) for name in ("talker_pool", "ingress_pool")}
        pools["codec_pool"] = app.codec_pool.model_copy(update={"num_cpus": 0.1})
    talker = app.talker.model_copy(update=changes)
    return app.model_copy(update={"model": options.model, "api": api, "talker": talker, **pools})


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.experiments.faults.long_job", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("--model", required=True, help="a checkpoint directory")
    add("--out", type=Path, required=True, help="new folder for the store and the result")
    add("--config", type=Path, default=Path("cluster/serve/one-gpu.yaml"))
    add("--characters", type=int, default=1_000_000)
    add("--segment", type=int, default=300, help="characters of a segment, at most")
    add("--frames", type=int, default=250, help="of each segment: random weights end none by themselves")
    add("--kills", type=int, default=len(KILLS), help="of the ten kills, the first so many")
    add("--voice", default="ryan")
    add("--deterministic", action="store_true", help="make the job twice, and compare the codes")
    add("--cpu", action="store_true", help="the talker on a CPU, to try the command itself")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Command line; 0 where each segment is there once, with the same codes where that was asked for."""
    options = parsed(arguments)
    options.out.mkdir(parents=True)
    store = options.out.resolve() / "store"
    app = application(options, store)
    run = JobRun(options, app, KILLS[: options.kills])
    began_s = time.monotonic()
    codes = found(store, run.through())
    took_s = time.monotonic() - began_s
    summary = (
        f"{options.characters} characters, {len(codes)} segments, none missing, none twice, after {len(run.killed)} "
        f"kills: {run.audio_s / 3600:.2f} hours of audio in {took_s:.0f} s, of which a server was up for "
        f"{run.making_s:.0f} s: {run.audio_s / took_s:.0f} and {run.audio_s / run.making_s:.0f} hours an hour"
    )
    lines = [summary, *run.killed]
    if run.memory_mb:
        settled = next(memory for done, memory in run.memory_mb if done * 10 >= len(codes))
        last = run.memory_mb[-1][1]
        lines += [f"{kind}: {mb} MB behind a tenth, {last[kind]} MB at the end" for kind, mb in settled.items()]
    equal = True
    if options.deterministic:
        quiet = found(store, JobRun(options, app, ()).through())
        same = sum(codes[place] == quiet[place] for place in quiet)
        equal = quiet.keys() == codes.keys() and same == len(quiet)
        lines.append(f"{same} of {len(quiet)} segments have the codes of an undisturbed run")
    print("\n".join(lines), flush=True)
    (options.out / "long_job.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return int(not equal)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
