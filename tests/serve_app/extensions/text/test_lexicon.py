import random

import pytest

from deployments.errors import InvalidRequest
from serve_app.extensions.text.lexicon import MAX_PLS_BYTES, MAX_WORDS, Lexicon, LiveLexicon, from_pls, to_pls

WORDS = {"SQL": "sequel", "nginx": "engine x", "New York": "the city", "New": "knew", "漢字": "かんじ"}
WORDS["c++"] = "see plus"


def respelled(text: str, cuts: list[int] | None = None) -> str:
    live, spoken, written = LiveLexicon(Lexicon(WORDS)), "", ""
    for start, end in zip([0, *(cuts or [])], [*(cuts or []), len(text)], strict=True):
        for part in live.feed(text[start:end], is_last=end == len(text)):
            spoken, written = spoken + part.spoken, written + part.written
    assert written == text
    return spoken


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        ("SQL, sql, MySQL and SQLs", "sequel, sql, MySQL and SQLs"),
        ("nginx NGINX Nginx", "engine x engine x engine x"),
        ("New York, New Yorker, New", "the city, knew Yorker, knew"),
        ("この漢字です", "このかんじです"),
        ("SQL漢字、漢字nginx", "sequelかんじ、かんじengine x"),
        ("C++ or c++?", "see plus or see plus?"),
        ("", ""),
    ],
)
def test_whole_words_are_respelled_the_longest_first(text: str, spoken: str) -> None:
    assert respelled(text) == spoken


@pytest.mark.parametrize("seed", range(100))
def test_cuts_change_nothing(seed: int) -> None:
    draw = random.Random(seed)
    pieces = ["SQL", "New", " ", "York", "nginx", "漢", "字", "c", "+", "s", ".", "a"]
    text = "".join(draw.choice(pieces) for _ in range(30))
    cuts = sorted(draw.randrange(len(text)) for _ in range(draw.randrange(20)))
    assert respelled(text, cuts) == respelled(text)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ({"tomato": "təˈmeɪtoʊ"}, "lexicon.tomato: .* is a phoneme"),
        ({"tomato": "T AH0 M EY1"}, "AH0.* is a phoneme"),
        ({"tomato": "<<t|o>>"}, "lexicon.tomato: '<<' is a phoneme"),
        ({"": "x"}, "1 to 80 characters"),
        ({"a" * 81: "x"}, "1 to 80 characters"),
        ({"a": "x" * 201}, "at most 200 characters"),
        ({f"w{number}": "x" for number in range(MAX_WORDS + 1)}, "at most 1000"),
    ],
)
def test_what_is_no_respelling_is_refused_by_name(words: dict[str, str], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        Lexicon.checked(words, "lexicon")


def test_pls_goes_out_and_comes_in() -> None:
    words = {"SQL": "sequel", "R&D": "<are and dee>", "w" * 80: "x" * 200}
    assert from_pls(to_pls(words.items(), "en-GB").encode(), "file") == words


LEXICON = '<lexicon version="1.0" xmlns="http://www.w3.org/2005/01/pronunciation-lexicon">{}</lexicon>'


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (LEXICON.format("<lexeme><grapheme>tomato</grapheme><phoneme>x</phoneme></lexeme>"), "tomato: phonemes"),
        ('<!DOCTYPE a [<!ENTITY b "c">]><lexicon>&b;</lexicon>', "DOCTYPE"),
        ("<lexicon>", "no element found"),
        ("no xml", "syntax error"),
        (" " * (MAX_PLS_BYTES + 1), "too long"),
    ],
)
def test_a_file_that_is_no_lexicon_of_aliases_is_refused(content: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        from_pls(content.encode(), "file")
