import random
from collections.abc import Iterable

import pytest

from serve_app.extensions.text.markup import CODE, CUE, EMOJI, LINK, MARKS, TOO_LONG, LiveMarkup, Markup, Token
from serve_app.extensions.text.style_tags import StyleRules

PIECES = [
    "<b>", "</b>", "<", "break ", "time='1s'", "/>", "[", "a", "](", "x", ")", "!", "*", "**", "_", "`", "```", "\n",
    "\n\n", "- ", "# ", "1. ", "|", "--", "&", "amp;", "&amp;", " ", "word ", "Hello", "<sub alias='q r'>", "</sub>",
    "<!--", "-->", "~", "~~", "<desc>", "</desc>", "[laughs]", "[pause 2s]", "</say-as>", ".", "5", "=", "'",
    "<a@b.c>", "<say-as interpret-as='digits'>12", "😀", "\ufe0f", "[pause:", "2s]", "<p>", "</p>", "\n```\n", "~~~\n",
    "<prosody rate='fast'>", "</prosody>", "\r\n", ",", "\n \n", "<emotion value='sad'/>", "<emotion value='",
    "happy'>", "</emotion>", "<expr type='prosody' label='slow'>", "<expr label='calm'/>", "</expr>", "[whispers]",
    "[/whispers]", "[custom tag]", "<emphasis>", "</emphasis>", "<prosody volume='soft' pitch='-1st'>", "(a/b)",
]  # fmt: skip
Heard = list[str | float]


def heard(tokens: Iterable[Token]) -> Heard:
    """Prose and seconds of silence; a change of speed is a negative number, one of style is in angle brackets."""
    parts: Heard = [""]
    for token in tokens:
        style = None if token.style is None else f"<{token.style}>"
        for mark in (token.pause_s or None, None if token.speed is None else -token.speed, style):
            if mark is not None:
                parts += [mark, ""]
        parts[-1] = f"{parts[-1]}{token.spoken}"
    return [part for part in (each.strip() if isinstance(each, str) else each for each in parts) if part]


def read(text: str, markup: Markup = "auto", paragraph_pause_s: float = 0.0) -> Heard:
    return heard(LiveMarkup(markup, paragraph_pause_s=paragraph_pause_s).feed(text, is_last=True))


def in_parts(text: str, cuts: Iterable[int], markup: Markup) -> Heard:
    live, tokens = LiveMarkup(markup, paragraph_pause_s=0.5, styles=StyleRules("all", any_bracket=True)), []
    ends = [*sorted(cuts), len(text)]
    for start, end in zip([0, *ends], ends, strict=False):
        tokens += live.feed(text[start:end], is_last=False)
    tokens += live.feed("", is_last=True)
    assert "".join(each.written for each in tokens) == text
    return heard(tokens)


@pytest.mark.parametrize(
    ("written", "spoken"),
    [
        ("Plain text, with 5 < 6 & 7 > 3.", "Plain text, with 5 < 6 & 7 > 3."),
        ("if x<y and y>z, 2*3, a * b, snake_case", "if x<y and y>z, 2*3, a * b, snake_case"),
        ("**Bold**, *it*, __b__, _i_, `code`, ~~gone~~", "Bold, it, b, i, code, gone"),
        ("# Title\n\nText\n- one\n- two\n\nEnd", "Title. Text. one. two. End"),
        ("1. First\n2. Second", "1. First. 2. Second"),
        ("Red\r\nBlue \nGreen\u3000\n\r\nEnd\r\n", "Red. Blue. Green. End"),
        ("abc</think>Yes.", "abc. Yes."),
        ("> quoted\n\n---\nend", "quoted. end"),
        ("See [the docs](http://x.y/z_a)![alt](i.png)[^1].", "See the docsalt."),
        ("<https://a.b/c> or <a@b.co>", "https://a.b/c or a@b.co"),
        ("|a|b|\n|--|:-:|\n|1|2|", "a, b, 1, 2,"),
        ("Run:\n```python\nx = 1\n```\nok `x`", "Run: ok x"),
        ("AT&amp;T &lt;3 &#65;", "AT&T <3 A"),
        ("<speak><p>One</p><p>Two</p></speak>", "One. Two."),
        ("<prosody pitch='low'>low</prosody> <emphasis level='strong'>x</emphasis><mark name='a'/>", "low x"),
        ('<phoneme alphabet="ipa" ph="təˈmeɪtoʊ">tomato</phoneme>', "tomato"),
        ('<sub alias="World Wide Web">W3C</sub> x', "World Wide Web x"),
        ('<say-as interpret-as="characters">AB</say-as>', "A B"),
        ("a <!-- not\n\nthis --> b<style>c\n{}</style> <desc>d\n</desc>e", "a  b e"),
        ("<think>hm</think> [laughs] [1] [softly laughing] no", "[1]  no"),
        ("an unclosed <b and [ and ` and &", "an unclosed <b and [ and  and &"),
        ("", ""),
    ],
)
def test_no_mark_is_spoken(written: str, spoken: str) -> None:
    assert read(written) == ([spoken] if spoken else [])


@pytest.mark.parametrize("markup", ["auto", "ssml"])
@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ('<break time="500ms"/>', 0.5), ("<break time='1.5s' />", 1.5), ("<break time='99s'/>", 10.0),
        ("<break strength='strong'/>", 0.8), ("<break/>", 0.4), ("[pause 2 seconds]", 2.0),
        ("[pause:2.5s]", 2.5), ("[pause: 250ms]", 0.25), ("[pause]", 0.5),
    ],
)  # fmt: skip
def test_pauses_have_the_length_that_is_stated(written: str, seconds: float, markup: Markup) -> None:
    assert read(f"One {written} two", markup) == ["One", seconds, "two"]


def test_the_pauses_of_a_text_are_bounded() -> None:
    tokens = LiveMarkup("auto").feed("a [pause 9s] " * 100, is_last=True)
    assert sum(token.pause_s for token in tokens) == 120
    assert sum(token.left_out == TOO_LONG for token in tokens) == 100 - 13


@pytest.mark.parametrize(
    ("text", "left_out"),
    [
        ("**a** [b](c) 😀👍🏽", [MARKS, MARKS, LINK, EMOJI]), ("```\nx\n```", [CODE]),
        ("[laughs] <b>x</b>", [CUE, "tag b", "tag b"]), ("Plain, 5 < 6.", []),
    ],
)  # fmt: skip
def test_what_is_left_out_is_named(text: str, left_out: list[str]) -> None:
    tokens = LiveMarkup("auto").feed(text, is_last=True)
    assert [token.left_out for token in tokens if token.left_out] == left_out


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        ("One\n\nTwo.\n \nThree\n\n", ["One.", 0.6, "Two.", 0.6, "Three"]),
        ("\n\n# Title\n\n- a\n- b", ["Title.", 0.6, "a. b"]),
        ("One.\r\n\r\nTwo.", ["One.", 0.6, "Two."]),
        ("<p>One</p>\n<p>Two</p>", ["One.", 0.6, "Two."]),
        ('One\n\n<break time="2s"/>Two', ["One.", 2.0, "Two"]),
        ("One\n\n```\nx\n```\n\nTwo", ["One.", 0.6, "Two"]),
        ("One line\nand the next", ["One line and the next"]),
    ],
)
def test_a_blank_line_is_a_pause(text: str, spoken: Heard) -> None:
    assert read(text, paragraph_pause_s=0.6) == spoken


def test_a_text_as_it_is_written() -> None:
    text = "**a** <b>b</b> & 😀 [pause 2s]\n```\nc\n```"
    assert read(text, "none", 0.6) == [text]
    assert read("One\n \nTwo\nthree", "none", 0.6) == ["One", 0.6, "Two\nthree"]


def test_ssml_has_no_marks_but_its_own() -> None:
    text = (
        '<speak>*a* &lt; <sub alias="b c">x</sub><s>d</s> <prosody rate="80%">e <prosody rate="2">f</prosody></prosody>'
    )
    assert read(text, "ssml") == ["*a* < b c. d.", -0.8, "e", -1.6, "f", -0.8, -1.0]
    assert read('<say-as interpret-as="telephone">0 12</say-as>', "ssml") == ["0 1 2"]


@pytest.mark.parametrize(("written", "speed"), [("0.001", 0.25), ("0.5", 0.5), ("99", 4.0)])
def test_speeds_are_bounded(written: str, speed: float) -> None:
    for element in ('<speed ratio="{}"/>', '<prosody rate="{}">'):
        assert read(f"a {element.format(written)}b")[:3] == ["a", -speed, "b"]


@pytest.mark.parametrize("seed", range(300))
def test_cuts_change_nothing(seed: int) -> None:
    draw = random.Random(seed)
    text = "".join(draw.choice(PIECES) for _ in range(draw.randrange(1, 40)))
    for markup in ("auto", "ssml", "none"):
        whole = in_parts(text, (), markup)
        assert in_parts(text, range(len(text)), markup) == whole
        assert in_parts(text, (draw.randrange(len(text) + 1) for _ in range(5)), markup) == whole


def test_what_is_never_closed_takes_no_more_than_its_time() -> None:
    for opened in ("<a ", "[", "<!--", "**", "`", "&", "<desc>", "<" * 100, "<emotion ", "[sad, "):
        assert "".join(map(str, read(f"{opened} {'word ' * 20_000}"))).count("word") in (0, 20_000)
