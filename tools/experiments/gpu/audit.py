"""Check that the audio that clients receive under load matches its codes.
`python -m tools.experiments.gpu.audit --model ... --rate 80 --duration 60`.

Requests streams at a rate, as the application's ingress does, and counts the samples of each. The unfolded float32
decoder decodes the codes of 200 streams. The received audio must be 35 dB above the difference, without missing or
duplicate samples. Every second stream drops its leading silence, as with most clients.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from deployments.codec.decoder import MIN_SNR_DB, snr_db, to_pcm16
from deployments.protocol import Codes, Pcm, Sampling, SynthesisRequest
from deployments.weights.store import locate
from loadtest.arrivals import Phase, ScheduledRequest, SpeechLengths
from loadtest.settings import Settings
from serve_app.config_file import read_config
from serve_app.speech.segments import Utterance
from talkray_tools.unfolded_codec import DecoderNetwork
from tools.experiments.gpu.bench import as_planned, most_at_once
from tools.suites.listening import Heard
from tools.suites.pools import serving

_RANDOM, _EXTREME = 100, 50  # numbers of decoded streams: random ones, and the shortest and longest

Decode = Callable[[Codes], Pcm]


@dataclass(frozen=True, slots=True)
class Audited:
    """One stream that was decoded again."""

    request_id: str
    frames: int
    snr_db: float


@dataclass(frozen=True, slots=True)
class Audit:
    """Results of all streams."""

    streams: int
    most_at_once: int
    frames: int
    samples: int
    failed: list[str]  # streams that ended with an error
    miscounted: list[str]  # streams whose samples do not match their frames
    audited: list[Audited]

    @property
    def wrong(self) -> list[Audited]:
        """Streams whose audio does not match their codes."""
        return [each for each in self.audited if each.snr_db < MIN_SNR_DB]

    @property
    def passed(self) -> bool:
        return bool(self.audited) and not (self.failed or self.miscounted or self.wrong)

    def table(self) -> str:
        levels = sorted(each.snr_db for each in self.audited) or [float("nan")]
        rows = [
            ("streams, most at once", f"{self.streams}, {self.most_at_once}"),
            ("frames, samples heard", f"{self.frames:,}, {self.samples:,}"),
            ("ended with an error", len(self.failed)),
            ("samples missing or doubled", len(self.miscounted)),
            ("decoded again in float32", len(self.audited)),
            (f"less than {MIN_SNR_DB:.0f} dB above the difference", len(self.wrong)),
            ("least, median dB", f"{levels[0]:.1f}, {levels[len(levels) // 2]:.1f}"),
        ]
        return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def asked(planned: ScheduledRequest) -> Utterance:
    """Build a request with its own length. The seed is the request's number."""
    frames = planned.frames
    return Utterance(
        SynthesisRequest(
            f"r{planned.index}",
            planned.text,
            sampling=Sampling(max_new_tokens=None if frames is None else frames + 1),
            seed=planned.index,
            ignore_eos=frames is not None,
            leading_silence=planned.index % 2 == 0,
        )
    )


def audit(heard: Sequence[Heard], decode: Decode, *, frame_samples: int, max_trim: int) -> Audit:
    """Compare streams with codes that `decode` converts to [samples]. Up to `max_trim` silent samples may be cut."""
    spoken = [each for each in heard if each.error is None]
    audited = []
    for number, each in enumerate(chosen := _chosen(spoken)):
        audited.append(Audited(each.request_id, len(each.codes), _snr_db(each, decode(each.codes))))
        if number % 20 == 0:
            print(f"decoded again: {number} of {len(chosen)}", flush=True)
    return Audit(
        streams=len(heard),
        most_at_once=most_at_once(spoken),
        frames=sum(len(each.codes) for each in spoken),
        samples=sum(_num_samples(each) for each in spoken),
        failed=[f"{each.request_id}: {each.error}" for each in heard if each.error is not None],
        miscounted=[
            f"{each.request_id}: {_num_samples(each)} samples of {len(each.codes)} frames"
            for each in spoken
            if not 0 <= len(each.codes) * frame_samples - _num_samples(each) <= (0 if _is_whole(each) else max_trim)
        ],
        audited=audited,
    )


def _is_whole(heard: Heard) -> bool:
    return int(heard.request_id.removeprefix("r")) % 2 == 0


def _num_samples(heard: Heard) -> int:
    return len(heard.pcm) // 2


def _chosen(heard: Sequence[Heard]) -> list[Heard]:
    by_length = sorted(heard, key=lambda each: len(each.codes))
    ends = by_length[:_EXTREME] + by_length[_EXTREME:][-_EXTREME:]
    rest = [each for each in by_length if all(each is not other for other in ends)]
    picked = np.random.default_rng(0).permutation(len(rest))[:_RANDOM]
    return ends + [rest[number] for number in picked]


def _snr_db(heard: Heard, exact: Pcm) -> float:
    """Return the SNR in dB of the received audio, which may lack leading silence, to the end of the exact audio."""
    pcm = np.frombuffer(heard.pcm, "<i2")
    if not len(pcm) or len(pcm) > len(exact):
        return float("-inf")
    return snr_db(torch.from_numpy(exact[len(exact) - len(pcm) :].copy()), torch.from_numpy(pcm.copy()))


def unfolded(directory: Path) -> tuple[Decode, int]:
    """Return the checkpoint's unmodified decoder in float32, and the samples per frame."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = DecoderNetwork.load(directory / "speech_tokenizer", device=device)

    @torch.inference_mode()
    def decode(codes: Codes) -> Pcm:
        return to_pcm16(network(torch.from_numpy(codes.astype(np.int64))[None].to(device))[0])

    return decode, network.config.frame_samples


def main(arguments: list[str]) -> int:
    """Run the command line. Return 1 for any error."""
    parser = argparse.ArgumentParser(prog="python -m tools.experiments.gpu.audit", description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a checkpoint directory, or embedded")
    parser.add_argument("--config", type=Path, default=Path("cluster/serve/one-gpu.yaml"))
    parser.add_argument("--rate", type=float, default=80.0, help="requests per second")
    parser.add_argument("--duration", type=float, default=60.0, help="seconds")
    parser.add_argument("--speech-s", type=float, default=5.7, help="median length; 0: until the talker ends it")
    parser.add_argument("--out", type=Path, help="also write the audit to this file")
    options = parser.parse_args(arguments)
    lengths = SpeechLengths(options.speech_s, 0.35) if options.speech_s else None
    settings = Settings("", (Phase("measured", options.rate, options.duration),), seed=1, lengths=lengths)
    app = read_config(options.config).model_copy(update={"model": options.model})
    directory = locate(options.model)
    speakers = json.loads((directory / "config.json").read_text(encoding="utf-8"))["talker_config"].get("spk_id") or {}
    began_s = time.monotonic()
    with serving(app):
        print(f"ready after {time.monotonic() - began_s:.1f} s", flush=True)
        voice = next(iter(speakers), "").lower() or None
        planned = [(each.planned_s, asked(each).changed(voice=voice)) for each in settings.schedule()]
        heard = as_planned(planned, inline=app.codec.placement == "inline")
    decode, frame_samples = unfolded(directory)
    done = audit(heard, decode, frame_samples=frame_samples, max_trim=10 * 24000)
    print(done.table())
    for line in (*done.failed, *done.miscounted, *done.wrong):
        print(f"wrong: {line}")
    if options.out is not None:
        options.out.write_text(json.dumps(asdict(done), indent=1), encoding="utf-8")
    return 0 if done.passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
