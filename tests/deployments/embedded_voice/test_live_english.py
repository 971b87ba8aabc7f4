import random

import pytest

from deployments.embedded_voice.english import spoken_english
from deployments.embedded_voice.live_english import LONGEST_UNCUT, LiveEnglish

# What the reading of a word may depend on stands beside it.
PIECES = """
the a I A am an html NASA NATO UNESCO FBI St St. Mr. Mr Dr. 5 5th May March, p.m. a.m. e.g. a.k.a. https://FOO
www.FOO.com a@b.CO $5 5% million km m h and, Sure, Really? wow!! note: :D - — 'quoted' [link](http://x) <b> </b>
``` # * > ( ) it's I'm I’ll don't x y by shh iOS Ph.D etc. etc, No. No 3 1/2 12:30 2020 1990s or so in of é naïve
漢字 🙂 … . , ; ? ! Main Ave. approx. fig. ca. C# V 5V A.M. PM half US us OK Mt. IV |
"""


def live(parts: list[str]) -> list[str]:
    """What has been said with each part, and at last with the end."""
    front = LiveEnglish()
    said = ["".join(part.spoken for part in front.feed(text, is_last=False)) for text in parts]
    return [*said, "".join(part.spoken for part in front.feed("", is_last=True))]


@pytest.mark.parametrize("seed", range(20))
def test_it_reads_what_it_would_read_of_the_whole(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(20):
        pieces = [
            draw.choice(PIECES.split()) + draw.choice(("", " ", " ", " ", "\n", "\n\n", "\t"))
            for _ in range(draw.randrange(14))
        ]
        text = "".join(pieces)
        cuts = sorted(draw.randrange(len(text) + 1) for _ in range(draw.choice((0, 3, 30))))
        parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert "".join(live(parts)) == spoken_english(text), parts


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_long_list_is_cut_between_its_items(size: int) -> None:
    text = "\n".join(f"- item {number} is good & long" for number in range(100))
    front = LiveEnglish()
    parts = [part for at in range(0, len(text), size) for part in front.feed(text[at : at + size], is_last=False)]
    assert len(parts) >= len(text) // LONGEST_UNCUT
    parts += front.feed("", is_last=True)
    assert "".join(part.spoken for part in parts) == spoken_english(text)
    assert "".join(part.written for part in parts) == text


@pytest.mark.parametrize("text", ["- " + "word to say " * 400, "1" * 5000, "[" * 5000, "- " + "1 " * 2500])
def test_nothing_waits_for_a_cut_longer_than_so_many_characters(text: str) -> None:
    front = LiveEnglish()
    parts = front.feed(text, is_last=False)
    assert len(text) - len("".join(part.written for part in parts)) <= LONGEST_UNCUT


@pytest.mark.parametrize(("text", "said"), [
    ("Thank you for calling", ["", "Thank ", "you ", "for ", "calling."]),
    ("Sure, one moment", ["", "Sure, ", "one ", "moment."]),
    ("I have moved it", ["", "I ", "have ", "moved ", "it."]),
    ("The code I just sent you", ["", "The ", "", "code I ", "just ", "sent ", "you."]),  # or IBM
    ("Meet at 5 p.m. today again", ["", "Meet ", "", "", "", "at five P M today ", "again."]),
    ("See www.x.io page now", ["", "", "", "See x dot I O page ", "now."]),
])  # fmt: skip
def test_a_word_is_certain_when_the_next_one_begins(text: str, said: list[str]) -> None:
    first, *words = text.split(" ")
    assert live([first, *(f" {word}" for word in words)]) == said
