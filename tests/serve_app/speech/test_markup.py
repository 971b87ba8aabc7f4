import random
from collections.abc import Iterable

import pytest

from serve_app.speech.markup import LiveSpeakable, Pause, speakable

PIECES = [
    *("<b>", "</b>", "<", "break ", "time='1s'", "/>", "[", "a", "](", "x", ")", "!", "*", "**", "_", "`", "```", "\n"),
    *("\n\n", "- ", "# ", "1. ", "|", "--", "&", "amp;", "&amp;", " ", "word ", "Hello", "<sub alias='q r'>", "</sub>"),
    *(
        "<!--",
        "-->",
        "~",
        "~~",
        "<desc>",
        "</desc>",
        "[laughs]",
        "[pause 2s]",
        "</say-as>",
        ".",
        "5",
        "=",
        "'",
        "<a@b.c>",
    ),
    "<say-as interpret-as='digits'>12",
]


def in_parts(text: str, cuts: Iterable[int]) -> list[str | Pause]:
    markup, said = LiveSpeakable(), []
    ends = [*sorted(cuts), len(text)]
    for start, end in zip([0, *ends], ends, strict=False):
        said += markup.feed(text[start:end], is_last=False)
    said += markup.feed("", is_last=True)
    assert "".join(each.written for each in said) == text
    parts: list[str | Pause] = [""]
    for each in said:
        if isinstance(each.spoken, Pause):
            parts += [each.spoken, ""]
        else:
            parts[-1] = f"{parts[-1]}{each.spoken}"
    return [part for part in (each.strip() if isinstance(each, str) else each for each in parts) if part]


@pytest.mark.parametrize(
    ("written", "spoken"),
    [
        ("Plain text, with 5 < 6 & 7 > 3.", "Plain text, with 5 < 6 & 7 > 3."),
        ("if x<y and y>z, 2*3, a * b, snake_case", "if x<y and y>z, 2*3, a * b, snake_case"),
        ("**Bold**, *it*, __b__, _i_, `code`, ~~gone~~", "Bold, it, b, i, code, gone"),
        ("# Title\n\nText\n- one\n- two\n\nEnd", "Title. Text. one. two. End"),
        ("1. First\n2. Second", "1. First. 2. Second"),
        ("> quoted\n\n---\nend", "quoted. end"),
        ("See [the docs](http://x.y/z_a)![alt](i.png)[^1].", "See the docsalt."),
        ("<https://a.b/c> or <a@b.co>", "https://a.b/c or a@b.co"),
        ("|a|b|\n|--|:-:|\n|1|2|", "a, b, 1, 2,"),
        ("```python\nx = 1\n```\nok", "x = 1. ok"),
        ("AT&amp;T &lt;3 &#65;", "AT&T <3 A"),
        ("<speak><p>One</p><p>Two</p></speak>", "One. Two."),
        ("<prosody rate='slow'>slow</prosody> <emphasis level='strong'>x</emphasis><mark name='a'/>", "slow x"),
        ('<phoneme alphabet="ipa" ph="təˈmeɪtoʊ">tomato</phoneme>', "tomato"),
        ('<sub alias="World Wide Web">W3C</sub> x', "World Wide Web x"),
        ('<say-as interpret-as="characters">AB</say-as>', "A B"),
        ("a <!-- not --> b<style>c {}</style> <desc>d</desc>e", "a  b e"),
        ("<think>hm</think> [laughs] [1] [softly laughing] no", "hm  [1]  no"),
        ("an unclosed <b and [ and ` and &", "an unclosed <b and [ and  and &"),
        ("", ""),
    ],
)
def test_no_mark_is_spoken(written: str, spoken: str) -> None:
    assert speakable(written) == ([spoken] if spoken else [])


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ('<break time="500ms"/>', 0.5),
        ("<break time='1.5s' />", 1.5),
        ("<break time='99s'/>", 10.0),
        ("<break strength='strong'/>", 0.8),
        ("<break/>", 0.4),
        ("[pause 2 seconds]", 2.0),
        ("[pause]", 0.5),
    ],
)
def test_pauses_have_the_length_that_is_stated(written: str, seconds: float) -> None:
    assert speakable(f"One {written} two") == ["One", Pause(seconds), "two"]


@pytest.mark.parametrize("seed", range(300))
def test_cuts_change_nothing(seed: int) -> None:
    draw = random.Random(seed)
    text = "".join(draw.choice(PIECES) for _ in range(draw.randrange(1, 40)))
    whole = speakable(text)
    assert in_parts(text, range(len(text))) == whole
    assert in_parts(text, (draw.randrange(len(text) + 1) for _ in range(5))) == whole


def test_what_is_never_closed_takes_no_more_than_its_time() -> None:
    for opened in ("<a ", "[", "<!--", "**", "`", "&", "<desc>", "<" * 100):
        assert "".join(str(part) for part in speakable(f"{opened} {'word ' * 20_000}")).count("word") in (0, 20_000)
