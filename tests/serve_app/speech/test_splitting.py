import random

import pytest

from serve_app.speech.splitting import split_text


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
