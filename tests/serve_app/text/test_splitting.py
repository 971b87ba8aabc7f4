import random
from itertools import pairwise
from pathlib import Path

import pytest

from serve_app.extensions.live.live_split import LiveSplit
from serve_app.text.splitting import sentence_ends, split_text


@pytest.mark.parametrize(
    ("text", "max_chars", "parts"),
    [
        ("Hello there.", 1000, ["Hello there."]),
        ("", 10, []),
        ("One two three. Four five six. Seven eight.", 30, ["One two three. Four five six.", "Seven eight."]),
        ("One two three.\n\nFour five. Six.", 26, ["One two three.", "Four five. Six."]),
        ("We met Dr. Smith, who left early today.", 30, ["We met Dr. Smith,", "who left early today."]),
        ('He said: "Stop it now." Then he left us.', 30, ['He said: "Stop it now."', "Then he left us."]),
        ("one two three four five", 11, ["one two", "three four", "five"]),
        ("abcdefghij", 4, ["abcd", "efgh", "ij"]),
        ("今日は晴れです。明日は雨です。", 24, ["今日は晴れです。", "明日は雨です。"]),
        ("春は花、夏は海、秋は月", 15, ["春は花、", "夏は海、", "秋は月"]),
        ("pi is 3.14159 and e is 2.71828", 14, ["pi is 3.14159", "and e is", "2.71828"]),
        ("aaae\u0301\u0301b", 5, ["aaa", "e\u0301\u0301b"]),
        ("e" + 5 * "\u0301", 3, ["e\u0301\u0301", 3 * "\u0301"]),  # no good end
        ("日本", 1, ["日", "本"]),
    ],
)
def test_split(text: str, max_chars: int, parts: list[str]) -> None:
    assert split_text(text, max_chars) == parts


def test_nothing_is_lost_and_no_part_is_too_long() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        text = "".join(draw.choices("abcdefgh   .,!?;:-—。、日本\n\"'é\u0301\u200d🎉", k=draw.randint(0, 200)))
        max_chars = draw.randint(1, 60)
        parts = split_text(text, max_chars)
        assert "".join("".join(parts).split()) == "".join(text.split())
        assert all(part and part == part.strip() and len(part) <= max_chars for part in parts)


def test_parts_are_few() -> None:
    text = "This is a sentence of some length, which goes on. " * 200
    assert len(split_text(text, 300)) <= 2 * len(text) / 300


@pytest.mark.parametrize("piece", ["a", " ", "日", "\n", ".", "a.", "\u0301", "a "])
@pytest.mark.parametrize("max_chars", [1, 300])
def test_a_long_text_without_good_places(piece: str, max_chars: int) -> None:
    """Searching all of the rest for each part would run for minutes here."""
    parts = split_text(piece * 50_000, max_chars)
    assert "".join("".join(parts).split()) == "".join((piece * 50_000).split())


SENTENCES = Path(__file__).parents[2] / "data" / "sentences"
LANGUAGES = ("zh", "en", "ja", "ko", "de", "fr", "ru", "pt", "es", "it")


def traps(code: str) -> list[tuple[list[str], bool]]:
    """Lines in sentences, and whether a miss is known."""
    rows = [line.split("\t") for line in (SENTENCES / f"{code}.txt").read_text("utf-8").splitlines()]
    return [(row[0].split("¦"), row[1:] == ["miss"]) for row in rows]


@pytest.mark.parametrize(
    ("sentences", "is_missed"), [trap for code in LANGUAGES for trap in traps(code)], ids=lambda value: str(value)[:40]
)
def test_traps_of_sentence_ends_in_ten_languages(sentences: list[str], is_missed: bool) -> None:
    text = "".join(sentences)
    ends = [0, *(end for end in sentence_ends(text, 0, len(text)) if end < len(text.rstrip())), len(text)]
    found = [text[start:end] for start, end in pairwise(ends)]
    assert (found == sentences) is not is_missed


@pytest.mark.parametrize("code", LANGUAGES)
@pytest.mark.parametrize("max_chars", [50, 90, 200])
def test_a_text_is_cut_at_the_same_places_however_it_comes(code: str, max_chars: int) -> None:
    text = " ".join("".join(sentences) for sentences, _ in traps(code))

    def segments(sizes: list[int]) -> list[str]:
        split, found, at = LiveSplit(max_chars), [""], 0
        for size in sizes:
            first, *more = split.feed(text[at : at + size])
            found[-1] += first
            found += more
            at += size
        found[-1] += "".join(split.finish())
        return found

    whole = segments([len(text)])
    assert "".join("".join(whole).split()) == "".join(text.split())
    draw = random.Random(7)
    for sizes in ([1] * len(text), [draw.randint(1, 12) for _ in text], [draw.randint(1, 120) for _ in text]):
        assert segments(sizes) == whole


@pytest.mark.parametrize("code", LANGUAGES)
def test_live_segments_end_with_sentences_where_these_are_short(code: str) -> None:
    lines = [sentences for sentences, is_missed in traps(code) if not is_missed]
    text = " ".join("".join(sentences) for sentences in lines)
    first, *more = LiveSplit(240).feed(text)
    ends = {end for line in lines for sentence in line for end in [sentence.strip()]}
    assert more
    assert all(any(segment.rstrip().endswith(end) for end in ends) for segment in [first, *more][:-1])
