"""`make parity`: compare Talkray with the official package on newly generated random checkpoints.

The official package pins its own versions, so it needs a separate environment, which is created on first use.
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
from numpy.typing import NDArray

from deployments.codec.decoder import snr_db
from deployments.codec.encoder import CodecEncoder
from deployments.protocol import Codes
from talkray_tools.choices import Divergence, Tolerance, near_ties, nearest_divergences
from talkray_tools.random_codec import Stress
from tools.experiments.parity.cases import (
    DECODINGS,
    LIVE,
    STORED,
    STRESS,
    WAV_DECODING,
    Extent,
    case_key,
    cases_of,
    reference_audio,
)
from tools.experiments.parity.official import Arrays
from tools.experiments.parity.ours import (
    NAMES,
    Ours,
    codec_profile,
    golden_file,
    talker_digest,
    write_base,
    write_stressed,
    write_tiny,
)
from tools.experiments.parity.qwen_tokenizer import fetch_ranks, write_tokenizer
from tools.experiments.parity.stored import StoredVoices, store_voices

logger = logging.getLogger(__name__)

ROOT = Path(__file__).parents[3]
SEES_TOOLS = os.environ | {"PYTHONPATH": str(ROOT / "tools")}  # for the official package's environment
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
TOLERANCE = 2e-4  # absolute, for waveforms in [-1, 1]
HIDDEN_SIZES = (1024, 2048)  # as in the released checkpoints
STRESSED = "custom_voice"  # kind that is also tested with numerically demanding weights
TIE = Tolerance(1e-5, 0.1)  # a different order of float32 sums moves a logit by 1e-6 standard deviations
NEAR_TIE = Tolerance(2e-4, 0.1)  # tied codes of stressed weights differ by 1e-3
STRESS_SNR_DB = 70.0  # minimum SNR of stressed float32 waveforms


@dataclass(frozen=True, slots=True)
class ParityCheck:
    """One compared output of both implementations."""

    name: str
    passed: bool
    detail: str
    num_ties: int = 0  # codes that differ because of near-ties

    @property
    def verdict(self) -> str:
        return "PASS" if self.passed else "FAIL"


def official_python(environment: Path) -> Path:
    """Return the interpreter of the official package's environment, after creating the environment if needed."""
    python = environment / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    if subprocess.run([python, "-m", "pip", "show", "--quiet", OFFICIAL.partition("==")[0]], check=False).returncode:
        subprocess.run([python, "-m", "pip", "install", "--quiet", *REQUIREMENTS], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", OFFICIAL], check=True)
    return python


def run_official(python: Path, checkpoint: Path, extent: str, recordings: Path | None = None) -> Arrays:
    """Run the official package on a checkpoint, and on a folder of recordings."""
    out = checkpoint.with_suffix(".npz")
    command: list[str | Path] = [python, "-m", "tools.experiments.parity.official", checkpoint, out]
    command += ["--extent", extent, *(() if recordings is None else ("--recordings", recordings))]
    log = checkpoint.with_suffix(".log")
    with log.open("w") as output:
        done = subprocess.run(command, cwd=ROOT, env=SEES_TOOLS, stdout=output, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        sys.exit(f"the official package failed on {checkpoint.name}:\n{log.read_text()}")
    with np.load(out) as arrays:
        return dict(arrays)


def compare(kind: str, extent: Extent, checkpoint: Path, official: Arrays) -> Iterator[ParityCheck]:
    """Compare the cases of a checkpoint's kind."""
    yield from compare_cases(kind, extent, Ours(checkpoint), checkpoint, official)


def compare_cases(kind: str, extent: Extent, ours: Ours, checkpoint: Path, official: Arrays) -> Iterator[ParityCheck]:
    reference = official.get("reference/codes")
    if reference is not None:
        encoder = CodecEncoder.load(checkpoint / "speech_tokenizer")
        yield equal_reference("reference codes", encoder, reference_audio(), reference)
        yield close("speaker vector", ours.speaker(), official["reference/speaker"], 1e-5)
    for case in cases_of(kind, extent):
        for decoding in extent.decodings:
            key, options = case_key(case, decoding), DECODINGS[decoding]
            expected = official[f"codes/{key}"]
            found = partial(ours.divergences, case, options, expected, reference, extent=extent)
            yield equal_codes(key, ours.codes(case, options, reference, extent=extent), expected, found)
            if decoding == WAV_DECODING:
                yield close(f"{key} audio", ours.wav(case, expected, reference), official[f"wav/{key}"], TOLERANCE)


def compare_stored(voices: StoredVoices, checkpoint: Path, official: Arrays) -> Iterator[ParityCheck]:
    """Compare the prompts of stored voices, and the speech generated from them."""
    ours, encoder = Ours(checkpoint), CodecEncoder.load(checkpoint / "speech_tokenizer")
    for name, voice in voices.voices.items():
        prompt = voices.prompt(name, ours.engine, encoder)
        yield close(f"voice stored {name}, vector", prompt.speaker, official[f"prompt/{name}/speaker"], 1e-5)
        expected = official.get(f"prompt/{name}/codes")
        if prompt.codes is None or expected is None:
            same = prompt.codes is expected is None and voice.takes[0].text is None
            yield ParityCheck(f"voice stored {name}, codes", same, "none")
        else:
            found = partial(nearest_divergences, encoder, voices.samples(name), expected)
            yield equal_codes(f"voice stored {name}, codes", prompt.codes, expected, found)
    yield from compare_cases("base", STORED, ours, checkpoint, official)


def compare_stressed(checkpoint: Path, official: Arrays) -> Iterator[ParityCheck]:
    """Compare codes except for near-ties, and waveforms by SNR, with stressed weights."""
    ours = Ours(checkpoint)
    for case in cases_of(STRESSED, STRESS):
        for decoding in STRESS.decodings:
            key = case_key(case, decoding)
            expected = official[f"codes/{key}"]
            found = ours.divergences(case, DECODINGS[decoding], expected, extent=STRESS)
            yield ParityCheck(key, *near_ties(found, expected, NEAR_TIE), len(found))
            if decoding == WAV_DECODING:
                wav = torch.from_numpy(ours.wav(case, expected, None))
                ratio_db = snr_db(torch.from_numpy(official[f"wav/{key}"]), wav)
                yield ParityCheck(f"{key} audio", ratio_db >= STRESS_SNR_DB, f"{ratio_db:.1f} dB above its error")


def equal_reference(name: str, encoder: CodecEncoder, audio: NDArray[np.float32], expected: Codes) -> ParityCheck:
    found = partial(nearest_divergences, encoder, audio, expected)
    return equal_codes(name, encoder.encode(audio), expected, found)


def equal_codes(name: str, codes: Codes, expected: Codes, find: Callable[[], list[Divergence]]) -> ParityCheck:
    """Check that codes [frames, groups] are equal except for near-ties, which `find` locates."""
    if np.array_equal(codes, expected):
        return ParityCheck(name, passed=True, detail=f"{len(expected)} frames")
    found = find()
    near, detail = near_ties(found, expected, TIE)
    return ParityCheck(name, near and bool(found), detail, len(found))


def close(name: str, values: np.ndarray, expected: np.ndarray, tolerance: float) -> ParityCheck:
    if values.shape != expected.shape:
        return ParityCheck(name, passed=False, detail=f"{expected.shape} against {values.shape}")
    difference = float(np.abs(values - expected).max())
    return ParityCheck(name, difference <= tolerance, f"largest difference {difference:.1e}")


def run_parity(python: Path, scratch: Path, seed: int) -> bool:
    """Compare checkpoints with both tokenizers, and print a line for each comparison."""
    tokenizers: dict[str, Path | None] = {"bytes": None}
    ranks = fetch_ranks(scratch)
    if ranks is None:
        logger.info("SKIP the released tokenizer: its vocabulary could not be downloaded")
    else:
        tokenizers["qwen"] = scratch / "tokenizer"
        write_tokenizer(scratch / "tokenizer", ranks)
    comparing: list[tuple[str, Path, str, Path | None, Callable[[Path, Arrays], Iterator[ParityCheck]]]] = []
    for tokenizer, files in tokenizers.items():
        for kind in NAMES:
            checkpoint = write_tiny(scratch / f"{tokenizer}-{kind}", kind, seed=seed, tokenizer=files)
            comparing.append((f"{tokenizer} {kind}", checkpoint, "live", None, partial(compare, kind, LIVE)))
    for stress in Stress:
        checkpoint = write_stressed(scratch / f"stress-{stress}", STRESSED, stress, seed=seed)
        comparing.append((f"stress {stress}", checkpoint, "stress", None, compare_stressed))
    voices = store_voices(scratch)
    for size in HIDDEN_SIZES:
        checkpoint = write_base(scratch / f"base-{size}", size, seed=seed)
        comparing.append((f"base {size}", checkpoint, "stored", voices.recordings, partial(compare_stored, voices)))
    results, num_ties = [], 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # each thread waits for a separate process
        official = [
            pool.submit(run_official, python, checkpoint, extent, files)
            for _, checkpoint, extent, files, _ in comparing
        ]
        for (name, checkpoint, _, _, comparisons), made in zip(comparing, official, strict=True):
            for result in comparisons(checkpoint, made.result()):
                results.append(result.passed)
                num_ties += result.num_ties if result.passed else 0
                logger.info("%s %s %s | %s", result.verdict, name, result.name, result.detail)
    told = "%d of %d comparisons passed, %d codes were near-ties that were decided otherwise, seed %d"
    logger.info(told, sum(results), len(results), num_ties, seed)
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
