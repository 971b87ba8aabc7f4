"""Check a recording for cloning: find flaws, give advice for a better recording, and prepare a copy for cloning.

All checks use only the sound of one recording and its transcript. The checks cannot count the speakers, because only
replicas of a Base checkpoint have a trained speaker encoder.
"""

import unicodedata
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from deployments.errors import InvalidRequest
from serve_app.audio.clone_prompts import Preparation
from serve_app.audio.recordings import MAX_SECONDS, decode_file
from serve_app.text.characters import letters

Samples = NDArray[np.float32]
Sentence = Annotated[str, Field(max_length=512)]
Severity = Literal["problem", "warning", "note"]

LOUDNESS_LUFS, PEAK_DBFS = -20.0, -1.0  # a prepared recording has this loudness, and stays below this peak
SILENCE_S = 0.5  # appended silence, because clones could otherwise begin with the recording's last words
_LEAD_S, _TAIL_S, _FADE_S = 0.1, 0.2, 0.01  # after trimming: silence before and after the speech, and the fade at cuts
_STEP_S = 0.02  # time window of level measurements
_DIGITAL_SILENCE = -90.0  # dBFS
_LEAST_SPEECH, _STEADY_DB = -60.0, 3.0  # minimum level of speech in dBFS, and its minimum distance to noise
_LOUDEST = 100.0  # relative to full scale, because floating-point files can contain any value
_BAND_HZ = 500
_CLIPPED_S = 0.003  # minimum total time at the limit; 480 excerpts of clean speech reached at most 0.0006 s
# Seconds per letter, by the first word of its Unicode name. Latin scripts have about 12 letters per second. Four
# English recordings had 7 to 17 letters per second, not counting pauses.
_LETTER_S = {"CJK": 0.22, "HANGUL": 0.18, "HIRAGANA": 0.13, "KATAKANA": 0.13}
_OTHER_LETTER_S, _DIGIT_S = 0.08, 0.3
_WRONG_SHARE = 0.4  # of the words, because a small recogniser mishears up to 30 % in some languages


@dataclass(frozen=True, slots=True)
class Flaw:
    """Flaw in a recording. Problems spoil every clone, warnings are audible in clones, notes suggest improvements."""

    code: Annotated[str, Field(max_length=40)]
    severity: Severity
    found: Sentence
    advice: Sentence  # how to make a better recording


@dataclass(frozen=True, slots=True)
class HeardWords:
    """Transcript by a recogniser, and the number of words that differ from the given transcript."""

    text: str
    errors: int
    words: int  # number of words in the given transcript


@dataclass(frozen=True, slots=True)
class Measures:
    """Measurements of a recording before it is prepared."""

    seconds: float
    sample_rate: int  # Hz
    lead_s: float  # before the first speech
    tail_s: float  # after the last speech
    spoken_s: float  # duration of speech without pauses
    longest_pause_s: float
    loudness_lufs: float  # integrated (ITU-R BS.1770); -70 if silent
    peak_dbfs: float
    speech_dbfs: float  # mean power of steps with speech
    noise_dbfs: float  # level of the quietest steps, no lower than -90
    clipped_share: float  # share of samples at the limit
    bandwidth_hz: int
    cut_off: tuple[str, ...]  # ends of the recording that cut speech off: "beginning", "end"

    @property
    def speech_s(self) -> float:
        return self.seconds - self.lead_s - self.tail_s

    @property
    def snr_db(self) -> float:
        return self.speech_dbfs - self.noise_dbfs

    @property
    def has_speech(self) -> bool:
        return self.speech_dbfs > _LEAST_SPEECH and self.snr_db > _STEADY_DB


@dataclass(frozen=True, slots=True)
class CheckedRecording:
    """A recording in the form in which it is stored, and its flaws, most severe first."""

    audio: Samples  # mono, [samples] in [-1, 1]
    sample_rate: int  # Hz, as in the file
    measures: Measures
    flaws: tuple[Flaw, ...]
    changes: tuple[str, ...]  # changes made by the preparation, one sentence each

    def as_json(self) -> dict[str, Any]:
        """Return all fields except the samples."""
        measures = asdict(self.measures) | {"speech_s": self.measures.speech_s, "snr_db": self.measures.snr_db}
        return {
            "measures": {key: round(item, 4) if isinstance(item, float) else item for key, item in measures.items()},
            "flaws": [asdict(flaw) for flaw in self.flaws],
            "changes": list(self.changes),
            "stored_seconds": round(self.audio.size / self.sample_rate, 4),
        }


def check_recording(
    data: bytes, *, field: str, transcript: str | None, heard: HeardWords | None, prepare: Preparation
) -> CheckedRecording:
    """Check a recording, and prepare a copy if `prepare` is "auto". If it is "none", keep the samples unchanged.

    Raises InvalidRequest for `field` if the file is not a recording of 0.5 to 30 seconds. Blocks for 0.1 s.
    """
    audio, sample_rate = decode_file(data, field)
    if np.abs(audio).max() > _LOUDEST:
        raise InvalidRequest(f"{field}: the samples are far above full scale. Scale them to [-1, 1].", field)
    measures = measure(audio, sample_rate)
    order = ("problem", "warning", "note")
    flaws = tuple(sorted(_flaws(measures, transcript, heard), key=lambda flaw: order.index(flaw.severity)))
    changes: tuple[str, ...] = ()
    if prepare == "auto" and measures.has_speech:
        audio, changes = _prepared(audio, measures)
    return CheckedRecording(audio, sample_rate, measures=measures, flaws=flaws, changes=changes)


def decode_prepared(data: bytes, field: str) -> tuple[Samples, int]:
    """Decode a file like `decode_file`, and prepare its audio."""
    checked = check_recording(data, field=field, transcript=None, heard=None, prepare="auto")
    return checked.audio, checked.sample_rate


def measure(audio: Samples, sample_rate: int) -> Measures:
    """Measure mono audio, [samples] in [-1, 1], of at least half a second."""
    step = round(_STEP_S * sample_rate)
    levels = _decibels(audio[: audio.size // step * step].reshape(-1, step).std(axis=1))
    high = float(np.percentile(levels, 95))
    sounding = levels[levels > _DIGITAL_SILENCE]
    noise = float(np.percentile(sounding, 5)) if sounding.size else _DIGITAL_SILENCE
    is_speech = _steady(levels > max(high - 40, min(noise + 6, high - 20)))
    places = np.flatnonzero(is_speech) if is_speech.any() else np.array([0, levels.size - 1])
    peak = float(np.abs(audio).max())
    in_speech = max(high - 20, noise + 10)
    edges = {"beginning": levels[:2].min() > in_speech, "end": levels[-2:].min() > in_speech}
    return Measures(
        seconds=audio.size / sample_rate,
        sample_rate=sample_rate,
        lead_s=int(places[0]) * _STEP_S,
        tail_s=audio.size / sample_rate - (int(places[-1]) + 1) * _STEP_S,
        spoken_s=int(is_speech.sum()) * _STEP_S,
        longest_pause_s=(int(np.diff(places).max()) - 1) * _STEP_S,
        loudness_lufs=_loudness(audio, sample_rate),
        peak_dbfs=float(_decibels(np.array(peak))),
        speech_dbfs=float(10 * np.log10(np.mean(10 ** (levels[places] / 10)))),
        noise_dbfs=noise,
        clipped_share=_clipped(audio, peak, sample_rate),
        bandwidth_hz=_bandwidth(audio, sample_rate),
        cut_off=tuple(edge for edge, is_cut in edges.items() if is_cut),
    )


def _decibels(amplitude: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """Convert amplitudes to dBFS. The minimum is the level of digital silence."""
    return 20 * np.log10(np.maximum(amplitude.astype(np.float64), 10 ** (_DIGITAL_SILENCE / 20)))


def _steady(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Keep only runs of at least three steps, because clicks are shorter than speech."""
    three = np.ones(3, int)
    return np.convolve(np.convolve(mask, three, "valid") == 3, three, "full") > 0


def _clipped(audio: Samples, peak: float, sample_rate: int) -> float:
    """Return the share of samples at the limit, which is the peak, or full scale if a lossy format overshoots it."""
    num_clipped = int((np.abs(audio) >= min(0.98 * peak, 0.97)).sum()) if peak else 0
    return num_clipped / audio.size if num_clipped > _CLIPPED_S * sample_rate else 0.0


def _bandwidth(audio: Samples, sample_rate: int) -> int:
    """Return the bandwidth of the louder half in Hz. In the 1 kHz above it, levels are 60 dB below the loudest band."""
    size = round(0.032 * sample_rate)
    pieces = audio[: audio.size // size * size].reshape(-1, size)
    loud = pieces[pieces.std(axis=1) >= np.median(pieces.std(axis=1))]
    power = np.abs(np.fft.rfft(loud * np.hanning(size))) ** 2
    band = (np.fft.rfftfreq(size, 1 / sample_rate) // _BAND_HZ).astype(int)
    strong = np.array([np.percentile(power[:, band == index].mean(axis=1), 95) for index in range(band[-1])])
    is_empty = np.append(strong < strong.max() * 1e-6, True)
    ends = np.flatnonzero(is_empty[:-1] & is_empty[1:])
    return int(ends[0]) * _BAND_HZ if ends.size else sample_rate // 2


def _loudness(audio: Samples, sample_rate: int) -> float:
    """Measure the integrated loudness in LUFS with FFmpeg."""
    import av

    graph = av.filter.Graph()
    source = graph.add("abuffer", f"sample_rate={sample_rate}:sample_fmt=flt:channel_layout=mono")
    meter, sink = graph.add("ebur128", "metadata=1"), graph.add("abuffersink")
    source.link_to(meter)
    meter.link_to(sink)
    graph.configure()
    frame = av.AudioFrame.from_ndarray(audio[None], format="flt", layout="mono")
    frame.sample_rate = sample_rate
    source.push(frame)
    source.push(None)
    loudness = -70.0
    while True:
        try:
            loudness = float(sink.pull().metadata.get("lavfi.r128.I", loudness))
        except (av.EOFError, av.BlockingIOError):
            return loudness


def _prepared(audio: Samples, measures: Measures) -> tuple[Samples, tuple[str, ...]]:
    """Trim silence at both ends, set the common loudness, and append silence. Return the copy and the changes made."""
    rate = measures.sample_rate
    changes = []
    lead, tail = (round(max(0.0, span) * rate) for span in (measures.lead_s - _LEAD_S, measures.tail_s - _TAIL_S))
    gain_db = min(LOUDNESS_LUFS - measures.loudness_lufs, PEAK_DBFS - measures.peak_dbfs)
    audio = audio[lead : audio.size - tail] * np.float32(10 ** (gain_db / 20))
    fade = np.linspace(0, 1, round(_FADE_S * rate), dtype=np.float32)
    if lead:
        audio[: fade.size] *= fade
        changes.append(f"Cut {lead / rate:.2f} s of silence from the beginning.")
    if tail:
        audio[-fade.size :] *= fade[::-1]
        changes.append(f"Cut {tail / rate:.2f} s of silence from the end.")
    if abs(gain_db) >= 0.05:
        changes.append(f"Made the speech {abs(gain_db):.1f} dB {'louder' if gain_db > 0 else 'quieter'}.")
    silence = np.zeros(min(round(SILENCE_S * rate), int(MAX_SECONDS * rate) - audio.size), np.float32)
    shortened = "" if silence.size == round(SILENCE_S * rate) else f", up to the limit of {MAX_SECONDS:g} s"
    changes.append(f"Appended {silence.size / rate:.2f} s of silence{shortened}.")
    return np.concatenate([audio, silence]), tuple(changes)


def _flaws(measures: Measures, transcript: str | None, heard: HeardWords | None) -> Iterator[Flaw]:
    if measures.has_speech:
        yield from _flaws_of_length(measures)
        yield from _flaws_of_sound(measures)
        yield from _flaws_of_words(measures.spoken_s, transcript, heard)
    else:
        finding = "The recording does not contain speech. It is silent or a steady sound."
        yield Flaw("no_speech", "problem", finding, "Check the microphone and the file.")


def _flaws_of_length(measures: Measures) -> Iterator[Flaw]:
    finding = f"The recording contains {measures.speech_s:.1f} s of speech."
    if measures.speech_s < 5:
        yield Flaw("short", "warning" if measures.speech_s < 3 else "note", finding, "Record 5 to 15 s.")
    if measures.speech_s > 15:
        advice = "Keep the best 5 to 15 s in whole sentences, because a long recording delays every clone."
        yield Flaw("long", "note", finding, advice)
    if measures.longest_pause_s > 1.5:
        finding = f"The recording has a pause of {measures.longest_pause_s:.1f} s."
        yield Flaw("pause", "warning", finding, "Speak without long pauses, because clones copy them.")
    if measures.cut_off:
        finding = f"Speech is cut off at the {' and '.join(measures.cut_off)} of the recording."
        advice = "Begin and end with whole words, and leave half a second of silence around them."
        yield Flaw("cut_off", "warning", finding, advice)


def _flaws_of_sound(measures: Measures) -> Iterator[Flaw]:
    if measures.clipped_share:
        severity: Severity = "problem" if measures.clipped_share > 0.01 else "warning"
        finding = f"The recording is clipped: {measures.clipped_share:.2%} of its samples are at full scale."
        yield Flaw("clipped", severity, finding, "Reduce the gain. Peaks at -6 dBFS are loud enough.")
    if measures.snr_db < 20:
        severity = "problem" if measures.snr_db < 10 else "warning"
        finding = f"Noise or echo is only {measures.snr_db:.0f} dB quieter than speech."
        advice = "Record in a quiet, furnished room without music, 10 cm from the microphone."
        yield Flaw("noisy", severity, finding, advice)
    if measures.loudness_lufs < -40:
        finding = f"The recording is very quiet: {measures.loudness_lufs:.0f} LUFS."
        advice = "Speak closer to the microphone, because amplification also amplifies noise."
        yield Flaw("quiet", "warning", finding, advice)
    if measures.bandwidth_hz < 7000:
        code, severity = ("telephone", "warning") if measures.bandwidth_hz <= 4500 else ("dull", "note")
        finding = f"The recording does not contain frequencies above {measures.bandwidth_hz / 1000:g} kHz."
        advice = "Record at 24 kHz or more, without a telephone or headset, because clones sound equally dull."
        yield Flaw(code, severity, finding, advice)


def _flaws_of_words(spoken_s: float, transcript: str | None, recognised: HeardWords | None) -> Iterator[Flaw]:
    if transcript is None:
        finding = "The transcript is missing." + (f" A recogniser hears: {recognised.text}" if recognised else "")
        advice = "Send the exact words. Clones of a released Base checkpoint then also copy the way of speaking."
        yield Flaw("no_transcript", "note", finding, advice)
        return
    expected_s = reading_time_s(transcript)
    finding = f"The transcript needs about {expected_s:.1f} s, but the recording has {spoken_s:.1f} s of speech."
    advice = "Send exactly the spoken words, because clones otherwise skip or repeat words."
    if expected_s > 2 * spoken_s + 1:
        yield Flaw("transcript_long", "problem", finding, advice)
    if spoken_s > 2 * expected_s + 1:
        yield Flaw("transcript_short", "problem", finding, advice)
    if recognised is not None and recognised.errors > _WRONG_SHARE * recognised.words:
        finding = f"A recogniser hears {recognised.errors} of {recognised.words} words differently: {recognised.text}"
        yield Flaw("other_words", "warning", finding, advice)


def reading_time_s(text: str) -> float:
    """Estimate how many seconds it takes to speak a text without pauses, from its letters and digits in any script."""
    return sum(map(_character_s, letters(text)))


def _character_s(character: str) -> float:
    if not character.isalpha():
        return _DIGIT_S if character.isdecimal() else 0.0
    return _LETTER_S.get(unicodedata.name(character, "").replace("-", " ").partition(" ")[0], _OTHER_LETTER_S)
