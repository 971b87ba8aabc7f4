"""Captions: short ones where the times of words are known, else a sentence each; none crosses a segment's border."""

import re

import pytest

from talkray_tools.book.captions import MAX_CHARS, Caption, captions_of, srt, vtt

TEXT = (
    "The storm came in from the sea just after midnight, and nobody in the village heard it. "
    "Was it late? It went on and on, because the wind liked the place, and it would not stop until the roofs were gone."
)


def told(text: str, *, estimated: bool = False, step_s: float = 0.3) -> dict[str, object]:
    words = [
        {"word": word, "start": number * step_s, "end": number * step_s + 0.25}
        for number, word in enumerate(text.split())
    ]
    return {"words": words, "estimated": estimated, "segments": []}


def test_known_times_make_short_captions_of_about_the_same_length() -> None:
    captions = captions_of(told(TEXT), 10.0)
    assert " ".join(each.text for each in captions) == TEXT
    assert [len(each.text) for each in captions] == [41, 45, 12, 52, 48]
    assert all(len(each.text) <= MAX_CHARS for each in captions)
    assert (captions[0].start_s, captions[2].start_s) == (10.0, pytest.approx(10 + 17 * 0.3))


def test_estimated_times_make_a_sentence_each() -> None:
    captions = captions_of(told(TEXT, estimated=True), 0.0)
    assert [each.text for each in captions] == re.split(r"(?<=[.?]) ", TEXT)


@pytest.mark.parametrize("sentences", [
    ["It was 5:30 p.m. on March 3rd.", "Dr. Smith paid $12."],
    ["Mr. J. R. Brown met Mrs. Jones, e.g. today...", "“Go!” he said.", "Then No. 5 left."],
    ["Version 2.6.10 is out.", "Is it?", "Yes!"],
])  # fmt: skip
def test_captions_end_where_sentences_do(sentences: list[str]) -> None:
    said = told(" ".join(sentences), estimated=True)
    assert [each.text for each in captions_of(said, 0.0)] == sentences


def test_of_faster_audio_the_times_are_shorter() -> None:
    [caption] = captions_of(told("One two", step_s=0.5), 10.0, 1.25)
    assert (caption.start_s, caption.end_s) == (10.0, pytest.approx(10.6))


def test_a_border_of_segments_ends_a_caption() -> None:
    said = told("One two three four", estimated=True)
    said["segments"] = [{"text": "One two", "start": 0.0, "end": 0.6}, {"text": "three four", "start": 0.6, "end": 1.2}]
    assert [each.text for each in captions_of(said, 0.0)] == ["One two", "three four"]
    assert [(each.text, each.start_s) for each in captions_of({**said, "words": []}, 1.0)] == [
        ("One two", 1.0),
        ("three four", 1.6),
    ]


def test_scripts_without_spaces() -> None:
    assert [each.text for each in captions_of(told("很长 的 句子。 Hello 世 界"), 0.0)] == [
        "很长的句子。",
        "Hello 世界",
    ]


def test_files() -> None:
    captions = [Caption("Fish & <chips>", 3661.5, 3662.0), Caption("More", 3661.9, 3661.95)]
    assert srt(captions) == (
        "1\n01:01:01,500 --> 01:01:02,000\nFish & <chips>\n\n2\n01:01:02,000 --> 01:01:02,050\nMore\n"
    )
    assert vtt(captions).startswith("WEBVTT\n\n01:01:01.500 --> 01:01:02.000\nFish &amp; &lt;chips&gt;\n\n")
    assert srt([Caption(TEXT[:69], 0, 1)]).split("\n")[2:4] == [
        "The storm came in from the sea just",
        "after midnight, and nobody in the",
    ]
