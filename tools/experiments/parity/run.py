"""`make parity`: Talkray against the official package, side by side on freshly drawn checkpoints.

The official package pins its own versions, so it lives in an environment of its own, which is made on first use.
`--record` writes the golden files of the fast tests instead.
"""

import argparse
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from deployments.codec.decoder import snr_db
from deployments.codec.encoder import CodecEncoder
from deployments.protocol import Codes
from talkray_tools.choices import Tolerance, near_ties
from talkray_tools.random_codec import Stress
from tools.experiments.parity.cases import DECODINGS, LIVE, STRESS, WAV_DECODING, case_key, cases_of, reference_audio
from tools.experiments.parity.official import Arrays
from tools.experiments.parity.ours import (
    NAMES,
    Ours,
    codec_profile,
    golden_file,
    talker_digest,
    write_stressed,
    write_tiny,
)
from tools.experiments.parity.qwen_tokenizer import fetch_ranks, write_tokenizer

logger = logging.getLogger(__name__)

ROOT = Path(__file__).parents[3]
SEES_TOOLS = os.environ | {"PYTHONPATH": str(ROOT / "tools")}  # in the package's own environment
REQUIREMENTS = (
    "torch==2.13.0",
    "transformers==4.57.3",
    "accelerate==1.12.0",
    "librosa",
    "soundfile",
    "einops",
    "safetensors",
)
OFFICIAL = "qwen-tts==0.1.1"
TOLERANCE = 2e-4  # of a waveform in [-1, 1]
STRESSED = "custom_voice"  # the kind whose weights are also drawn hard on numbers
NEAR_TIE = Tolerance(2e-4, 0.1)  # twins among the codes of stressed weights are 1e-3 apart
STRESS_SNR_DB = 70.0  # of their waveforms, in float32 on either side


@dataclass(frozen=True, slots=True)
class ParityCheck:
    """One thing that both sides made."""

    name: str
    passed: bool
    detail: str

    @property
    def verdict(self) -> str:
        return "PASS" if self.passed else "FAIL"


def official_python(environment: Path) -> Path:
    """The interpreter of the official package's environment, made where there is none."""
    python = environment / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    if subprocess.run([python, "-m", "pip", "show", "--quiet", OFFICIAL.partition("==")[0]], check=False).returncode:
        subprocess.run([python, "-m", "pip", "install", "--quiet", *REQUIREMENTS], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", OFFICIAL], check=True)
    return python


def run_official(python: Path, checkpoint: Path, extent: str) -> Arrays:
    """What the official package makes of a checkpoint."""
    out = checkpoint.with_suffix(".npz")
    command: list[str | Path] = [python, "-m", "tools.experiments.parity.official", checkpoint, out]
    command += ["--extent", extent]
    log = checkpoint.with_suffix(".log")
    with log.open("w") as output:
        done = subprocess.run(command, cwd=ROOT, env=SEES_TOOLS, stdout=output, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        sys.exit(f"the official package failed on {checkpoint.name}:\n{log.read_text()}")
    with np.load(out) as arrays:
        return dict(arrays)


def compare(kind: str, checkpoint: Path, official: Arrays) -> Iterator[ParityCheck]:
    """Every case of a checkpoint's kind."""
    ours = Ours(checkpoint)
    reference = official.get("reference/codes")
    if reference is not None:
        encoder = CodecEncoder.load(checkpoint / "speech_tokenizer")
        yield equal_codes("reference codes", encoder.encode(reference_audio()), reference)
        yield close("speaker vector", ours.speaker(), official["reference/speaker"], 1e-5)
    for case in cases_of(kind):
        for decoding, options in DECODINGS.items():
            key = case_key(case, decoding)
            expected = official[f"codes/{key}"]
            yield equal_codes(key, ours.codes(case, options, reference, extent=LIVE), expected)
            if decoding == WAV_DECODING:
                yield close(f"{key} audio", ours.wav(case, expected, reference), official[f"wav/{key}"], TOLERANCE)


def compare_stressed(checkpoint: Path, official: Arrays) -> Iterator[ParityCheck]:
    """Codes but for near-ties, which float32 decides by the order of its sums; waveforms by their error's power."""
    ours = Ours(checkpoint)
    for case in cases_of(STRESSED, STRESS):
        for decoding in STRESS.decodings:
            key = case_key(case, decoding)
            expected = official[f"codes/{key}"]
            found = ours.divergences(case, DECODINGS[decoding], expected, extent=STRESS)
            yield ParityCheck(key, *near_ties(found, expected, NEAR_TIE))
            if decoding == WAV_DECODING:
                wav = torch.from_numpy(ours.wav(case, expected, None))
                noise_db = snr_db(torch.from_numpy(official[f"wav/{key}"]), wav)
                yield ParityCheck(f"{key} audio", noise_db >= STRESS_SNR_DB, f"{noise_db:.1f} dB above its error")


def equal_codes(name: str, codes: Codes, expected: Codes) -> ParityCheck:
    common = min(len(codes), len(expected))
    differing = np.flatnonzero((codes[:common] != expected[:common]).any(axis=1))
    passed = len(codes) == len(expected) and not len(differing)
    first = f", first difference in frame {differing[0] if len(differing) else common}"
    return ParityCheck(name, passed, f"{len(expected)} frames" + ("" if passed else f" against {len(codes)}{first}"))


def close(name: str, values: np.ndarray, expected: np.ndarray, tolerance: float) -> ParityCheck:
    if values.shape != expected.shape:
        return ParityCheck(name, passed=False, detail=f"{expected.shape} against {values.shape}")
    difference = float(np.abs(values - expected).max())
    return ParityCheck(name, difference <= tolerance, f"largest difference {difference:.1e}")


def run_parity(python: Path, scratch: Path, seed: int) -> bool:
    """Compare on checkpoints over both tokenizers; prints a line for each comparison."""
    tokenizers: dict[str, Path | None] = {"bytes": None}
    ranks = fetch_ranks(scratch)
    if ranks is None:
        logger.info("SKIP the released tokenizer: its vocabulary could not be downloaded")
    else:
        tokenizers["qwen"] = scratch / "tokenizer"
        write_tokenizer(scratch / "tokenizer", ranks)
    comparing: list[tuple[str, Path, str, Callable[[Path, Arrays], Iterator[ParityCheck]]]] = []
    for tokenizer, files in tokenizers.items():
        for kind in NAMES:
            checkpoint = write_tiny(scratch / f"{tokenizer}-{kind}", kind, seed=seed, tokenizer=files)
            comparing.append((f"{tokenizer} {kind}", checkpoint, "live", partial(compare, kind)))
    for stress in Stress:
        checkpoint = write_stressed(scratch / f"stress-{stress}", STRESSED, stress, seed=seed)
        comparing.append((f"stress {stress}", checkpoint, "stress", compare_stressed))
    results = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # each waits for a process of its own
        official = [pool.submit(run_official, python, checkpoint, extent) for _, checkpoint, extent, _ in comparing]
        for (name, checkpoint, _, comparisons), made in zip(comparing, official, strict=True):
            for result in comparisons(checkpoint, made.result()):
                results.append(result.passed)
                logger.info("%s %s %s | %s", result.verdict, name, result.name, result.detail)
    logger.info("%d of %d comparisons passed, seed %d", sum(results), len(results), seed)
    return all(results)


def record(python: Path, scratch: Path) -> None:
    for kind in NAMES:
        checkpoint = write_tiny(scratch / kind, kind)
        arrays = run_official(python, checkpoint, "golden")
        identity = {
            "checkpoint/talker": np.array(talker_digest(checkpoint)),
            "checkpoint/codec": codec_profile(checkpoint),
        }
        golden_file(kind).parent.mkdir(exist_ok=True)
        np.savez_compressed(golden_file(kind), **arrays, **identity)
        logger.info("wrote %s", golden_file(kind))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.experiments.parity.run")
    parser.add_argument("--environment", type=Path, default=Path(os.environ.get("PARITY_ENV", ROOT / ".parity")))
    parser.add_argument("--record", action="store_true", help="write the golden files")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the fresh checkpoints")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    torch.set_num_threads(1)
    python = official_python(options.environment)
    with tempfile.TemporaryDirectory() as scratch:
        if options.record:
            record(python, Path(scratch))
            return 0
        return 0 if run_parity(python, Path(scratch), options.seed) else 1


if __name__ == "__main__":
    sys.exit(main())
