"""The first thing to run with real weights: does this checkpoint speak, and as the official package does?

    python -m talkray_tools.verify --model 1.7B-CustomVoice

Everything runs in float32 on the CPU. Speech must end by itself and be audible, and sound as the unfolded decoder makes
it of the same codes; the codes of greedy decoding must equal the official package's, where an environment with it is at
hand.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray

from deployments.codec.config import SpeechTokenizerConfig
from deployments.codec.decoder import CodecDecoder, snr_db
from deployments.codec.encoder import CodecEncoder
from deployments.codec.reference import DecoderNetwork
from deployments.codec.sweep import Sweep
from deployments.config import TalkerConfig
from deployments.errors import TalkrayError
from deployments.model_store import locate
from deployments.protocol import Codes, FinishReason, GenerateRequest, ModelKind, Reference, Sampling, SynthesisRequest
from deployments.talker.loading import build_engine, throttled

logger = logging.getLogger(__name__)

TEXT = "Hello! This is a plain sentence, and it should come to an end."
DESCRIPTION = "A calm, friendly voice."
_SEEDS = (1, 2, 3)
_AUDIBLE = 0.005  # standard deviation of samples in [-1, 1]; speech has about 0.05 to 0.2
_MIN_SNR_DB = 60.0  # of folded weights in float32 against the checkpoint's own; measured above 110
_INSTALL = (
    "python -m venv .parity && "
    ".parity/bin/pip install torch transformers==4.57.3 accelerate==1.12.0 librosa soundfile einops safetensors && "
    ".parity/bin/pip install --no-deps qwen-tts==0.1.1"
)


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `passed` None: it could not be checked."""

    name: str
    passed: bool | None
    detail: str

    def __str__(self) -> str:
        verdict = {True: "PASS", False: "FAIL", None: "SKIP"}[self.passed]
        return f"{verdict} {self.name}: {self.detail}"


class Subject:
    """The checkpoint under test, loaded as it would be served."""

    def __init__(self, directory: Path, reference: Reference | None, *, threads: int) -> None:
        self.directory = directory
        self.engine = build_engine(directory, TalkerConfig(device="cpu", dtype="float32", threads=threads))
        self.codec = CodecDecoder.load(directory / "speech_tokenizer")
        self.sample_rate = SpeechTokenizerConfig.load(directory / "speech_tokenizer").sample_rate
        self.reference = reference

    def request(self, sampling: Sampling, *, seed: int = 0) -> GenerateRequest:
        """The test sentence, in whatever voice this kind of checkpoint takes."""
        model = self.engine.model
        language = "english" if "english" in model.languages else "auto"
        synthesis = SynthesisRequest("verify", TEXT, language=language, sampling=sampling, seed=seed)
        if model.kind is ModelKind.CUSTOM_VOICE:
            return GenerateRequest(replace(synthesis, voice=next(iter(model.speakers))))
        if model.kind is ModelKind.VOICE_DESIGN:
            return GenerateRequest(replace(synthesis, instructions=DESCRIPTION))
        return self._clone(synthesis)

    def _clone(self, synthesis: SynthesisRequest) -> GenerateRequest:
        assert self.reference is not None, "checked with the command line"
        request = replace(synthesis, reference=self.reference)
        if self.reference.x_vector_only:
            return GenerateRequest(request)
        encoder = CodecEncoder.load(self.directory / "speech_tokenizer")
        return GenerateRequest(request, encoder.encode(self.reference.audio))

    def speak(self, request: GenerateRequest) -> tuple[Codes, FinishReason | None]:
        """All frames [frames, groups] of a request and why they ended."""
        self.engine.add(0, request)
        frames, reason = [], None
        while not self.engine.is_idle:
            for _, chunk in self.engine.step().chunks:
                frames.append(chunk.codes)
                reason = chunk.finish_reason
        return np.concatenate(frames), reason

    def audio(self, codes: Codes) -> NDArray[np.float32]:
        """[samples] of a whole utterance."""
        audio, _ = self.codec.decode(torch.from_numpy(codes.astype(np.int64))[None], [self.codec.initial_state()])
        samples: NDArray[np.float32] = audio[0].numpy()
        return samples


def check_speech(subject: Subject, wav: Path | None) -> Iterator[Check]:
    """Speech ends before it is cut off, and makes sound."""
    for seed in _SEEDS:
        codes, reason = subject.speak(subject.request(Sampling(), seed=seed))
        audio = subject.audio(codes)
        seconds = f"{len(audio) / subject.sample_rate:.1f} s"
        yield Check(f"speech ends, seed {seed}", reason is FinishReason.STOP, f"{reason} after {seconds}")
        loudness = float(audio.std())
        yield Check(f"speech is audible, seed {seed}", loudness > _AUDIBLE, f"standard deviation {loudness:.3f}")
        if wav is not None and seed == _SEEDS[0]:
            soundfile.write(wav, audio, subject.sample_rate)
            logger.info("wrote %s: listen to it", wav)


@torch.inference_mode()
def check_codec(subject: Subject, *, num_frames: int) -> Check:
    """The decoder that serves computes what the checkpoint's layers do, one by one."""
    codes, _ = subject.speak(subject.request(Sampling(max_new_tokens=num_frames)))
    exact = DecoderNetwork.load(subject.directory / "speech_tokenizer")(torch.from_numpy(codes.astype(np.int64))[None])
    noise_db = snr_db(exact[0], torch.from_numpy(subject.audio(codes)))
    return Check("the codec decoder is the checkpoint's", noise_db >= _MIN_SNR_DB, f"{noise_db:.1f} dB above its error")


def check_every_code(subject: Subject) -> Check:
    """No code of any codebook brings the decoder to NaN or infinity."""
    network = DecoderNetwork.load(subject.directory / "speech_tokenizer")
    largest = Sweep.of(network, throttled("every code through the codec, stream", logger.info)).largest
    return Check("every code of the codec is finite", isfinite(largest.value), str(largest))


def check_official(subject: Subject, python: Path | None, *, num_frames: int) -> Check:
    """Greedy codes equal the official package's."""
    name = f"{num_frames} greedy frames equal the official package's"
    if python is None:
        return Check(name, None, f"it is not installed. {_INSTALL}")
    greedy = Sampling(do_sample=False, subtalker_dosample=False, max_new_tokens=num_frames + 1)
    request = subject.request(greedy)
    expected = official_codes(subject, request, python, num_frames=num_frames)
    codes, _ = subject.speak(request)
    common = min(len(codes), len(expected))
    differing = np.flatnonzero((codes[:common] != expected[:common]).any(axis=1))
    if len(differing):
        return Check(name, passed=False, detail=f"frame {differing[0]} is the first to differ")
    return Check(name, len(codes) == len(expected), f"{len(codes)} frames here, {len(expected)} there")


def official_codes(subject: Subject, request: GenerateRequest, python: Path, *, num_frames: int) -> Codes:
    """[frames, groups] of the same request from the official package, run by `python`."""
    with tempfile.TemporaryDirectory() as scratch:
        request_file, codes_file = Path(scratch) / "request.json", Path(scratch) / "codes.npy"
        arguments = _official_arguments(request.synthesis, Path(scratch), subject.sample_rate)
        greedy = {"do_sample": False, "subtalker_dosample": False, "max_new_tokens": num_frames + 1}
        values = {"checkpoint": str(subject.directory.resolve()), "arguments": arguments | greedy}
        request_file.write_text(json.dumps(values), encoding="utf-8")
        command = [str(python), "-m", "talkray_tools.official", str(request_file), str(codes_file)]
        root = Path(__file__).parents[1]
        done = subprocess.run(
            command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"the official package failed:\n{done.stdout}")
        codes: Codes = np.load(codes_file)
        return codes


def _official_arguments(synthesis: SynthesisRequest, scratch: Path, sample_rate: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {"text": synthesis.text, "language": synthesis.language}
    if synthesis.voice is not None:
        arguments["speaker"] = synthesis.voice
    if synthesis.instructions is not None:
        arguments["instruct"] = synthesis.instructions
    if synthesis.reference is not None:
        np.save(scratch / "reference.npy", synthesis.reference.audio)
        arguments["ref_audio"] = (str(scratch / "reference.npy"), sample_rate)
        arguments["ref_text"] = synthesis.reference.text
        arguments["x_vector_only_mode"] = synthesis.reference.x_vector_only
    return arguments


def find_official(named: Path | None) -> Path | None:
    """An interpreter that has the official package: the one named, that of `make parity`, or this one."""
    candidates = [named] if named else [Path(".parity/bin/python"), Path(sys.executable)]
    for python in candidates:
        command = [str(python), "-c", "import importlib.metadata as m; m.version('qwen-tts')"]
        if python.exists() and subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0:
            return python.absolute()
    return None


def read_reference(file: Path, text: str | None, *, sample_rate: int) -> Reference:
    """A recording to clone; exits where it has another sample rate."""
    audio, rate = soundfile.read(file, dtype="float32", always_2d=True)
    if rate != sample_rate:
        sys.exit(f"{file} has {rate} Hz, the checkpoint works at {sample_rate} Hz: resample it first")
    return Reference(np.ascontiguousarray(audio.mean(axis=1)), text, x_vector_only=text is None)


def main(arguments: list[str]) -> int:
    """Command line; returns the exit code: 0 unless a check failed."""
    parser = argparse.ArgumentParser(prog="python -m talkray_tools.verify", description="Check a checkpoint.")
    parser.add_argument("--model", required=True, help="a directory, a released name, or embedded")
    parser.add_argument("--frames", type=int, default=50, help="greedy frames to compare with the official package")
    parser.add_argument(
        "--official-python", type=Path, help="interpreter that has qwen-tts; default .parity/bin/python"
    )
    parser.add_argument("--reference", type=Path, help="recording for base checkpoints to clone")
    parser.add_argument("--reference-text", help="what is said in it; without, only the speaker vector is used")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="torch threads")
    parser.add_argument("--wav", type=Path, help="write one utterance to this file")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    try:
        return _verify(options)
    except TalkrayError as error:
        logger.info("FAIL %s", error)
        return 1


def _verify(options: argparse.Namespace) -> int:
    directory = locate(options.model)
    rate = SpeechTokenizerConfig.load(directory / "speech_tokenizer").input_sample_rate
    given = options.reference
    reference = read_reference(given, options.reference_text, sample_rate=rate) if given else None
    subject = Subject(directory, reference, threads=options.threads)
    logger.info("PASS %s loads: every tensor has its place", directory)
    if subject.engine.model.kind is ModelKind.BASE and reference is None:
        logger.info("SKIP everything else: a base checkpoint clones, pass --reference RECORDING")
        return 0
    checks = []
    for check in _checks(subject, options):
        logger.info("%s", check)
        checks.append(check)
    return 1 if any(check.passed is False for check in checks) else 0


def _checks(subject: Subject, options: argparse.Namespace) -> Iterator[Check]:
    yield from check_speech(subject, options.wav)
    yield check_codec(subject, num_frames=options.frames)
    yield check_every_code(subject)
    yield check_official(subject, find_official(options.official_python), num_frames=options.frames)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
