"""Checks a recording for cloning: finds faults, advises on a better one, and makes a copy that clones better.

All checks use only the sound of one recording and its transcript. They do not detect how many people speak, because
that needs a trained speaker encoder, which only replicas of a Base checkpoint have.
"""

import unicodedata
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from deployments.errors import InvalidRequest
from serve_app.audio.recordings import MAX_SECONDS, Preparation, decode_file
from serve_app.text.characters import letters

Samples = NDArray[np.float32]
Sentence = Annotated[str, Field(max_length=512)]
Severity = Literal["problem", "warning", "note"]

LOUDNESS_LUFS, PEAK_DBFS = -20.0, -1.0  # limits of a prepared recording, whichever is reached first
SILENCE_S = 0.5  # appended, because without it a clone begins with the recording's last words
_LEAD_S, _TAIL_S, _FADE_S = 0.1, 0.2, 0.01  # trimming leaves this much before and after speech, and fades at cuts
_STEP_S = 0.02  # levels are measured over this time
_DIGITAL_SILENCE = -90.0  # dBFS
_LEAST_SPEECH, _STEADY_DB = -60.0, 3.0  # speech is louder than this, and varies by more
_LOUDEST = 100.0  # relative to full scale; floating-point files may hold any number
_BAND_HZ = 500
_CLIPPED_S = 0.003  # at the limit; none of 480 excerpts of clean speech was for more than 0.0006 s
# Seconds per letter, by the first word of its Unicode name: 12 Latin letters per second. Four recordings of English
# had 7 to 17 without their pauses.
_LETTER_S = {"CJK": 0.22, "HANGUL": 0.18, "HIRAGANA": 0.13, "KATAKANA": 0.13}
_OTHER_LETTER_S, _DIGIT_S = 0.08, 0.3
_WRONG_SHARE = 0.4  # of the words; a small recogniser mishears up to 0.3 in some languages


@dataclass(frozen=True, slots=True)
class Flaw:
    """A finding. A problem spoils every clone, a warning is audible in clones, a note is a possible improvement."""

    code: Annotated[str, Field(max_length=40)]
    severity: Severity
    found: Sentence
    advice: Sentence  # how to record better


@dataclass(frozen=True, slots=True)
class HeardWords:
    """The transcript of a recogniser, and the number of words that differ from the given transcript."""

    text: str
    errors: int
    words: int  # of the transcript


@dataclass(frozen=True, slots=True)
class Measures:
    """Measurements of a recording as sent."""

    seconds: float
    sample_rate: int  # Hz
    lead_s: float  # before the first speech
    tail_s: float  # after the last speech
    spoken_s: float  # between these, without pauses
    longest_pause_s: float
    loudness_lufs: float  # integrated, ITU-R BS.1770; -70 for silence
    peak_dbfs: float
    speech_dbfs: float  # mean power of steps with speech
    noise_dbfs: float  # of the quietest steps; not below -90
    clipped_share: float  # of the samples
    bandwidth_hz: int
    cut_off: tuple[str, ...]  # which of "beginning" and "end" are within speech

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
    """A recording ready to be stored, and its flaws, most severe first."""

    audio: Samples  # mono, [samples] in [-1, 1]
    sample_rate: int  # Hz, the file's own
    measures: Measures
    flaws: tuple[Flaw, ...]
    changes: tuple[str, ...]  # the changes by preparation, one sentence each

    def as_json(self) -> dict[str, Any]:
        """All fields except the samples."""
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
    """Judge a file and, with "auto", prepare it; with "none" the samples stay unchanged. Raises InvalidRequest for
    `field` if the file is not a recording of 0.5 to 30 seconds. Takes 0.1 s, too long for an event loop.
    """
    audio, sample_rate = decode_file(data, field)
    if np.abs(audio).max() > _LOUDEST:
        raise InvalidRequest(f"{field} cannot be used: its samples are far above 1, which is full scale.", field)
    measures = measure(audio, sample_rate)
    order = ("problem", "warning", "note")
    flaws = tuple(sorted(_flaws(measures, transcript, heard), key=lambda flaw: order.index(flaw.severity)))
    changes: tuple[str, ...] = ()
    if prepare == "auto" and measures.has_speech:
        audio, changes = _prepared(audio, measures)
    return CheckedRecording(audio, sample_rate, measures=measures, flaws=flaws, changes=changes)


def decode_prepared(data: bytes, field: str) -> tuple[Samples, int]:
    """A file decoded as by `decode_file`, and prepared."""
    checked = check_recording(data, field=field, transcript=None, heard=None, prepare="auto")
    return checked.audio, checked.sample_rate


def measure(audio: Samples, sample_rate: int) -> Measures:
    """Measure mono [samples] in [-1, 1], at least half a second."""
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
    """Convert to dBFS, at least digital silence."""
    return 20 * np.log10(np.maximum(amplitude.astype(np.float64), 10 ** (_DIGITAL_SILENCE / 20)))


def _steady(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Keep only runs of at least three steps, because a click is not speech."""
    three = np.ones(3, int)
    return np.convolve(np.convolve(mask, three, "valid") == 3, three, "full") > 0


def _clipped(audio: Samples, peak: float, sample_rate: int) -> float:
    """Share of samples at the limit: the recording's own peak, or full scale, which lossy formats overshoot."""
    num_clipped = int((np.abs(audio) >= min(0.98 * peak, 0.97)).sum()) if peak else 0
    return num_clipped / audio.size if num_clipped > _CLIPPED_S * sample_rate else 0.0


def _bandwidth(audio: Samples, sample_rate: int) -> int:
    """Bandwidth of the louder half in Hz: above it, at least 1 kHz is 60 dB below the loudest band."""
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
    """Integrated loudness in LUFS, measured by FFmpeg."""
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
    """A copy with silence trimmed at both ends, at the common loudness, with silence appended; and the changes made."""
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
        changes.append(f"Made it {abs(gain_db):.1f} dB {'louder' if gain_db > 0 else 'quieter'}.")
    silence = np.zeros(min(round(SILENCE_S * rate), int(MAX_SECONDS * rate) - audio.size), np.float32)
    shortened = "" if silence.size == round(SILENCE_S * rate) else f", as {MAX_SECONDS:g} s have room for no more"
    changes.append(f"Appended {silence.size / rate:.2f} s of silence{shortened}.")
    return np.concatenate([audio, silence]), tuple(changes)


def _flaws(measures: Measures, transcript: str | None, heard: HeardWords | None) -> Iterator[Flaw]:
    if measures.has_speech:
        yield from _flaws_of_length(measures)
        yield from _flaws_of_sound(measures)
        yield from _flaws_of_words(measures.spoken_s, transcript, heard)
    else:
        finding = "It does not contain speech: it is silent, or a steady sound."
        yield Flaw("no_speech", "problem", finding, "Check the microphone and the file.")


def _flaws_of_length(measures: Measures) -> Iterator[Flaw]:
    finding = f"It holds {measures.speech_s:.1f} s of speech."
    if measures.speech_s < 5:
        yield Flaw("short", "warning" if measures.speech_s < 3 else "note", finding, "Record 5 to 15 s.")
    if measures.speech_s > 15:
        advice = "Keep the best 5 to 15 s in whole sentences: more delays the first audio of every clone."
        yield Flaw("long", "note", finding, advice)
    if measures.longest_pause_s > 1.5:
        finding = f"It has a pause of {measures.longest_pause_s:.1f} s."
        yield Flaw("pause", "warning", finding, "Speak without long pauses: clones copy them.")
    if measures.cut_off:
        finding = f"The file's {' and '.join(measures.cut_off)} lies within speech."
        advice = "Begin and end with whole words, and leave half a second of quiet around them."
        yield Flaw("cut_off", "warning", finding, advice)


def _flaws_of_sound(measures: Measures) -> Iterator[Flaw]:
    if measures.clipped_share:
        severity: Severity = "problem" if measures.clipped_share > 0.01 else "warning"
        finding = f"It is clipped: {measures.clipped_share:.2%} of it is as loud as can be."
        yield Flaw("clipped", severity, finding, "Record with less gain: peaks at -6 dBFS are loud enough.")
    if measures.snr_db < 20:
        severity = "problem" if measures.snr_db < 10 else "warning"
        finding = f"Noise or echo is only {measures.snr_db:.0f} dB below speech."
        advice = "Record without music in a quiet, furnished room, a hand's width from the microphone."
        yield Flaw("noisy", severity, finding, advice)
    if measures.loudness_lufs < -40:
        finding = f"It is very quiet: {measures.loudness_lufs:.0f} LUFS."
        advice = "Speak closer to the microphone: making a recording louder makes its noise louder too."
        yield Flaw("quiet", "warning", finding, advice)
    if measures.bandwidth_hz < 7000:
        code, severity = ("telephone", "warning") if measures.bandwidth_hz <= 4500 else ("dull", "note")
        finding = f"It has no sound above {measures.bandwidth_hz / 1000:g} kHz."
        advice = "Record at 24 kHz or more, and not through a telephone or headset: clones sound as dull."
        yield Flaw(code, severity, finding, advice)


def _flaws_of_words(spoken_s: float, transcript: str | None, recognised: HeardWords | None) -> Iterator[Flaw]:
    if transcript is None:
        finding = "It has no transcript." + (f" A recogniser hears: {recognised.text}" if recognised else "")
        advice = "Write down exactly what is said: clones then take over the manner, not only the voice."
        yield Flaw("no_transcript", "note", finding, advice)
        return
    expected_s = reading_time_s(transcript)
    finding = f"The transcript takes about {expected_s:.1f} s to say, and the recording speaks for {spoken_s:.1f} s."
    advice = "Write down exactly what is said, no more and no less: else clones skip or repeat words."
    if expected_s > 2 * spoken_s + 1:
        yield Flaw("transcript_long", "problem", finding, advice)
    if spoken_s > 2 * expected_s + 1:
        yield Flaw("transcript_short", "problem", finding, advice)
    if recognised is not None and recognised.errors > _WRONG_SHARE * recognised.words:
        finding = f"A recogniser hears other words ({recognised.errors} of {recognised.words}): {recognised.text}"
        yield Flaw("other_words", "warning", finding, advice)


def reading_time_s(text: str) -> float:
    """Estimated time to say a text without pauses, from its letters and digits in any script."""
    return sum(map(_character_s, letters(text)))


def _character_s(character: str) -> float:
    if not character.isalpha():
        return _DIGIT_S if character.isdecimal() else 0.0
    return _LETTER_S.get(unicodedata.name(character, "").replace("-", " ").partition(" ")[0], _OTHER_LETTER_S)
