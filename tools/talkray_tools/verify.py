"""Run this command first with real weights. It checks that a checkpoint's speech matches the official package's.

    talkray verify --model 1.7B-CustomVoice

Greedy codes and waveforms of this machine's serving networks are compared with float32 networks in plain PyTorch. The
float32 networks are compared with the official package, if an environment with it exists. Speech must end by itself, be
audible, and not loop. The last lines show PASS or the failures. A JSON file and audio are written for bug reports.
"""

import argparse
import gc
import json
import logging
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import soundfile
import torch
import typer
from numpy.typing import NDArray

from deployments.codec.codec_config import SpeechTokenizerConfig
from deployments.codec.decoder import MIN_SNR_DB, PCM_SCALE, snr_db, to_pcm16
from deployments.config import TalkerConfig
from deployments.errors import TalkrayError
from deployments.protocol import Codes, FinishReason, ModelKind, Reference, Sampling, SynthesisRequest
from deployments.speech_detection import EndingGuard, first_sound
from deployments.talker.engine.engine import Engine
from deployments.talker.engine.startup import build_engine, throttled
from deployments.weights.store import locate
from serve_app.distribution import version
from talkray_tools.alignment import find_head, write_head
from talkray_tools.arguments import run_command
from talkray_tools.choices import Tolerance, divergences, near_ties
from talkray_tools.subject import Speech, Subject
from talkray_tools.unfolded_codec import DecoderNetwork, largest_activation

logger = logging.getLogger(__name__)

TEXT = "Hello! This is a plain sentence, and it should come to an end."
FOLLOWED_TEXTS = (  # along with TEXT, the texts that alignment heads should follow
    "The quick brown fox jumps over the lazy dog near the river.",
    "She has three small boats in the harbour, and two of them are blue.",
)
_FOLLOWED_FRAMES = 150
SEEDS = (1, 2, 3)
AUDIBLE_DB = -46.0  # of full scale; speech is usually at -26 to -14
_FIRST_AUDIO_TRIALS = 5
_AT_ONCE = 4  # voices per batch
_CHUNKS = (1, 1, 2, 4, 8)  # frames per decoder call; the rest follows in one call
_FLOAT32_SNR_DB = 60.0  # minimum for float32 waveforms; measured values exceed 100
_OFFICIAL_FRAMES = 300  # the official package decodes longer speech in pieces with little context
_INSTALL = (
    "python -m venv .parity && "
    ".parity/bin/pip install torch transformers==4.57.3 accelerate==1.12.0 librosa soundfile einops safetensors && "
    ".parity/bin/pip install --no-deps qwen-tts==0.1.1"
)

FLOAT32 = Tolerance(1e-3, 0.1)  # for a different summation order
ROUNDED = Tolerance(0.2, 0.7)  # errors of bfloat16 logits are 1.4 % in the 1.7B shape, and a frame has sixteen choices


@dataclass(frozen=True, slots=True)
class Check:
    """One result. `passed` is None for measurements and for checks that could not run."""

    name: str
    passed: bool | None
    detail: str
    values: dict[str, float | str | None] = field(default_factory=dict)

    def __str__(self) -> str:
        verdict = {True: "PASS", False: "FAIL", None: "----"}[self.passed]
        return f"{verdict} {self.name}: {self.detail}"


def check_speech(subject: Subject, spoken: list[Speech], folder: Path) -> Iterator[Check]:
    """Check that speech ends by itself, is audible, and is neither silence nor a loop. Writes the samples."""
    for seed, speech in zip(SEEDS, spoken, strict=True):
        soundfile.write(folder / f"speech-{seed}.wav", speech.pcm, subject.sample_rate)
        heard = EndingGuard(subject.size, subject.sample_rate).truncate(
            speech.codes, speech.pcm, speech.reason, speech.num_text_tokens
        )
        length_s, reason = len(speech.pcm) / subject.sample_rate, heard[2]
        ends = f"{reason} after {length_s:.1f} s, {len(speech.codes)} frames of {speech.num_text_tokens} text tokens"
        values: dict[str, float | str | None] = {"reason": reason, "seconds": length_s}
        yield Check(f"speech ends, seed {seed}", reason is FinishReason.STOP, ends, values)
        samples = speech.pcm.astype(np.float64) / PCM_SCALE
        loud_db = _decibels(float(np.sqrt(np.square(samples).mean())) if len(samples) else 0.0)
        peak_db = _decibels(float(np.abs(samples).max(initial=0.0)))
        onset = first_sound(speech.pcm, subject.sample_rate)
        quiet_s = length_s if onset is None else onset / subject.sample_rate
        detail = f"{loud_db:.1f} dB of full scale, peak {peak_db:.1f} dB, {quiet_s:.2f} s of silence before it"
        levels: dict[str, float | str | None] = {"rms_db": loud_db, "peak_db": peak_db, "leading_silence_s": quiet_s}
        yield Check(f"speech is heard, seed {seed}", loud_db > AUDIBLE_DB, detail, levels)


def check_batched(subject: Subject, together: Speech) -> Check:
    """Check that a stream's codes do not depend on other streams."""
    name = "codes are the same alone and with others"
    if subject.on_gpu and not subject.engine.runner.shape.deterministic:
        return Check(name, None, "on a GPU, only deterministic engines have this property. Use --deterministic")
    [alone] = subject.speak(subject.request(TEXT, Sampling(), seed=SEEDS[0]))
    common = min(len(alone.codes), len(together.codes))
    differing = np.flatnonzero((alone.codes[:common] != together.codes[:common]).any(axis=1))
    if len(differing) or len(alone.codes) != len(together.codes):
        first = int(differing[0]) if len(differing) else common
        return Check(name, passed=False, detail=f"the first different frame is {first}")
    return Check(name, passed=True, detail=f"{common} frames")


def check_joints(subject: Subject, speech: Speech, before: Codes | None) -> Check:
    """Check that audio decoded in chunks equals audio decoded in one pass."""
    decoder = subject.codec.decoder
    state = decoder.initial_state() if before is None else decoder.state_after(torch.from_numpy(before).long())
    made, place = [], 0
    for size in (*_CHUNKS, len(speech.codes)):
        piece = torch.from_numpy(speech.codes[place : place + size].astype(np.int64))
        if len(piece):
            audio, (state,) = decoder.decode(piece[None], [state])
            made.append(to_pcm16(audio[0]))
        place += size
    joined, whole = np.concatenate(made), subject.decode(speech.codes, before)
    name = "chunks join to the whole audio"
    if len(joined) != len(whole):
        return Check(name, False, f"{len(joined)} samples in chunks, {len(whole)} at once")
    ratio_db = snr_db(*(torch.from_numpy(each.astype(np.float32)) for each in (whole, joined)))
    values: dict[str, float | str | None] = {"snr_db": min(ratio_db, 200.0)}
    return Check(name, ratio_db >= MIN_SNR_DB, f"SNR {ratio_db:.1f} dB, at least {MIN_SNR_DB:.0f} required", values)


def write_voices(subject: Subject, folder: Path) -> None:
    """Write TEXT spoken in each of the checkpoint's voices, for listeners and for `talkray report`."""
    request = subject.request(TEXT, Sampling(), seed=SEEDS[0])
    if request.voice is None:
        return
    voices = list(subject.engine.info.voices)
    for start in range(0, len(voices), _AT_ONCE):
        some = voices[start : start + _AT_ONCE]
        for voice, speech in zip(some, subject.speak(*(replace(request, voice=each) for each in some)), strict=True):
            soundfile.write(folder / f"voice-{voice}.wav", speech.pcm, subject.sample_rate)


def check_head(engine: Engine, spoken: list[tuple[SynthesisRequest, Codes]], directory: Path) -> Check:
    """Check that an attention head follows the text, so that word timestamps are exact. Stores the best head if so."""
    name, named = "a head follows the text", engine.model_config.text.alignment_head
    logger.info("searching for an attention head that follows the text, in %d utterances", len(spoken))
    heads = find_head(engine, spoken)
    if named is not None:
        known = next(each for each in heads if (each.layer, each.head) == named)
        better = "" if known.follows else f"; the best is {heads[0]}"
        return Check(name, known.follows, f"configured in the checkpoint: {known}{better}", asdict(known))
    best = heads[0]
    if not best.follows:
        return Check(name, None, f"none found, so word times are estimates; the best is {best}", asdict(best))
    try:
        noted = f"stored in {write_head(directory, best)} with the checkpoint"
    except OSError as error:
        advice = (
            f'make it writable and run this again, or write {{"alignment_head": [{best.layer}, {best.head}]}} into it'
        )
        return Check(name, False, f"{best}, but storing the head failed: {error}: {advice}", asdict(best))
    return Check(name, True, f"{best}: {noted}", asdict(best))


def measure(subject: Subject, spoken: list[Speech]) -> Iterator[Check]:
    """Yield measurements that have no required value."""
    request = subject.request(TEXT, Sampling(max_new_tokens=3))
    times_ms = [1e3 * subject.speak(request, most=2)[0].first_audio_s for _ in range(_FIRST_AUDIO_TRIALS)]
    middle_ms = statistics.median(times_ms)
    detail = f"{middle_ms:.1f} ms from the request to the first frame's audio (median of {len(times_ms)}, without HTTP)"
    yield Check("first audio", None, detail, {"first_audio_ms": middle_ms})
    audio_s, took_s = sum(len(each.pcm) for each in spoken) / subject.sample_rate, max(each.took_s for each in spoken)
    detail = f"{audio_s / took_s:.2f} s of codes per second with {len(spoken)} concurrent streams"
    yield Check("speed", None, detail, {"audio_s_per_s": audio_s / took_s})
    yield Check("memory", None, *_memory(subject))


def _memory(subject: Subject) -> tuple[str, dict[str, float | str | None]]:
    host_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    values: dict[str, float | str | None] = {"host_gib": host_gib}
    if not subject.on_gpu:
        return f"{host_gib:.1f} GiB at most", values
    values["gpu_gib"] = gpu_gib = torch.cuda.max_memory_reserved() / 2**30
    return f"{gpu_gib:.1f} GiB of the GPU at most (the KV cache uses all that is free), {host_gib:.1f} GiB here", values


class Exact:
    """The same checkpoint as a float32 reference: plain PyTorch on the CPU, without folded or fused layers."""

    def __init__(self, directory: Path, *, threads: int) -> None:
        config = TalkerConfig(device="cpu", kernels="plain", threads=threads, max_num_seqs=1)
        self.engine = build_engine(directory, config)
        self.network = DecoderNetwork.load(directory / "speech_tokenizer")

    @torch.inference_mode()
    def audio(self, codes: Codes, before: Codes | None) -> NDArray[np.float32]:
        """Return the [samples] of a complete utterance that continues the recording `before`."""
        joined = codes if before is None else np.concatenate([before, codes])
        samples: NDArray[np.float32] = self.network(torch.from_numpy(joined.astype(np.int64))[None])[0].numpy()
        return samples[len(samples) // len(joined) * (len(joined) - len(codes)) :]

    def check_codes(self, name: str, request: SynthesisRequest, expected: Codes, tolerance: Tolerance) -> Check:
        """Check that greedy codes [frames, groups] equal the float32 codes, except for near-ties."""
        most = request.sampling.max_new_tokens or 1
        tell = throttled("greedy codes in float32, frame", logger.info)
        found = divergences(self.engine, request, expected, most=most - 1, begin=lambda known: tell(known, most - 1))
        passed, detail = near_ties(found, expected, tolerance)
        return Check(name, passed, detail, {"frames": len(expected), "otherwise": len(found)})

    def check_audio(
        self, name: str, request: SynthesisRequest, codes: Codes, audio: NDArray[Any], *, least_db: float
    ) -> Check:
        """Check that samples in [-1, 1] match float32. The official package may add one sample at the front, because it
        rounds the length of the recording that it cuts off.
        """
        exact = torch.from_numpy(self.audio(codes, request.reference_codes))
        same = torch.from_numpy(audio[max(0, len(audio) - len(exact)) :])
        ratio_db = snr_db(exact, same) if len(same) == len(exact) else -np.inf
        detail = f"SNR {ratio_db:.1f} dB, at least {least_db:.0f} required; {len(codes)} frames"
        return Check(name, ratio_db >= least_db, detail, {"snr_db": ratio_db})

    def check_every_code(self, *, device: str) -> Check:
        """Check that no code in any codebook drives the decoder to NaN or infinity. Using a GPU saves minutes."""
        tell = throttled("every code through the codec, stream", logger.info)
        largest = largest_activation(self.network.to(device), tell)
        self.network.to("cpu")
        values: dict[str, float | str | None] = {"largest": largest.value, "layer": largest.layer}
        return Check("every code of the codec is finite", isfinite(largest.value), str(largest), values)


def check_official(
    exact: Exact, request: SynthesisRequest, directory: Path, python: Path | None, folder: Path
) -> Iterator[Check]:
    """Check that greedy codes and the waveform equal the output of the official package."""
    name = "greedy codes are the official package's"
    if python is None:
        yield Check(name, None, f"the official package is not installed. {_INSTALL}")
        return
    logger.info("the official package speaks (it shows no progress): %s", python)
    rate = exact.engine.info.sample_rate
    codes, wav = official_speech(directory, request, python, sample_rate=rate)
    soundfile.write(folder / "official.wav", wav, rate)
    yield exact.check_codes(name, request, codes, FLOAT32)
    name, before = "the waveform is the official package's", request.reference_codes
    if len(codes) + (0 if before is None else len(before)) > _OFFICIAL_FRAMES:
        yield Check(
            name, None, f"it decodes at most {_OFFICIAL_FRAMES} frames at once. Use a shorter recording or --frames"
        )
        return
    yield exact.check_audio(name, request, codes, wav, least_db=_FLOAT32_SNR_DB)


def official_speech(
    directory: Path, synthesis: SynthesisRequest, python: Path, *, sample_rate: int
) -> tuple[Codes, NDArray[np.float32]]:
    """Return codes [frames, groups] and samples for the same request from the official package, run by `python`."""
    with tempfile.TemporaryDirectory() as scratch:
        request_file, speech_file = Path(scratch) / "request.json", Path(scratch) / "speech.npz"
        arguments = _official_arguments(synthesis, Path(scratch), sample_rate)
        options = synthesis.sampling
        greedy = {"do_sample": False, "subtalker_dosample": False, "max_new_tokens": options.max_new_tokens}
        values = {"checkpoint": str(directory.resolve()), "arguments": arguments | greedy}
        request_file.write_text(json.dumps(values), encoding="utf-8")
        command = [str(python), "-m", "talkray_tools.official", str(request_file), str(speech_file)]
        root = Path(__file__).parents[1]
        done = subprocess.run(
            command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"the official package failed:\n{done.stdout}")
        with np.load(speech_file) as speech:
            return speech["codes"], speech["wav"]


def _official_arguments(synthesis: SynthesisRequest, scratch: Path, sample_rate: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {"text": synthesis.text, "language": synthesis.language}
    if synthesis.voice is not None:
        arguments["speaker"] = synthesis.voice
    if synthesis.instructions is not None:
        arguments["instruct"] = synthesis.instructions
    if synthesis.reference is not None:
        np.save(scratch / "reference.npy", synthesis.reference.samples)
        arguments["ref_audio"] = (str(scratch / "reference.npy"), sample_rate)
        arguments["ref_text"] = synthesis.reference.text
        arguments["x_vector_only_mode"] = synthesis.reference.x_vector_only
    return arguments


def find_official(named: Path | None) -> Path | None:
    """Return an interpreter that has the official package: `named`, the one from `make parity`, or this one."""
    candidates = [named] if named else [Path(".parity/bin/python"), Path(sys.executable)]
    for python in candidates:
        command = [str(python), "-c", "import importlib.metadata as m; m.version('qwen-tts')"]
        if python.exists() and subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0:
            return python.absolute()
    return None


def read_reference(file: Path, text: str | None, *, sample_rate: int) -> Reference:
    """Read a recording to clone. Exits if its sample rate differs from the checkpoint's."""
    audio, rate = soundfile.read(file, dtype="float32", always_2d=True)
    if rate != sample_rate:
        sys.exit(f"{file} has a sample rate of {rate} Hz. Resample it to the checkpoint's {sample_rate} Hz")
    return Reference(np.ascontiguousarray(audio.mean(axis=1)), text, x_vector_only=text is None)


def _decibels(amplitude: float) -> float:
    return 20 * float(np.log10(max(amplitude, 1e-10)))


def main(arguments: list[str]) -> int:
    """Run the command line. Return the exit code: 0 unless a check failed."""
    return run_command(verify, "talkray verify", arguments)


def verify(
    model: Annotated[list[str], typer.Option(help="Checkpoint directory, released name, or embedded. Repeatable.")],
    frames: Annotated[int, typer.Option(help="Number of greedy frames to compare.")] = 32,
    out: Annotated[Path, typer.Option(help="Folder for verify.json and audio.")] = Path("verify"),
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Device that serves the checkpoint.")] = "auto",
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Use talker.deterministic on a GPU.")] = False,
    official_python: Annotated[
        Path | None, typer.Option(help="Python interpreter with qwen-tts. Default: .parity/bin/python.")
    ] = None,
    reference: Annotated[Path | None, typer.Option(help="Recording for Base checkpoints to clone.")] = None,
    reference_text: Annotated[
        str | None, typer.Option(help="Transcript of the recording. Without it, only the speaker vector is used.")
    ] = None,
    threads: Annotated[int, typer.Option(help="Torch threads.")] = len(os.sched_getaffinity(0)),
) -> None:
    """Verify a checkpoint on this machine: correctness, endings of speech, memory use and speed."""
    given = locals()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    codes = []
    for number, name in enumerate(model, 1):
        folder = out / f"{number}-{Path(name).name}" if len(model) > 1 else out
        codes.append(_verify(argparse.Namespace(**given | {"model": name, "out": folder})))
    raise typer.Exit(max(codes))


def _verify(options: argparse.Namespace) -> int:
    """Verify one checkpoint. Return 1 if a check failed, else 0."""
    checks: list[Check] = []
    started_s = time.perf_counter()
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        for check in _checks(options):
            logger.info("[%.0f s] %s", time.perf_counter() - started_s, check)
            checks.append(check)
    except TalkrayError as error:
        checks.append(Check("it loads and speaks", passed=False, detail=str(error)))
        logger.info("%s", checks[-1])
    return _conclude(checks, options, time.perf_counter() - started_s)


def _checks(options: argparse.Namespace) -> Iterator[Check]:
    directory = locate(options.model, report=logger.info)
    rate = SpeechTokenizerConfig.load(directory / "speech_tokenizer").input_sample_rate
    given = options.reference
    reference = read_reference(given, options.reference_text, sample_rate=rate) if given else None
    subject = Subject(directory, reference, options)
    info, step = subject.engine.info, subject.engine.runner.networks.name
    device = torch.cuda.get_device_name() if subject.on_gpu else f"CPU, torch threads: {options.threads}"
    detail = f"{directory}: all tensors loaded; {device}, talker {step}, codec {subject.precision}"
    yield Check("it loads", True, detail, {"device": device, "talker": step, "codec": subject.precision})
    if info.kind is ModelKind.BASE and reference is None:
        yield Check("everything else", None, "a base checkpoint clones: pass --reference RECORDING")
        return
    requests = [subject.request(TEXT, Sampling(), seed=seed) for seed in SEEDS]
    spoken = subject.speak(*requests)
    yield from check_speech(subject, spoken, options.out)
    yield check_batched(subject, spoken[0])
    yield check_joints(subject, spoken[0], requests[0].reference_codes)
    write_voices(subject, options.out)
    yield from measure(subject, spoken)
    greedy = Sampling(do_sample=False, subtalker_dosample=False, max_new_tokens=options.frames + 1)
    request = subject.request(TEXT, greedy)
    [fast] = subject.speak(request, most=options.frames)
    narrow = Sampling(top_k=1, subtalker_top_k=1, max_new_tokens=options.frames + 1)
    [narrowed] = subject.speak(subject.request(TEXT, narrow, seed=SEEDS[0]), most=options.frames)
    most = Sampling(max_new_tokens=_FOLLOWED_FRAMES + 1)
    requests += [subject.request(text, most, seed=SEEDS[0]) for text in FOLLOWED_TEXTS]
    spoken += subject.speak(*requests[len(SEEDS) :], most=_FOLLOWED_FRAMES)
    said = [(request, speech.codes) for request, speech in zip(requests, spoken, strict=True)]
    is_rounded = subject.engine.runner.networks.talker.codec_head.weight.dtype is not torch.float32
    place = "cuda" if subject.on_gpu else "cpu"
    del subject  # free the weights, because there is memory for only one copy
    gc.collect()
    exact = Exact(directory, threads=options.threads)
    tolerance = ROUNDED if is_rounded else FLOAT32
    yield exact.check_codes("greedy codes are those of float32", request, fast.codes, tolerance)
    yield exact.check_codes("codes drawn with top_k 1 are greedy", request, narrowed.codes, tolerance)
    yield check_head(exact.engine, said, directory)
    heard = fast.pcm.astype(np.float32) / PCM_SCALE
    yield exact.check_audio("the waveform is that of float32", request, fast.codes, heard, least_db=MIN_SNR_DB)
    yield exact.check_every_code(device=place)
    yield from check_official(exact, request, directory, find_official(options.official_python), options.out)


def _conclude(checks: list[Check], options: argparse.Namespace, took_s: float) -> int:
    """Log the last lines, and write the JSON file for bug reports."""
    failed = [check.name for check in checks if check.passed is False]
    passed = sum(check.passed is True for check in checks)
    file = options.out / "verify.json"
    about = {
        "model": options.model,
        "passed": not failed,
        "seconds": round(took_s, 1),
        "python": platform.python_version(),
        "versions": {"talkray": version(), **{name: metadata.version(name) for name in ("torch", "transformers")}},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    file.write_text(json.dumps(about | {"checks": [asdict(check) for check in checks]}, indent=1), encoding="utf-8")
    logger.info("%s and audio are in %s. Listen to the audio", file.name, options.out)
    if failed:
        logger.info("FAIL: %s. Attach %s and the audio to a bug report", "; ".join(failed), file)
        return 1
    logger.info("To measure intelligibility, run `python -m tools.listening --model %s` in a checkout", options.model)
    logger.info("PASS: %d checks in %.0f s", passed, took_s)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
