"""How the embedded voice reads thousands of texts, whole and while they are being written."""

import random
from pathlib import Path

import pytest

from deployments.embedded_voice.english import spoken_english, unspoken
from deployments.embedded_voice.live_english import LiveEnglish
from deployments.embedded_voice.numbers import cardinal, ordinal, year
from tests.records import Record

DATA = Path(__file__).parents[2] / "data" / "english"
ROWS = (line.split("\t") for line in (DATA / "vocabulary.tsv").read_text("utf-8").split("\n") if line)
WORDS = {kind: words for kind, *words in ROWS}
# Each {kind} is a word of its row in vocabulary.tsv; # a number, and @ a number of two digits.
PATTERNS = {
    "abbreviation": ["{0} Smith went.", "Ask {0} The end.", "We say {0} so", "at 5 {0}, ok"],
    "before_number": ["see {0} #, then", "the {0} is", "({0} @-@)"], "capitals": ["Use {0} now.", "the {0}s", "GO {0} NOW"],
    "interjection": ["Well, {0}, yes"], "symbol": ["a {0} b", "#{0}#", "{0}@"], "counted": ["{0} {roman} begins", "{0} #"],
    "roman": ["World War {0}", "the {0} century", "Henry {0} was", "Section {0}, {0}"], "period": ["$#/{0} each", "two/{0}"],
    "unit": ["# {0}", "1 {0}", "a #-{0} rod", "#{0}², #{0}/h", "1.5 {0}. then", "3 {0} or 1/2 {0}"],
    "currency": ["{0}#", "{0} 1", "{0}1.01", "a {0}# bill", "{0}0.@", "# {0}", "{0}#.5{scale}", "{0}@-@", "{0}.00"],
    "scale": ["# {0}", "$#{0}", "#{0} people"], "char": ["a{0}b", "1{0}2", "so {0} then {0}"], "zone": ["5 p.m. {0}", "@:@ {0}"],
    "month": ["{0} @, 20@", "@ {0} 19@", "{0} 1st-3rd", "the @th of {0}", "{0} 20@", "@-{0}-@"],
    "weekday": ["{0}-Fri", "{0}, May 5", "on {0}"], "short": ["{0} it", "5 {0} Main", "{0}12", "3 {0}ft"],
    "sentence": ["{0}"],
    "": [
        "@:@", "@:@ pm", "@:@:@", "@/@/20@", "@.@.20@", "20@-@-@", "@/@/@", "#%", "#-#", "# x #", "#th", "#s", "'@s", "@0s",
        "+@ @@ @@@", "@@-@@@", "(0@) @@@@", "1-800-@5-@@", "10.0.@.1:80@", "#.#.#", "-#°C", "#e-@", "@@@,@@", "@'@\"", "0#",
        "A@", "AB-#", "x^@", "n^2 - 1 = #", "@ 1/4 mi", "#/#", "1,00,000", "@,@@@,@@@", "the 1@0s", "in 10@", "#k", "~#",
        "call 911", "No. #", "v@.@", "www.x@.com/a-b?c=#", "me@x.io", "https://a.b.co:@@/c_d.html", "file:///x/y.z",
    ],
}  # fmt: skip


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
    numbers = ["unit", "currency", "scale", "month", "period", "", "zone", "roman"]
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
            assert "".join(each.written for each in parts) == text
            others = f" (live: {live})" * (live != whole) + f" ({unspoken(text)} unspoken)" * (unspoken(text) > 0)
            record(f"{text} -> {whole}{begun}{others}")
    record.check(f"english-{part}")
