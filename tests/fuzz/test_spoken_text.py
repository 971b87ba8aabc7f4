"""No text takes more than its time, whatever it is made of, at once or in parts; and none is a 5xx at any door."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.errors import InvalidRequest
from deployments.protocol import SynthesisRequest
from serve_app.config import ApiSettings
from serve_app.extensions.text.lexicon import MAX_WORDS, Lexicon, from_pls
from serve_app.extensions.text.spoken_text import CHARS_AT_ONCE, TextReader, TextRules, read
from serve_app.speech.segments import Segments, Utterance
from tests.fuzz.conftest import Cases
from tests.fuzz.texts import FLOODS, REPEATED, text
from tests.processor_time import times_as_long
from tests.serve_app.asgi import post
from tests.serve_app.extensions.text.test_markup import PIECES
from tests.serve_app.fake import CUSTOM_VOICE, FakeSynthesizer, utterance
from tests.serve_app.one_model import one_api

pytestmark = pytest.mark.anyio

Way = Callable[..., None]

WORDS = Lexicon({"a": "ay", "a a a a b": "x", "word to": "y"} | {f"a {number}": "z" for number in range(MAX_WORDS - 3)})
UNITS = [
    *("a", "水", "1", "🙂", "a.", "a\u0301", "(", "👩\u200d", "word ", "a ", "One. ", "\n", "\n\n", "a\n\n", "\r\n"),
    *("**a** ", "*", "_a", "`", "```\n", "~~~\n", "- a\n", "# a\n", "> ", "|", "|a|\n", "[", "[a](b) ", "](", "!["),
    *("<", "<a ", "<b>", "</b>", "<!--", "<!-- a -->", "&", "&amp;", "&#65", "<https://a.b>", "http://a.b/c "),
    *("a@b.co ", "<p>", "<p>a</p>", "<break/>a", "[pause:1ms]a", "[pause", "<sub alias='a'>"),
    *("<sub alias='a'>b</sub>", "[laughs]"),
    *("<prosody rate='2'>a", "<say-as interpret-as='digits'>1", "<speed ratio='2'/>a<speed ratio='1'/>a", "<desc>"),
    *("SQL ", "a a a a ", "$1,234.56 ", "3:45 p.m. ", "Dr. ", "e.g. ", "e\u0301", "\u200b", "\u3002"),
    *("、", "“a” ", "=\n"),
    *("<spell>a", "[^1]", " ", "--"),
]
# Halves of surrogate pairs come to no text.
UNITS += [
    unit for unit in dict.fromkeys((*REPEATED, *FLOODS)) if unit not in UNITS and not "\ud800" <= unit <= "\udfff"
]
RULES = [
    TextRules("auto", 0.5, WORDS), TextRules("auto", 0.5, WORDS, "english"),
    TextRules("none", 0.5, WORDS, "english"), TextRules("ssml", 0.5, WORDS),
    TextRules("auto", 0.5, normalised="german"),
]  # fmt: skip
# A sixth of the units in each way in `make test`, all of them in `make fuzz`.
IS_WHOLE = "TALKRAY_FUZZ_CASES" in os.environ
STEP = 1 if IS_WHOLE else 6


def whole(sent: str, rules: TextRules) -> None:
    try:
        spoken = read(sent, rules)
    except InvalidRequest:
        assert rules.markup == "ssml"
        return
    Segments.of(Utterance(SynthesisRequest("", spoken.text), spans=spoken.spans), 300)


def in_parts(sent: str, rules: TextRules) -> None:
    reader = TextReader(rules)
    for at in range(0, len(sent), CHARS_AT_ONCE):
        reader.feed(sent[at : at + CHARS_AT_ONCE], is_last=False)
    reader.feed("", is_last=True)


@pytest.mark.parametrize("rules", RULES, ids=lambda rules: f"{rules.markup}-{rules.spoken_form or rules.normalised}")
@pytest.mark.parametrize(
    ("way", "unit"), [*((whole, unit) for unit in UNITS[::STEP]), *((in_parts, unit) for unit in UNITS[1::STEP])]
)
def test_the_time_of_a_text_grows_with_its_length(way: Way, unit: str, rules: TextRules) -> None:
    # In proportion it is 16 times as long, with the square of the length 256 times. Short texts stay below limits that
    # make long ones dearer: of `&amp;` in parts a letter costs 1.2 us in 4 KiB, and 1.7 us in 16, 64 and 256 KiB.
    limit = 26 if IS_WHOLE else 32
    assert times_as_long(partial(way, rules=rules), unit, short=4 << 10, long=64 << 10, limit=limit) <= limit


@pytest.mark.parametrize("markup", ["auto", "none", "ssml"])
async def test_a_dry_run_is_no_server_error(cases: Cases, markup: str) -> None:
    for form in (None, "english"):
        api = one_api(FakeSynthesizer(replace(CUSTOM_VOICE, spoken_form=form), utterance(1)), ApiSettings())
        for chance in cases:
            sent = text(chance) if chance.random() < 0.5 else "".join(chance.choices(PIECES, k=30))
            fields = {"input": sent, "voice": "alloy", "markup": markup, "max_segment_chars": chance.choice([50, 999])}
            fields["lexicon"] = {text(chance)[:20]: text(chance)[:20]} if chance.random() < 0.3 else {"a": "ay"}
            answer = await post(api, "/v1/audio/text", json.dumps(fields).encode())
            cases.count(answer.status)
            assert answer.status == 200 or 400 <= answer.status < 500, answer


@given(content=st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode)))
def test_no_file_is_more_than_a_client_error(content: bytes) -> None:
    try:
        from_pls(content, "file")
    except InvalidRequest as error:
        assert error.param == "file"  # noqa: PT017
