import random
import re

import pytest

from deployments.embedded_voice.english import spoken_english
from deployments.embedded_voice.numbers import cardinal

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


def test_cardinals_differ() -> None:
    assert len({cardinal(number) for number in range(20_000)}) == 20_000


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
