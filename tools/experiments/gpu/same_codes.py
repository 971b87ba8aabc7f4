"""Compare codes alone and under load: `python -m tools.experiments.gpu.same_codes --deterministic ...`.

Sends the same requests with the same seeds one after the other, then at a rate. On a GPU, the shape of the batch
affects rounding and therefore the codes, unless `talker.deterministic` is set.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deployments.protocol import Sampling, SynthesisRequest
from loadtest.arrivals import Phase, ScheduledRequest, SpeechLengths
from loadtest.settings import Settings
from serve_app.config_file import read_config
from serve_app.speech.segments import Utterance
from tools.experiments.gpu.bench import as_planned, most_at_once
from tools.suites.listening import Heard, Speaking
from tools.suites.pools import serving


def asked(planned: ScheduledRequest) -> Utterance:
    """Build a request with streamed text and its own length. The seed is the request's number."""
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


@dataclass(frozen=True, slots=True)
class CodesComparison:
    """Comparison of two deliveries of the same requests."""

    requests: int
    frames: int  # of all requests
    equal: int  # requests whose codes are all equal
    first_differences: list[int]  # frame, per differing request
    frames_before_difference: int
    most_at_once: int  # concurrent streams under load


def compare(quiet: Sequence[Heard], loaded: Sequence[Heard]) -> CodesComparison:
    """Compare the codes. Raises `AssertionError` if a stream failed."""
    firsts, common = [], 0
    for one, other in zip(quiet, loaded, strict=True):
        assert one.error is None, one.error
        assert other.error is None, other.error
        assert one.codes.shape == other.codes.shape, f"{one.codes.shape[0]} and {other.codes.shape[0]} frames"
        differs = np.flatnonzero((one.codes != other.codes).any(axis=1))
        firsts += differs[:1].tolist()
        common += int(differs[0]) if len(differs) else len(one.codes)
    return CodesComparison(
        requests=len(quiet),
        frames=sum(len(heard.codes) for heard in quiet),
        equal=len(quiet) - len(firsts),
        first_differences=firsts,
        frames_before_difference=common,
        most_at_once=most_at_once(loaded),
    )


def main(arguments: list[str]) -> int:
    """Run the command line. Return 1 if codes differ in deterministic mode."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.experiments.gpu.same_codes", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--model", required=True, help="a checkpoint directory")
    parser.add_argument("--config", type=Path, default=Path("cluster/serve/one-gpu.yaml"))
    parser.add_argument("--deterministic", action="store_true", help="talker.deterministic: true")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--rate", type=float, default=40.0, help="requests per second, the second time")
    parser.add_argument("--speech-s", type=float, default=5.7, help="median length")
    parser.add_argument("--out", type=Path, required=True, help="new folder for the results")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True)
    phases = (Phase("measured", options.rate, 2 * options.requests / options.rate),)
    lengths = SpeechLengths(options.speech_s, 0.35)
    schedule = Settings("", phases, seed=1, lengths=lengths).schedule()[: options.requests]
    began_s = time.monotonic()
    app = read_config(options.config)
    talker = app.talker.model_copy(update={"deterministic": options.deterministic})
    with serving(app.model_copy(update={"model": options.model, "talker": talker})):
        print(f"ready after {time.monotonic() - began_s:.1f} s", flush=True)
        quiet = Speaking([asked(each) for each in schedule], at_once=1).finish()
        done = compare(quiet, as_planned([(each.planned_s, asked(each)) for each in schedule], inline=False))
        print(
            f"deterministic {options.deterministic}: {done.equal} of {done.requests} streams have equal codes alone "
            f"and at {options.rate:g} r/s ({done.most_at_once} at once); "
            f"{done.frames_before_difference} of {done.frames} frames come before a first difference",
            flush=True,
        )
        (options.out / "codes.json").write_text(json.dumps({name: getattr(done, name) for name in done.__slots__}))
    return int(options.deterministic and done.equal < done.requests)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
