"""Judge an utterance by its words, pace and trailing silence, and by an estimated opinion score."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import soxr

from talkray_tools.recogniser import Recogniser, package_folder, plain_words, word_errors
from talkray_tools.spoken_texts import Text
from talkray_tools.ways import RATE, Audio, level_db, sounding

_FULL = 32767 / 32768


@dataclass(frozen=True, slots=True)
class Judged:
    """Measurements of one utterance. If it failed, only the errors and the reason are set."""

    way: str
    voice: str
    kind: str
    number: int
    words: int
    errors: dict[str, int]  # by recogniser name
    compared: dict[str, int] = field(default_factory=dict)  # errors in ffmpeg's conversion of raw PCM
    ends: int = 0  # how many of the first and last words the first recogniser heard
    seconds: float = 0.0  # from the first to the last sound
    tail_s: float = 0.0  # trailing silence
    opinion: float = 0.0  # overall DNSMOS score, 1 to 5; 0 if DNSMOS is not installed
    heard: dict[str, str] = field(default_factory=dict)
    level_db: float = 0.0  # level of the non-silent part, relative to full scale
    clipped: float = 0.0  # share of samples at full scale
    reason: str = ""  # why generation ended, if the server reports it
    failed: str = ""

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.way, self.voice, self.kind, self.number


class Judge:
    """Recognisers and measurements for one language. If there are no recognisers, only measurements are made."""

    def __init__(self, recognisers: list[Recogniser], language: str) -> None:
        self.recognisers, self._language = recognisers, language
        self._opinion: Callable[[Audio], float] = lambda audio: 0.0
        with suppress(SystemExit, ModuleNotFoundError):  # DNSMOS or its runtime is not installed
            self._opinion = Opinion() if recognisers else self._opinion

    def words(self, text: str) -> list[str]:
        return plain_words(text, self._language)

    def judge(self, key: tuple[str, str, str, int], text: Text, audio: Audio, converted: Audio | None) -> Judged:
        """Judge one utterance and, if given, ffmpeg's conversion. Numbers may be transcribed as digits."""
        wanted, heard = self.words(text.spoken), self._written(audio)
        got = self.words(next(iter(heard.values()), ""))
        begin, end = sounding(audio)
        return Judged(
            *key,
            words=len(wanted),
            errors=self._errors(text, heard),
            compared={} if converted is None else self._errors(text, self._written(converted)),
            ends=sum(wanted[place] == got[place] for place in (0, -1) if got),
            seconds=(end - begin) / RATE,
            tail_s=(len(audio) - end) / RATE,
            opinion=self._opinion(audio),
            heard=heard,
            level_db=level_db(audio[begin:end]),
            clipped=float((np.abs(audio) >= _FULL).mean()) if len(audio) else 0.0,
        )

    def failed(self, key: tuple[str, str, str, int], text: str, reason: str) -> Judged:
        """Return the result for a failed request, in which every word counts as wrong."""
        words = len(self.words(text))
        return Judged(*key, words, {each.name: words for each in self.recognisers}, failed=reason)

    def _written(self, audio: Audio) -> dict[str, str]:
        return {each.name: each.transcribe(audio, RATE) for each in self.recognisers}

    def _errors(self, text: Text, heard: dict[str, str]) -> dict[str, int]:
        wanted = [self.words(each) for each in dict.fromkeys((text.spoken, text.written))]
        return {name: min(word_errors(each, self.words(said)) for each in wanted) for name, said in heard.items()}


class Opinion:
    """Estimates the mean opinion score: the overall DNSMOS P.835 score, using the network in `speechmos`."""

    SAMPLE_RATE = 16000
    SAMPLES = int(9.01 * SAMPLE_RATE)

    def __init__(self) -> None:
        import onnxruntime  # optional dependency

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        network = package_folder("speechmos") / "dnsmos_models" / "sig_bak_ovr.onnx"
        self._network = onnxruntime.InferenceSession(str(network), options, providers=["CPUExecutionProvider"])

    def __call__(self, audio: Audio) -> float:
        """Return the score of [samples], after repeating or trimming the audio to the network's input length."""
        resampled = soxr.resample(audio, RATE, self.SAMPLE_RATE)
        repeated = np.tile(resampled, -(-self.SAMPLES // max(1, len(resampled))))[: self.SAMPLES]
        _, _, raw = self._network.run(None, {"input_1": repeated[None].astype(np.float32)})[0][0]
        return float(np.polyval([-0.06766283, 1.11546468, 0.04602535], raw))
