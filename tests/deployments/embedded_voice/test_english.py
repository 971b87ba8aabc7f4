import random
import re

import pytest

from deployments.embedded_voice.english import spoken_english
from deployments.embedded_voice.numbers import cardinal, ordinal, year

SPOKEN = re.compile(r"(?:[A-Za-z](?:[A-Za-z]|['-](?=[A-Za-z])|[.,?!;:](?= |$)| (?=[A-Za-z]))*[.?!])?")
# What means something on its own or next to something else, to be thrown together at random.
GROUPS = (
    "Dr Mr St Ave No etc e.g p.m am NASA HTTP pdf NATO OPEC OK II 1,000 2026 11/21/2026 2026-11-21 3:45 km ms GB th st "
    "1st http:// www. x.com a@b.co May Nov ``` k bn THE CPUs Paul CAPITALS -> App vol VOL Prof 's I"
)
PIECES = [
    *"abcXYZ019 .,:;!?'\"-–—()[]<>/\\@#$€£%&+=*_~|^°μ`\n\t½²日🎉é١Ⅳ…",
    *GROUPS.split(),
    *(" ", "  ", ". ", "- ", "# ", "\u0301", "\u200b", "\ud800"),
]


@pytest.mark.parametrize(("number", "words"), [
    (0, "zero"), (13, "thirteen"), (21, "twenty-one"), (100, "one hundred"), (105, "one hundred five"),
    (1_000_000, "one million"), (2_030_000_000_017, "two trillion thirty billion seventeen"),
])  # fmt: skip
def test_cardinals(number: int, words: str) -> None:
    assert cardinal(number) == words


def test_cardinals_differ() -> None:
    assert len({cardinal(number) for number in range(20_000)}) == 20_000


def test_ordinals_and_years() -> None:
    assert [ordinal(number) for number in (1, 2, 3, 8, 12, 20, 21, 100)] == (
        ["first", "second", "third", "eighth", "twelfth", "twentieth", "twenty-first", "one hundredth"]
    )
    assert [year(number) for number in (1066, 1905, 1999, 1900, 2000, 2005, 2026)] == [
        "one thousand sixty-six", "nineteen oh five", "nineteen ninety-nine", "nineteen hundred",
        "two thousand", "two thousand five", "twenty twenty-six",
    ]  # fmt: skip


@pytest.mark.parametrize(("text", "spoken"), [
    ("12 and 1,234 and 1000000", "twelve and one thousand two hundred thirty-four and one million."),
    ("3.14, .5, -5, 1.2.3", "three point one four, zero point five, minus five, one point two point three."),
    ("007 and 12345678", "zero zero seven and one two three four five six seven eight."),
    ("1st, 22nd, 103rd", "first, twenty-second, one hundred third."),
    ("In 1999, 2005 and 2026", "In nineteen ninety-nine, two thousand five and twenty twenty-six."),
    ("the 1990s and '80s", "the nineteen nineties and eighties."),
    ("$5.20, £3, €1m, $1", "five dollars and twenty cents, three pounds, one million euros, one dollar."),
    ("$0.99, ¥500, 5€", "ninety-nine cents, five hundred yen, five euros."),
    ("$1.5 billion", "one point five billion dollars."), ("$.00", "zero dollars."),
    ("50%, 0.5 %", "fifty percent, zero point five percent."), ("at 3:45 pm", "at three forty-five P M."),
    ("at 3 p.m. We go", "at three P M. We go."),
    ("3:00, 3:05, 15:00, 16:9", "three o'clock, three oh five, fifteen hundred, sixteen to nine."),
    ("on 2026-11-21", "on November twenty-first, twenty twenty-six."),
    ("11/21/2026", "November twenty-first, twenty twenty-six."),
    ("21/11/2026", "November twenty-first, twenty twenty-six."),
    ("Nov. 21, 2026", "November twenty-first, twenty twenty-six."),
    ("21 Nov 2026", "twenty-first of November twenty twenty-six."),
    ("(555) 123-4567", "five five five, one two three, four five six seven."),
    ("555-1234", "five five five, one two three four."),
    ("+49 170 1234567", "plus four nine, one seven zero, one two three four five six seven."),
    ("10/12, 10/13, 10/31, 10/32", "ten twelfths, October thirteenth, October thirty-first, ten thirty-seconds."),
    ("1/2, 3/4, 2 1/2, 22/7", "one half, three quarters, two and one half, twenty-two over seven."),
    ("2½", "two and one half."), ("3-5 and 10 – 20", "three to five and ten to twenty."),
    ("1 km, 3-5 km, 60 mph", "one kilometer, three to five kilometers, sixty miles per hour."),
    ("-5°C, 16GB, 250 ms", "minus five degrees Celsius, sixteen gigabytes, two hundred fifty milliseconds."),
    ("100 km/h, $5/hour", "one hundred kilometers per hour, five dollars per hour."),
])  # fmt: skip
def test_numbers(text: str, spoken: str) -> None:
    assert spoken_english(text) == spoken


@pytest.mark.parametrize(("text", "spoken"), [
    ("Dr. Li, Mr. and Mrs. Day", "Doctor Li, Mister and Missus Day."),
    ("Main St. near St. Paul", "Main Street near Saint Paul."),
    ("e.g. this, i.e. that, etc. Then vs. now", "for example this, that is that, et cetera. Then versus now."),
    ("No. 5 is no answer", "number five is no answer."),
    ("NASA and the U.S.A. use HTTP", "NASA and the U S A use H T T P."),
    ("OpenAI, CPUs, GPT-4, H200, mp3", "Open A I, C P U's, G P T four, H two hundred, M P three."),
    ("World War II", "World War two."), ("I SAID STOP IT NOW", "i said stop it now."),
    ("hmm, pdf and html", "hmm, P D F and H T M L."),
    ("AT&T, 1+1=2, #5, #tag, C#", "A T and T, one plus one equals two, number five, hashtag tag, C sharp."),
    ("joe.x@mail.example.org!", "joe dot x at mail dot example dot org!"),
    ("See https://www.example.com/a-b?q=1.", "See example dot com slash a dash b question mark q equals one."),
    ("(http://x.com/) [x.com/] {x.com/}", "x dot com, x dot com, x dot com."),
    (
        "\"x.com/\" 'x.com/' x.com/|x.com/` x.com/>",
        "x dot com x dot com x dot com, x dot com x dot com greater than.",
    ),
    ("node.js on my.site.io", "node dot J S on my dot site dot I O."),
])  # fmt: skip
def test_words(text: str, spoken: str) -> None:
    assert spoken_english(text) == spoken


@pytest.mark.parametrize(("text", "spoken"), [
    ("Hello", "Hello."), ("Wait... what?! Yes!!!", "Wait. what? Yes!"),
    ("**bold** _it_ `code`\n\nText", "bold it code. Text."),
    ("J. R. R. Tolkien and Plan B. Then", "J R R Tolkien and Plan B. Then."),
    ("“Curly” ‘quotes’ don’t — dash – there", "Curly quotes don't, dash, there."),
    ("Good 🎉👩\u200d👩\u200d👧 day :)", "Good day."), ("Café 日本語 naïve Straße", "Cafe naive Strasse."),
    ("<|im_start|>well-known!", "well-known!"), ("日本語", ""), ("🎉 ?!", ""), ("", ""),
])  # fmt: skip
def test_characters(text: str, spoken: str) -> None:
    assert spoken_english(text) == spoken


def test_spoken_text_is_plain_and_stays_as_it_is() -> None:
    draw = random.Random(0)
    for _ in range(5000):
        text = "".join(draw.choices(PIECES, k=draw.randint(1, 14)))
        spoken = spoken_english(text)
        assert SPOKEN.fullmatch(spoken), (text, spoken)
        assert spoken_english(spoken) == spoken, text


def test_every_character_is_spoken_or_skipped() -> None:
    for start in (*range(0, 0x30000, 0x1000), 0xE0000, 0x10F000):
        for separator in ("", " ", "a", "1"):
            spoken = spoken_english(separator.join(map(chr, range(start, start + 0x1000))))
            assert SPOKEN.fullmatch(spoken), hex(start)


@pytest.mark.parametrize("piece", [
    "a", "A", "1", "1.", "1,234,", "1 ", "1/", "1-", "a.", "a@", "[", "[a](", "<a", "www.", "x.com.", "-", ">", "#",
    "'", "$", "+1 ", "1:", "\n- a", "\u0301\u0316", " .", "1a", ".5", "Mr ", "HTTPServer", "日",
])  # fmt: skip
def test_long_monotonous_text_takes_no_time_to_speak_of(piece: str) -> None:
    """A rule that is quadratic in the length would run for minutes here."""
    spoken = spoken_english(piece * (100_000 // len(piece)))
    assert SPOKEN.fullmatch(spoken[-1000:].lstrip(" '.,-:"))
