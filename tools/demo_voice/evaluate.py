"""Listens to a voice: how much of what it says is understood, how fast it speaks, and whether it stops.

    python -m tools.demo_voice.evaluate --sentences 100

Sentences that no training held are spoken by the engine and the codec in this process, and transcribed beside them.
"""

import argparse
import json
import logging
import sys
import time
import wave
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import onnxruntime
import soxr
import torch
from numpy.typing import NDArray

from deployments.codec.decoder import CodecDecoder, to_pcm16
from deployments.config import TalkerConfig
from deployments.model_store import locate
from deployments.protocol import FinishReason, GenerateRequest, SynthesisRequest
from deployments.talker.loading import build_engine
from tools.demo_voice.texts import lines
from tools.listening.recogniser import Whisper, package_folder, plain_words, word_errors

logger = logging.getLogger(__name__)

Audio = NDArray[np.float32]  # [samples] within [-1, 1]

_AT_ONCE = 8  # utterances in a batch
_STEP_S = 0.02  # over which loudness is measured
_QUIET = 0.01  # of the loudest step
_LONG_TAIL_S = 0.6
_REPORT_EVERY = 20


@dataclass(frozen=True, slots=True)
class Spoken:
    """An utterance as a voice made it."""

    text: str
    audio: Audio
    stopped: bool


@dataclass(frozen=True, slots=True)
class Judged:
    """What a listener made of it."""

    words: int
    errors: int
    seconds: float  # from the first to the last sound
    tail_s: float  # of quiet behind them
    stopped: bool
    opinion: float  # overall DNSMOS, 1 to 5
    text: str
    heard: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """A voice over all its utterances."""

    voice: str
    utterances: int
    word_error_rate: float
    words_per_second: float
    runaways: int
    silent_tails: int
    opinion: float

    @classmethod
    def of(cls, voice: str, judged: list[Judged]) -> "Verdict":
        """Rates over all words, counts over all utterances."""
        words = sum(utterance.words for utterance in judged)
        return cls(
            voice=voice,
            utterances=len(judged),
            word_error_rate=sum(utterance.errors for utterance in judged) / words,
            words_per_second=words / sum(utterance.seconds for utterance in judged),
            runaways=sum(not utterance.stopped for utterance in judged),
            silent_tails=sum(utterance.tail_s > _LONG_TAIL_S for utterance in judged),
            opinion=float(np.mean([utterance.opinion for utterance in judged])),
        )


class Speaker:
    """Engine and codec of one checkpoint."""

    def __init__(self, directory: Path, *, full_text: bool) -> None:
        self.engine = build_engine(
            directory, TalkerConfig(device="cpu", max_num_seqs=_AT_ONCE, max_num_waiting=1 << 20)
        )
        self.decoder = CodecDecoder.load(directory / "speech_tokenizer")
        self.full_text = full_text
        self.info = self.engine.info

    def speak(self, texts: list[str], voice: str) -> Iterator[Spoken]:
        """All texts, in the order in which they are done."""
        for number, text in enumerate(texts):
            request = SynthesisRequest(
                str(number), text, voice=voice, language="english", seed=number, non_streaming_mode=self.full_text
            )
            self.engine.add(number, GenerateRequest(request))
        frames: dict[int, list[NDArray[np.int16]]] = {number: [] for number in range(len(texts))}
        while not self.engine.is_idle:
            for number, chunk in self.engine.step().chunks:
                frames[number].append(chunk.codes)
                if chunk.finish_reason is not None:
                    codes = np.concatenate(frames.pop(number))
                    stopped = chunk.finish_reason is FinishReason.STOP
                    yield Spoken(texts[number], self._decode(codes), stopped)

    def _decode(self, codes: NDArray[np.int16]) -> Audio:
        audio, _ = self.decoder.decode(torch.from_numpy(codes).long()[None], [self.decoder.initial_state()])
        samples: Audio = audio[0].numpy()
        return samples


class Listener:
    """Transcribes, measures and rates."""

    def __init__(self, sample_rate: int) -> None:
        self.sample_rate = sample_rate
        self.transcriber = Whisper()
        self.opinion = Opinion()

    def judge(self, spoken: Spoken) -> Judged:
        """Everything about one utterance."""
        heard = self.transcriber.transcribe(spoken.audio, self.sample_rate)
        words = plain_words(spoken.text)
        begin, end = sounding(spoken.audio, int(_STEP_S * self.sample_rate))
        return Judged(
            words=len(words),
            errors=word_errors(words, plain_words(heard)),
            seconds=(end - begin) / self.sample_rate,
            tail_s=(len(spoken.audio) - end) / self.sample_rate,
            stopped=spoken.stopped,
            opinion=self.opinion(spoken.audio, self.sample_rate),
            text=spoken.text,
            heard=heard,
        )


class Opinion:
    """An estimate of the mean opinion score: the overall value of DNSMOS P.835, whose network `speechmos` carries."""

    SAMPLE_RATE = 16000
    SAMPLES = int(9.01 * SAMPLE_RATE)

    def __init__(self) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        network = package_folder("speechmos") / "dnsmos_models" / "sig_bak_ovr.onnx"
        self._network = onnxruntime.InferenceSession(str(network), options, providers=["CPUExecutionProvider"])

    def __call__(self, audio: Audio, sample_rate: int) -> float:
        """The score of [samples], repeated to the network's length or cut to it."""
        resampled = soxr.resample(audio, sample_rate, self.SAMPLE_RATE)
        repeated = np.tile(resampled, -(-self.SAMPLES // len(resampled)))[: self.SAMPLES]
        _, _, raw = self._network.run(None, {"input_1": repeated[None].astype(np.float32)})[0][0]
        return float(np.polyval([-0.06766283, 1.11546468, 0.04602535], raw))


def sounding(audio: Audio, step: int) -> tuple[int, int]:
    """First and last sample of what is loud enough to hear; the whole where all is silence."""
    levels = np.sqrt(np.mean(np.square(audio[: len(audio) // step * step].reshape(-1, step)), axis=1))
    (loud,) = np.nonzero(levels > _QUIET * levels.max(initial=1e-9))
    return (int(loud[0]) * step, int(loud[-1] + 1) * step) if len(loud) else (0, len(audio))


def evaluate(speaker: Speaker, texts: list[str], *, voice: str, keep: Path | None) -> list[Judged]:
    """Let a voice speak all texts; the listener works beside it."""
    listener = Listener(speaker.info.sample_rate)
    begin = time.perf_counter()
    with ThreadPoolExecutor(1) as pool:
        judged: list[Future[Judged]] = []
        for spoken in speaker.speak(texts, voice):
            if keep is not None:
                _write_wav(keep / f"{voice}-{len(judged):03d}.wav", spoken.audio, speaker.info.sample_rate)
            judged.append(pool.submit(listener.judge, spoken))
            if len(judged) % _REPORT_EVERY == 0:
                logger.info("%s: %d spoken, %.0f s", voice, len(judged), time.perf_counter() - begin)
        return [future.result() for future in judged]


def _write_wav(file: Path, audio: Audio, sample_rate: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(file), "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(sample_rate)
        out.writeframes(to_pcm16(torch.from_numpy(audio)).tobytes())


def held_out_texts(count: int) -> list[str]:
    """The first `count` sentences that no training held."""
    texts = [line.text for line in lines(0, ("any",)) if line.split == "heldout"]
    return texts[:count]


def main(arguments: list[str]) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.demo_voice.evaluate", description="Measure how well a voice is understood."
    )
    parser.add_argument("--model", default="embedded", help="a checkpoint directory, or embedded")
    parser.add_argument("--sentences", type=int, default=100, help="per voice")
    parser.add_argument("--voice", action="append", help="only this voice; may be repeated")
    parser.add_argument("--streaming-text", action="store_true", help="let the text trail instead of prompting with it")
    parser.add_argument("--keep", type=Path, help="a folder for the audio and for every transcript")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    logging.getLogger("faster_whisper").setLevel(logging.WARNING)
    speaker = Speaker(locate(options.model), full_text=not options.streaming_text)
    texts = held_out_texts(options.sentences)
    verdicts = []
    for voice in options.voice or speaker.info.voices:
        judged = evaluate(speaker, texts, voice=voice, keep=options.keep)
        if options.keep is not None:
            rows = "".join(json.dumps(asdict(utterance)) + "\n" for utterance in judged)
            (options.keep / f"{voice}.jsonl").write_text(rows, encoding="utf-8")
        verdicts.append(Verdict.of(voice, judged))
    report(verdicts)
    return 0


def report(verdicts: list[Verdict]) -> None:
    """Log a table."""
    logger.info("voice     utterances   WER    words/s  runaways  silent tails  DNSMOS")
    for verdict in verdicts:
        logger.info(
            "%-9s %10d  %5.1f %%  %7.2f  %8d  %12d  %6.2f",
            verdict.voice,
            verdict.utterances,
            100 * verdict.word_error_rate,
            verdict.words_per_second,
            verdict.runaways,
            verdict.silent_tails,
            verdict.opinion,
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
