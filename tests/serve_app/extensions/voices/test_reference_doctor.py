"""Each flaw in a recording that has it, and beside it one near the border that has not.

The speech is the embedded voice's own: four sentences, one by each of its voices, with pauses between them.
"""

import io
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr
from numpy.typing import NDArray

from deployments.errors import InvalidRequest
from serve_app.audio.recordings import decode_file
from serve_app.extensions.voices import reference_doctor

RATE = 24000
SAID = "Hello from Talkray. This is Nora, and I speak on two processor cores. My name is Felix. The next train leaves."
Samples = NDArray[np.float32]


@cache
def demo() -> Samples:
    audio, rate = decode_file((Path(__file__).parents[4] / "docs/demo-voice.mp3").read_bytes(), "demo")
    assert rate == RATE
    return audio


def speech(seconds: float = 8.0) -> Samples:
    """Of the demo from its first word on, at its loudest 0.5, with quiet around it."""
    audio = demo()[: round(seconds * RATE)]
    quiet = np.zeros(round(0.3 * RATE), np.float32)
    return np.concatenate([quiet, faded(audio) * np.float32(0.5 / np.abs(audio).max()), quiet])


def faded(audio: Samples) -> Samples:
    fade = np.minimum(1, np.arange(audio.size, 0, -1) / (0.05 * RATE))
    return audio * fade.astype(np.float32)


def noise(like: Samples, *, snr_db: float) -> Samples:
    """White noise so far below the speech in `like`."""
    amplitude = 10 ** ((reference_doctor.measure(like, RATE).speech_dbfs - snr_db) / 20)
    return (amplitude * np.random.default_rng(0).standard_normal(like.size)).astype(np.float32)


def file_of(audio: Samples, rate: int = RATE, container: str = "FLAC") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, audio, rate, format=container)
    return file.getvalue()


def checked(
    audio: Samples,
    rate: int = RATE,
    text: str | None = SAID,
    *,
    heard: reference_doctor.HeardWords | None = None,
    container: str = "FLAC",
) -> reference_doctor.CheckedRecording:
    data = file_of(audio, rate, container)
    return reference_doctor.check_recording(data, field="clip", transcript=text, heard=heard, prepare="auto")


def found(audio: Samples, rate: int = RATE, text: str | None = SAID, **others: object) -> dict[str, str]:
    """Severities by codes."""
    return {flaw.code: flaw.severity for flaw in checked(audio, rate, text, **others).flaws}  # type: ignore[arg-type]


def at_rate(audio: Samples, rate: int) -> Samples:
    return soxr.resample(soxr.resample(audio, RATE, rate), rate, RATE)


def test_a_good_recording_has_no_flaw() -> None:
    assert checked(speech()).flaws == ()


@pytest.mark.parametrize(
    ("seconds", "flaw"),
    [(2.8, {"short": "warning"}), (4.2, {"short": "note"}), (5.4, {}), (14.5, {}), (15.6, {"long": "note"})],
)
def test_length(seconds: float, flaw: dict[str, str]) -> None:
    result = checked(speech(seconds), text=None)
    assert {each.code: each.severity for each in result.flaws} == {"no_transcript": "note"} | flaw
    assert result.measures.speech_s == pytest.approx(seconds, abs=0.45)  # where a pause begins or ends


@pytest.mark.parametrize(
    ("peak", "reason"),
    [(50, None), (200, "clip: the samples are far above"), (1e38, "cannot be used: the samples exceed")],
)
def test_samples_far_above_full_scale_are_refused(peak: float, reason: str | None) -> None:
    file = io.BytesIO()
    soundfile.write(file, speech() * np.float32(2 * peak), RATE, format="WAV", subtype="FLOAT")
    with nullcontext() if reason is None else pytest.raises(InvalidRequest, match=f"{reason} full scale"):
        result = reference_doctor.check_recording(
            file.getvalue(), field="clip", transcript=None, heard=None, prepare="auto"
        )
        assert np.abs(result.audio).max() < 1


@pytest.mark.parametrize(("gain_db", "severity"), [(0, None), (4, "warning"), (10, "problem")])
@pytest.mark.parametrize("container", ["FLAC", "MP3", "OGG"])
def test_clipping(gain_db: float, severity: str | None, container: str) -> None:
    loud = np.clip(speech() * np.float32(2 * 10 ** (gain_db / 20)), -1, 1)
    assert found(loud, container=container).get("clipped") == severity


def test_what_was_clipped_before_it_was_made_quieter() -> None:
    assert found(np.clip(speech(), -0.15, 0.15) * np.float32(0.3))["clipped"] == "problem"


@pytest.mark.parametrize(
    ("snr_db", "severity"), [(7, "problem"), (12, "warning"), (18, "warning"), (23, None), (40, None)]
)
def test_noise(snr_db: float, severity: str | None) -> None:
    audio = speech()
    result = checked(audio + noise(audio, snr_db=snr_db))
    assert result.measures.snr_db == pytest.approx(snr_db, abs=2)
    assert {flaw.code: flaw.severity for flaw in result.flaws}.get("noisy") == severity


def test_silence_of_a_gate_hides_no_noise() -> None:
    audio = speech()
    noisy = np.where(np.abs(audio) > 0, audio + noise(audio, snr_db=15), 0).astype(np.float32)
    assert found(noisy)["noisy"] == "warning"


@pytest.mark.parametrize(("pause_s", "flaw"), [(1.3, {}), (1.8, {"pause": "warning"})])
def test_a_long_pause(pause_s: float, flaw: dict[str, str]) -> None:
    first, second = faded(demo()[: 3 * RATE]), demo()[8 * RATE : 11 * RATE]
    places = np.flatnonzero(np.abs(first) > 0.01)
    quiet = np.zeros(round(pause_s * RATE), np.float32)
    start = np.flatnonzero(np.abs(second) > 0.01)[0]
    joined = np.concatenate([first[: places[-1]], quiet, faded(second[start:])])
    assert {code: each for code, each in found(joined).items() if code == "pause"} == flaw


def test_edges_within_speech() -> None:
    loud = np.flatnonzero(np.abs(demo()) > 0.2)
    begin, end = loud[0], loud[loud < 8 * RATE][-1]
    [flaw] = [each for each in checked(demo()[begin:end]).flaws if each.code == "cut_off"]
    assert "beginning and end" in flaw.found
    padded = np.pad(faded(demo()[begin:end]), round(0.1 * RATE))
    assert "cut_off" not in found(padded)


@pytest.mark.parametrize(("gain_db", "flaw"), [(-15, {}), (-26, {"quiet": "warning"})])
def test_loudness(gain_db: float, flaw: dict[str, str]) -> None:
    assert found(speech() * np.float32(10 ** (gain_db / 20))) == flaw


def test_loudness_is_that_of_bs_1770() -> None:
    """A full-scale sine of 997 Hz on one channel has -3.01 LUFS."""
    tone = np.sin(2 * np.pi * 997 * np.arange(3 * 48000) / 48000).astype(np.float32)
    assert reference_doctor.measure(tone, 48000).loudness_lufs == pytest.approx(-3.01, abs=0.05)


@pytest.mark.parametrize(
    ("rate", "flaw"), [(8000, {"telephone": "warning"}), (11025, {"dull": "note"}), (16000, {}), (22050, {})]
)
def test_bandwidth_whatever_the_files_rate(rate: int, flaw: dict[str, str]) -> None:
    assert found(at_rate(speech(), rate)) == flaw
    assert found(soxr.resample(speech(), RATE, rate), rate) == flaw


@pytest.mark.parametrize("rate", [4000, 192_000])
def test_the_lowest_and_the_highest_rate(rate: int) -> None:
    result = checked(soxr.resample(speech(), RATE, rate), rate)
    assert result.measures.loudness_lufs == pytest.approx(reference_doctor.measure(speech(), RATE).loudness_lufs, abs=2)
    assert {flaw.code for flaw in result.flaws} == ({"telephone"} if rate == 4000 else set())


def test_no_speech_is_the_only_flaw_and_nothing_is_prepared() -> None:
    hum = (0.1 * np.sin(2 * np.pi * 100 * np.arange(3 * RATE) / RATE)).astype(np.float32)
    for audio in (np.zeros(3 * RATE, np.float32), hum, noise(demo(), snr_db=0), speech() * np.float32(1e-3)):
        result = checked(audio, text=None)
        assert [(flaw.code, flaw.severity) for flaw in result.flaws] == [("no_speech", "problem")]
        assert result.measures.clipped_share == 0 or audio is hum
        assert result.changes == ()


@pytest.mark.parametrize(
    ("text", "flaw"),
    [
        (SAID, {}),
        (None, {"no_transcript": "note"}),
        ("Hello.", {"transcript_short": "problem"}),
        (SAID * 3, {"transcript_long": "problem"}),
        ("你好，我是诺拉，我在两个处理器核心上说话，下一班火车开了。", {}),
        ("你好。", {"transcript_short": "problem"}),
        ("你好，我是诺拉，我在两个处理器核心上说话。" * 5, {"transcript_long": "problem"}),
        ("こんにちは、ノラです。ふたつのコアではなします。つぎのでんしゃがでます。", {}),
        ("안녕하세요 저는 노라입니다 두 개의 코어에서 말합니다", {}),
        ("Здравствуйте, меня зовут Нора, и я говорю на двух ядрах процессора.", {}),
        ("1984 1985 1986 1987 1988", {}),
    ],
)
def test_a_transcript_and_the_time_it_takes(text: str | None, flaw: dict[str, str]) -> None:
    assert found(speech(), text=text) == flaw


def test_marks_and_spaces_take_no_time() -> None:
    assert reference_doctor.reading_time_s(" ...?! — \n") == 0
    assert reference_doctor.reading_time_s("ﾃｽﾄ") == reference_doctor.reading_time_s("テスト") == pytest.approx(0.39)


@pytest.mark.parametrize(
    ("errors", "words", "flaw"), [(8, 20, {}), (9, 20, {"other_words": "warning"}), (3, 0, {"other_words": "warning"})]
)
def test_words_that_a_recogniser_hears(errors: int, words: int, flaw: dict[str, str]) -> None:
    assert found(speech(), heard=reference_doctor.HeardWords("Hello from here", errors, words)) == flaw


def test_what_is_heard_stands_in_for_no_transcript() -> None:
    [flaw] = checked(speech(), text=None, heard=reference_doctor.HeardWords("Hello from here", 0, 0)).flaws
    assert flaw.found.endswith("A recogniser hears: Hello from here")


def test_the_gravest_flaw_comes_first() -> None:
    audio = np.clip(speech(2.5) * np.float32(8), -1, 1)
    severities = [flaw.severity for flaw in checked(audio, text=None).flaws]
    assert severities == ["problem", "warning", "note"]


def test_preparation_trims_levels_and_appends_silence() -> None:
    quiet = np.zeros(2 * RATE, np.float32)
    audio = np.concatenate([quiet, speech() * np.float32(0.1), quiet])
    result = checked(audio)
    assert result.measures.lead_s == pytest.approx(2.3, abs=0.1)
    after = reference_doctor.measure(result.audio, RATE)
    assert after.lead_s == pytest.approx(0.1, abs=0.03)
    assert not result.audio[-RATE // 2 :].any()
    assert after.tail_s == pytest.approx(0.7, abs=0.03)
    assert after.loudness_lufs == pytest.approx(reference_doctor.LOUDNESS_LUFS, abs=0.3)
    assert after.peak_dbfs <= reference_doctor.PEAK_DBFS + 0.01
    assert after.speech_s == pytest.approx(result.measures.speech_s, abs=0.03)
    assert [change.split()[0] for change in result.changes] == ["Cut", "Cut", "Made", "Appended"]
    assert result.changes[2].endswith(" dB louder.")
    assert checked(speech() * np.float32(1.9)).changes[-2].endswith(" dB quieter.")


def test_a_peak_keeps_it_quieter() -> None:
    audio = speech() * np.float32(0.1)
    audio[3 * RATE] = 0.9  # a click in a soft voice
    result = checked(audio)
    assert np.abs(result.audio).max() == pytest.approx(10 ** (reference_doctor.PEAK_DBFS / 20), abs=1e-4)
    assert reference_doctor.measure(result.audio, RATE).loudness_lufs < reference_doctor.LOUDNESS_LUFS - 5


def test_a_prepared_recording_of_the_greatest_length_can_still_be_read() -> None:
    audio = np.resize(np.concatenate([demo()[: 8 * RATE], np.zeros(RATE // 4, np.float32)]), 30 * RATE)
    result = checked(audio)
    assert "up to the limit of 30 s" in result.changes[-1]
    again, _ = decode_file(file_of(result.audio), "clip")
    assert again.size == result.audio.size <= 30 * RATE
