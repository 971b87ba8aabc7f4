"""Are a stream's codes the same alone and under load? `python -m tools.experiments.gpu.same_codes --deterministic ...`.

The same requests, seeds and all, one after the other and then as they arrive at a rate. On a GPU the batch's shape
changes rounding, and with it the codes, unless `talker.deterministic` is set.
"""

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import ray

from deployments.protocol import Sampling, SynthesisRequest
from loadtest.arrivals import Phase, ScheduledRequest, SpeechLengths
from loadtest.settings import Settings
from serve_app.config import AppConfig, read_config
from serve_app.speech.segments import Utterance
from tools.suites.listening import Heard, Listener
from tools.suites.pools import serving


def asked(planned: ScheduledRequest) -> Utterance:
    """Streamed text and a length of its own; the seed is the request's number."""
    assert planned.frames is not None
    return Utterance(
        SynthesisRequest(
            f"r{planned.index}",
            planned.text,
            voice="ryan",
            language="english",
            sampling=Sampling(max_new_tokens=planned.frames + 1),
            seed=planned.index,
            non_streaming_mode=False,
            ignore_eos=True,
        )
    )


def alone(schedule: Sequence[ScheduledRequest]) -> list[Heard]:
    """Each request when the one before it has ended."""
    listener = Listener.remote(inline=False)
    return [ray.get(listener.listen.remote(asked(planned))) for planned in schedule]


def under_load(schedule: Sequence[ScheduledRequest]) -> list[Heard]:
    listener, began_s, coming = Listener.remote(inline=False), time.monotonic(), []
    for planned in schedule:
        time.sleep(max(0.0, planned.planned_s - (time.monotonic() - began_s)))
        coming.append(listener.listen.remote(asked(planned)))
    return list(ray.get(coming))


@dataclass(frozen=True, slots=True)
class CodesComparison:
    """Two deliveries of the same requests."""

    requests: int
    frames: int  # of all
    equal: int  # requests all of whose codes are equal
    first_differences: list[int]  # frame, of those that are not
    frames_before_difference: int
    most_at_once: int  # streams, under load


def compare(quiet: Sequence[Heard], loaded: Sequence[Heard]) -> CodesComparison:
    """Raises AssertionError where a stream failed."""
    firsts, common = [], 0
    for one, other in zip(quiet, loaded, strict=True):
        assert one.error is None, one.error
        assert other.error is None, other.error
        assert one.codes.shape == other.codes.shape, f"{one.codes.shape[0]} and {other.codes.shape[0]} frames"
        differs = np.flatnonzero((one.codes != other.codes).any(axis=1))
        firsts += differs[:1].tolist()
        common += int(differs[0]) if len(differs) else len(one.codes)
    changes = [(heard.arrivals_s[0], 1) for heard in loaded] + [(heard.arrivals_s[-1], -1) for heard in loaded]
    return CodesComparison(
        requests=len(quiet),
        frames=sum(len(heard.codes) for heard in quiet),
        equal=len(quiet) - len(firsts),
        first_differences=firsts,
        frames_before_difference=common,
        most_at_once=max(itertools.accumulate(change for _, change in sorted(changes))),
    )


def application(options: argparse.Namespace) -> AppConfig:
    """The config file, deterministic or not."""
    app = read_config(options.config)
    talker = app.talker.model_copy(update={"deterministic": options.deterministic})
    return app.model_copy(update={"model": options.model, "talker": talker})


def main(arguments: list[str]) -> int:
    """Command line; returns 1 where codes differ in deterministic mode."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.experiments.gpu.same_codes", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--model", required=True, help="a checkpoint directory")
    parser.add_argument("--config", type=Path, default=Path("cluster/serve/one-gpu.yaml"))
    parser.add_argument("--deterministic", action="store_true", help="talker.deterministic: true")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--rate", type=float, default=40.0, help="requests per second, the second time")
    parser.add_argument("--speech-s", type=float, default=5.7, help="median length")
    parser.add_argument("--rates", default="", help="then measure these rates over HTTP, such as 1,10,40")
    parser.add_argument("--duration", type=float, default=8.0, help="seconds for each of them")
    parser.add_argument("--out", type=Path, required=True, help="new folder for the results")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True)
    phases = (Phase("measured", options.rate, 2 * options.requests / options.rate),)
    lengths = SpeechLengths(options.speech_s, 0.35)
    schedule = Settings("", phases, seed=1, lengths=lengths).schedule()[: options.requests]
    began_s = time.monotonic()
    with serving(application(options)) as service:
        print(f"ready after {time.monotonic() - began_s:.1f} s", flush=True)
        done = compare(alone(schedule), under_load(schedule))
        print(
            f"deterministic {options.deterministic}: {done.equal} of {done.requests} streams have equal codes alone "
            f"and at {options.rate:g} r/s ({done.most_at_once} at once); "
            f"{done.frames_before_difference} of {done.frames} frames come before a first difference",
            flush=True,
        )
        (options.out / "codes.json").write_text(json.dumps({name: getattr(done, name) for name in done.__slots__}))
        if options.rates:
            measure(service.url, options)
    return int(options.deterministic and done.equal < done.requests)


def measure(url: str, options: argparse.Namespace) -> None:
    """`python -m loadtest rates` on the same server."""
    fields = json.dumps({"language": "english", "non_streaming_mode": False})
    where = ["--url", url, "--out", str(options.out / "rates"), "--rates", options.rates]
    how = ["--duration", str(options.duration), "--min-requests", "0", "--speech-s", str(options.speech_s)]
    more = ["--texts", "one-sentence", "--voice", "ryan", "--processes", "2", "--extra", fields]
    subprocess.run([sys.executable, "-m", "loadtest", "rates", *where, *how, *more], check=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
