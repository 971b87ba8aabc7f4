"""The teacher, hibari, and the changes to its single voice for each speaker."""

import importlib
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from tools.demo_voice.manners import MANNERS, PLAIN, SpokenManner
from tools.demo_voice.shape import FRAME_SAMPLES, PHONE_SAMPLES
from tools.demo_voice.speakers import VOICES, spoken_by

SAMPLE_RATE = 24000

Audio = NDArray[np.float32]  # [samples]
Phones = NDArray[np.uint8]

_DURATIONS = "/Round_output_0"
_TAPS = 48  # length of the resampling filter, at the lower of the two rates
_STEP = SAMPLE_RATE // 100  # samples per window in the detection of silence
_SPEECH = 0.005  # minimum level of speech, relative to the peak
# Speech begins after three frames, because text streamed at one token per frame must arrive before it is spoken.
_LEAD_S, _TAIL_S, _PAUSE_S = 0.24, 0.14, 0.28
_FADE_S = 0.01
AHEAD = SAMPLE_RATE // 25  # samples by which sounds are named early, because each sound is pronounced towards the next
_GAP = 16  # the teacher's number for a gap between words; smaller numbers are punctuation
_LOUDNESS, _PEAK = 0.08, 0.95


@dataclass(frozen=True, slots=True)
class TeacherSpeech:
    """The teacher's speech, and the sound of each part of it."""

    audio: Audio  # whole frames
    phones: Phones  # one per PHONE_SAMPLES samples, AHEAD samples early


class Timed:
    """The teacher's network, which stores the duration of each phoneme of its last sentence and applies a speaker.

    The released network does not output the durations, so they are added to the list of its outputs. Appending a
    serialised message to another one merges both, so this needs no library.
    """

    def __init__(self, file: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        floats = _field(1, b"\x08\x01")
        output = _field(1, _DURATIONS.encode()) + _field(2, floats)
        network = file.read_bytes() + _field(7, _field(12, output))
        self._session = onnxruntime.InferenceSession(network, options, providers=["CPUExecutionProvider"])
        self.durations = np.zeros(0, np.float32)  # in units of two output steps
        self.num_steps = 0
        self.speaker, self.manner = VOICES["nora"], MANNERS[PLAIN]

    def run(self, names: None, inputs: dict[str, NDArray[np.generic]]) -> list[NDArray[np.float32]]:
        """Run the session, and return the outputs that the package expects."""
        outputs: list[NDArray[np.float32]] = self._session.run(names, inputs)
        self.durations = outputs.pop()
        self.num_steps = outputs[0].shape[-1]
        return spoken_by(self.speaker, self.manner, outputs)


def _field(number: int, payload: bytes) -> bytes:
    """Return a length-delimited protocol buffer field. All payloads here are short."""
    assert len(payload) < 128
    return bytes([number << 3 | 2, len(payload)]) + payload


class Teacher:
    """Speaks text in any of the voices."""

    def __init__(self, voice: Any, timed: Timed) -> None:
        self._voice, self._timed = voice, timed

    @classmethod
    def load(cls, wheels: Path | None) -> "Teacher":
        """Load the installed package, or the wheel in the directory `wheels`, unpacked to a temporary folder."""
        if wheels is not None:
            (wheel,) = wheels.glob("hibari_tts-*.whl")
            target = tempfile.mkdtemp(prefix="teacher-")
            zipfile.ZipFile(wheel).extractall(target)
            sys.path.insert(0, target)
        voice = importlib.import_module("hibari").Hibari(threads=1)
        timed = voice.sess = Timed(Path(voice.model_path))
        return cls(voice, timed)

    def speak(self, text: str, name: str, manner: SpokenManner = MANNERS[PLAIN], *, seed: int) -> TeacherSpeech:
        """Return normalised speech with little silence at its ends and short pauses between sentences; may be empty."""
        generator = np.random.default_rng(seed)
        self._timed.speaker, self._timed.manner = VOICES[name], manner
        sentences = [self._sentence(phonemes, generator) for phonemes in self._voice.phonemize(text)]
        lost = any(sentence is None for sentence in sentences)
        sentences = [sentence for sentence in sentences if sentence is not None and len(sentence[0])]
        if lost or not sentences:
            return TeacherSpeech(np.zeros(0, np.float32), np.zeros(0, np.uint8))
        pieces = [piece for sentence in sentences for piece in (_silence(_PAUSE_S), sentence)][1:]
        pieces = [_silence(_LEAD_S), *pieces, _silence(_TAIL_S)]
        audio, phones = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
        padding = -len(audio) % FRAME_SAMPLES
        phones = np.pad(phones, (0, padding + AHEAD))[AHEAD:][PHONE_SAMPLES // 2 :: PHONE_SAMPLES]
        leveled = _normalise(audio) * np.float32(10 ** (manner.level_db / 20))
        return TeacherSpeech(np.pad(leveled, (0, padding)), phones.astype(np.uint8))

    def words(self, text: str) -> list[list[int]]:
        """Return the numbers of each word's phonemes, without punctuation."""
        numbers = [number for sentence in self._voice.phonemize(text) for number in (*self._voice.ids(sentence), _GAP)]
        places = [place for place, number in enumerate(numbers) if number == _GAP]
        words = [numbers[start:end] for start, end in zip([0, *places], places, strict=False)]
        return [spoken for word in words if (spoken := [number for number in word if number > _GAP])]

    def _sentence(self, phonemes: str, generator: np.random.Generator) -> tuple[Audio, Phones] | None:
        """Return trimmed samples, and the phoneme at each sample; None if the teacher truncated a long sentence."""
        speaker, ids = self._timed.speaker, self._voice.ids(phonemes)
        factor = speaker.size
        speed = min(speaker.speed / float(factor), self._timed.manner.speed)
        spoken = self._voice.from_ids(ids, speed, generator)
        phones = np.repeat(np.asarray(ids, np.uint8), 2 * self._timed.durations.astype(int))
        if len(phones) != self._timed.num_steps:
            return None
        audio = resample(spoken, 1 / factor)
        places = np.arange(len(audio)) * len(phones) // max(len(audio), 1)
        begin, end = _sounding(audio)
        return _faded(audio[begin:end]), phones[places][begin:end]


def _silence(seconds: float) -> tuple[Audio, Phones]:
    samples = int(seconds * SAMPLE_RATE)
    return np.zeros(samples, np.float32), np.zeros(samples, np.uint8)


def resample(audio: Audio, ratio: Fraction) -> Audio:
    """Resample `audio` to `ratio` times as many samples, with a band limit."""
    if ratio == 1 or not len(audio):
        return audio
    up, down = ratio.numerator, ratio.denominator
    filters, reach = _filters(up, down)
    padded = np.pad(audio, (reach, reach + down))
    windows = np.lib.stride_tricks.sliding_window_view(padded, filters.shape[1])
    out = np.empty(len(audio) * up // down, np.float32)
    for phase in range(min(up, len(out))):
        # Output sample m lies at m * down / up of the input.
        count = len(range(phase, len(out), up))
        start = phase * down // up
        out[phase::up] = windows[start::down][:count] @ filters[phase]
    return out


@cache
def _filters(up: int, down: int) -> tuple[NDArray[np.float32], int]:
    """Return a windowed sinc at each of the `up` fractional positions, [up, taps], and the taps before a position."""
    cutoff = min(1.0, up / down) * 0.96
    reach = int(_TAPS / 2 / cutoff)
    distance = np.arange(-reach, reach + 1)[None] - (np.arange(up)[:, None] * down % up) / up
    window = np.cos(np.clip(distance / (reach + 1), -1, 1) * np.pi / 2) ** 2
    return (cutoff * np.sinc(cutoff * distance) * window).astype(np.float32), reach


def _sounding(audio: Audio) -> tuple[int, int]:
    """Return the first and the last sample of the speech; an empty range if there is only silence."""
    steps = np.abs(audio[: len(audio) // _STEP * _STEP]).reshape(-1, _STEP).max(axis=1, initial=0)
    peak = steps.max(initial=0)
    if peak < 1e-3:
        return 0, 0
    (speech,) = np.nonzero(steps > _SPEECH * peak)
    return int(max(speech[0] - 1, 0)) * _STEP, int(speech[-1] + 2) * _STEP


def _faded(audio: Audio) -> Audio:
    """Fade both ends to prevent clicks."""
    faded = audio.copy()
    size = min(int(_FADE_S * SAMPLE_RATE), len(faded))
    ramp = np.linspace(0, 1, size, dtype=np.float32)
    faded[:size] *= ramp
    faded[len(faded) - size :] *= ramp[::-1]
    return faded


def _normalise(audio: Audio) -> Audio:
    """Scale to the common loudness, measured where there is speech."""
    level = np.abs(audio)
    active = audio[level > _SPEECH * level.max()]
    gain = min(_LOUDNESS / float(np.sqrt(np.mean(np.square(active)))), _PEAK / float(level.max()))
    return (audio * gain).astype(np.float32)
