"""SubRip and WebVTT: what is spoken of a file, and where cues are placed for dubbing."""

from pathlib import Path

import numpy as np
import pytest
import soundfile

from deployments.errors import InvalidRequest
from talkray_tools.book.assembly import Sound, timeline
from talkray_tools.book.subtitles import dub, is_timed, subtitle_book
from talkray_tools.book.text import Cue, Paragraph

ONE, TWO = "00:00:01,000 --> 00:00:02,000", "00:00:03,500 --> 00:00:05,000"
RATE = 24000


@pytest.mark.parametrize(("text", "spoken"), [
    (f"1\n{ONE}\nHello there.\n\n2\n{TWO}\nBye.\n", ["Hello there.", "Bye."]),
    (
        f"1\n{ONE}\nI went to\nthe store\n\n2\n{TWO}\nwith Dr.\n\n3\n00:06,5 --> 0:07\nHo.",
        ["I went to the store with Dr. Ho."],
    ),
    (
        f"1\n{ONE}\n<i>Hi</i> {{\\an8}}<font color=red>you</font>\n\n2\n{TWO} X1:40 Y1:20\n5 < 6 &amp; 7",
        ["Hi you 5 < 6 & 7"],
    ),
    (f"1\n{ONE}\n\n2\n{TWO}\n \n\n3\n00:00:06,000 --> 00:00:07,000\nHeard.", ["Heard."]),
    (f"1\n{ONE}\n- Who?\n– Me!\n-5 degrees\n\n2\n{TWO}\na --> b", ["Who? Me! -5 degrees a --> b"]),
    (f"1\n{ONE}\n5 -> 6\n\n2\n{TWO}\n10 → 20.", ["5 -> 6 10 → 20."]),
    (f"1\n{ONE}\nOne.\n2\n{TWO}\nTwo.", ["One.", "Two."]),
    (f"1\n\n{ONE}\n\nOne.\n\n2\n\n{TWO}\n\nTwo.", ["One.", "Two."]),
    (f"{ONE}\n10!\n\n{TWO}\n9!", ["10!", "9!"]),
    (f"1\n{ONE}\nOne.\n\nbelow a blank line.\n\n2\n{TWO}\nTwo.", ["One. below a blank line.", "Two."]),
    (f"1\n{ONE}\n很长\n\n2\n{TWO}\n的句子。", ["很长的句子。"]),
    (f"1\n{ONE}\nstart\n\n2\n00:00:09,000 --> 00:00:10,000\nlater", ["start", "later"]),
    (
        "WEBVTT\n\n00:01.000 --> 00:02.000 align:start position:0%\n<v Ann Lee>We <c.x>are</c> <00:01.500>in",
        ["We are in"],
    ),
    (
        "WEBVTT - it\nKind: x\n\nintro\n01:02:03.500 --> 01:02:04.000\nHi.\n\n1\n01:02:05.000 --> 01:02:06.000\n7",
        ["Hi.", "7"],
    ),
    ("WEBVTT\n\nNOTE no\nno\n\nSTYLE\n::cue {}\n\nREGION\nid:x\n\n00:01.000 --> 00:02.000\nNOTE this", ["NOTE this"]),
    ("WEBVTT\n00:01.000 --> 00:02.000\nNo blank line.", ["No blank line."]),
    ("WEBVTT\n\n00:01.000 --> 00:02.000\n<ruby>漢<rt>kan</rt></ruby>\n\nstray\n", ["漢"]),
])  # fmt: skip
def test_cues_without_their_marks(text: str, spoken: list[str]) -> None:
    assert is_timed(text)
    assert [each.text for _, each in subtitle_book(text, "f", timed=False).spoken()] == spoken


def test_what_is_left_out_is_counted() -> None:
    text = "WEBVTT\n\nNOTE x\n\nSTYLE\ny\n\n00:01.000 --> 00:02.000\n\n00:03.000 --> 00:04.000\nHi.\n\nstray\n"
    left_out = {"NOTE blocks": 1, "STYLE blocks": 1, "cues without text": 1, "lines outside cues": 1}
    assert subtitle_book(text, "f", timed=True).left_out == left_out


@pytest.mark.parametrize("text", ["1\nIt was 10:00 --> late.", "Chapter 1\n\n00:01 is a time.", "WEBVTTX"])
def test_other_text_is_not_taken_for_subtitles(text: str) -> None:
    assert not is_timed(text)


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("times", [
    "00:00:01,000 -> 00:00:02,000", "00:00:75,000 --> 00:01:20,000", "00:61:00,000 --> 01:02:00,000",
    "00:00:01,000 -->", "--> 00:00:02,000", "-00:00:01,000 --> 00:00:02,000", "00:00:01,0000 --> 00:00:02,000",
    "1 --> 2",
])  # fmt: skip
def test_times_that_are_none_name_the_cue(times: str, timed: bool) -> None:
    message = r"^cue 2 \(line 6\): '.*' is not a valid time range. Write 00:01:02,500 -->"
    with pytest.raises(InvalidRequest, match=message):
        subtitle_book(f"1\n00:00:00,000 --> 00:00:01,000\nA.\n\n2\n{times}\nB.\n", "f", timed=timed)


@pytest.mark.parametrize(("times", "message"), [
    ("00:00:02,000 --> 00:00:01,500", r"cue 2 \(line 6\) ends at 00:00:01.500, begins at 00:00:02.000"),
    ("00:00:02,000 --> 00:00:02,000", r"cue 2 \(line 6\) ends at 00:00:02.000, begins at 00:00:02.000"),
    ("00:00:00,999 --> 00:00:02,000", r"cue 2 .* before cue 1 \(line 2\) ends at 00:00:01.000"),
    ("00:00:00,000 --> 00:00:00,100", r"cue 2 .* begins at 00:00:00.000, before cue 1 \(line 2\) ends"),
])  # fmt: skip
def test_times_that_cannot_be_kept_name_the_cue(times: str, message: str) -> None:
    text = f"1\n00:00:00,000 --> 00:00:01,000\nA.\n\n2\n{times}\nB.\n"
    with pytest.raises(InvalidRequest, match=message):
        subtitle_book(text, "f", timed=True)
    assert subtitle_book(text, "f", timed=False).chapters


@pytest.mark.parametrize(("cues", "starts_s", "speeds", "unfit"), [
    ([(1, 2, 0.5), (5, 6, 1.0)], [1, 5], [1, 1], []), ([(1, 2, 1.2), (2, 3, 0.5)], [1, 2], [1.2 / 0.98, 1], []),
    ([(1, 2, 1.56), (4, 5, 0.5)], [1, 4], [1.3, 1], [("cue 0", 0.2, 0)]),
    ([(1, 2, 1.56), (2, 3, 0.5)], [1, 2.2], [1.3, 1], [("cue 0", 0.2, 0), ("cue 1", 0, 0.2)]),
    ([(1, 2, 1.56), (2, 3, 1.0)], [1, 2.2], [1.3, 1 / 0.78], [("cue 0", 0.2, 0), ("cue 1", 0, 0.2)]),
    ([(0, 0.1, 2.6), (0.1, 1, 0.5)], [0, 2], [1.3, 1.3], [("cue 0", 1.9, 0), ("cue 1", 1.385, 1.9)]),
])  # fmt: skip
def test_dubbing(
    tmp_path: Path, cues: list[tuple[float, float, float]], starts_s: list[float], speeds: list[float],
    unfit: list[tuple[str, float, float]],
) -> None:  # fmt: skip
    """Cues from and to, with the length of their speech: where each begins, how fast it is, and what is reported."""
    parts, sounds = [], []
    for number, (start_s, end_s, length_s) in enumerate(cues):
        soundfile.write(tmp_path / f"{number}.flac", np.full(round(length_s * RATE), 0.1), RATE)
        parts.append(Paragraph("x", cue=Cue(f"cue {number}", "x", start_s, end_s)))
        sounds.append(Sound(tmp_path / f"{number}.flac", "alloy", pause_s=9.0, chapter=0))
    placed, told = dub(parts, sounds)
    times = timeline(placed)
    assert [times.start_s(number) for number in range(len(cues))] == pytest.approx(starts_s, abs=0.03)
    assert [sound.speed for sound in placed] == pytest.approx(speeds, abs=0.04)
    assert [each["cue"] for each in told] == [name for name, _, _ in unfit]
    for each, (_, over_s, late_s) in zip(told, unfit, strict=True):
        assert (each["over_s"], each["late_s"]) == (pytest.approx(over_s, abs=0.05), pytest.approx(late_s, abs=0.05))
    for sound, (_, _, length_s) in zip(placed, cues, strict=True):
        assert soundfile.info(sound.audio).duration == pytest.approx(length_s / sound.speed, abs=0.02)
