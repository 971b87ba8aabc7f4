"""How the embedded voice reads thousands of texts, whole and while they are being written."""

import random
from pathlib import Path

import pytest

from deployments.embedded_voice.english import spoken_english, unspoken
from deployments.embedded_voice.live_english import LiveEnglish
from deployments.embedded_voice.numbers import cardinal, ordinal, year
from tests.records import Record

DATA = Path(__file__).parents[2] / "data" / "english"


def rows(name: str) -> dict[str, list[str]]:
    lines = (DATA / f"{name}.tsv").read_text("utf-8").split("\n")
    return {kind: words for kind, *words in (line.split("\t") for line in lines if line)}


WORDS = rows("vocabulary")
# {0} is a word of that row in vocabulary.tsv; # a number, and @ a number of two digits.
PATTERNS = rows("patterns")


def drawn(draw: random.Random, pattern: str) -> str:
    for kind in ("roman", "scale"):
        pattern = pattern.replace(f"{{{kind}}}", draw.choice(WORDS[kind]))
    figures = {
        "#": lambda: str(draw.choice([1, 2, 11, 40, 100, 405, 1500, 1066, 2000, 12345, 1000000])),
        "@": lambda: f"{draw.randint(1, 59):02}",
    }
    return "".join(figures.get(char, lambda char=char: char)() for char in pattern)  # type: ignore[misc]


def texts(kind: str, draw: random.Random) -> list[str]:
    if kind == "cases":
        lines = [
            line for name in ("cases", "neighbours") for line in (DATA / f"{name}.tsv").read_text("utf-8").split("\n")
        ]
        return [line.split("\t")[0].replace("\\n", "\n") for line in lines if line and line[:2] != "# "]
    words = WORDS.get(kind, [""])
    every = [pattern.replace("{0}", word) for word in words for pattern in PATTERNS[kind]]
    return [drawn(draw, text) for text in (draw.sample(every, 330) if len(every) > 330 else every)]


@pytest.mark.parametrize("part", ["words", "numbers", "cases"])
def test_english_as_it_is_spoken(part: str) -> None:
    record, draw = Record(), random.Random(3)
    numbers = ["unit", "currency", "scale", "month", "period", "figures", "zone", "roman"]
    kinds = {
        "cases": ["cases", "sentence"],
        "numbers": numbers,
        "words": [each for each in PATTERNS if each not in numbers],
    }[part]
    for number in (0, 1, 13, 21, 100, 405, 1066, 1100, 1905, 1999, 2000, 2007, 2099, 2100, 30017, 10**15 - 1)[
        : 99 * (part == "numbers")
    ]:
        record(f"{number}: {cardinal(number)} | {ordinal(number)} | {year(number)}")
    for kind in kinds:
        record(f"-- {kind}")
        for text in texts(kind, draw):
            front, whole, cut = LiveEnglish(), spoken_english(text), draw.randint(0, len(text))
            parts = front.feed(text[:cut], is_last=False)
            begun = f" [{cut}{'!' * front.will_speak}: {''.join(each.spoken for each in parts)}]" if parts else ""
            parts += front.feed(text[cut:], is_last=True)
            live = "".join(each.spoken for each in parts)
            again = front.feed("", is_last=True)
            assert "".join(each.written for each in (*parts, *again)) == text
            others = f" (live: {live})" * (live != whole) + f" ({unspoken(text)} unspoken)" * (unspoken(text) > 0)
            record(f"{text} -> {whole}{begun}{others}")
    record.check(f"english-{part}")
