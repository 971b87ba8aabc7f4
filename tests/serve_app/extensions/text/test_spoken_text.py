"""One pipeline: the same of a whole text and of its parts, and every word leads back to the text as it was sent."""

from collections.abc import AsyncGenerator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.errors import InvalidRequest
from deployments.listener import Listener
from deployments.protocol import FinishReason, PcmChunk, Reading, SynthesisRequest
from serve_app.extensions.text.lexicon import Lexicon
from serve_app.extensions.text.spoken_text import TextReader, TextRules, read
from serve_app.extensions.text.style_tags import StyleRules
from serve_app.extensions.word_times.word_times import WordTimes
from serve_app.speech.segments import Utterance
from serve_app.speech.utterance_synthesizer import UtteranceSynthesizer
from serve_app.text.spoken import LEFT_OUT, SpokenPiece, TextSpan
from tests.serve_app.extensions.text.test_markup import PIECES
from tests.serve_app.fake import CUSTOM_VOICE, FakeSynthesizer, pcm_of, tone, utterance

pytestmark = pytest.mark.anyio

WORDS = Lexicon({"SQL": "sequel", "nginx": "engine x", "New York": "the city", "漢字": "かんじ", "a": "ay"})
LEXICAL = ["SQL", "sql", "SQLs", "Nginx", "New ", "York", "Yorker", "漢", "字", "a", "a-b", "_a"]
FORMS = (None, "english")
CODES = np.zeros((1, 16), np.int16)
text_of_pieces = st.lists(st.sampled_from([*PIECES, *LEXICAL]), max_size=30).map("".join)
any_text = st.one_of(text_of_pieces, st.text(max_size=80))


def in_parts(text: str, rules: TextRules, size: int) -> list[SpokenPiece]:
    reader = TextReader(rules)
    pieces = [each for at in range(0, len(text), size) for each in reader.feed(text[at : at + size], is_last=False)]
    return pieces + reader.feed("", is_last=True)


def spans(pieces: list[SpokenPiece]) -> list[TextSpan]:
    """As `SpokenText` has them."""
    found, text, pause_s, speed, style = [], "", 0.0, 1.0, ""
    for piece in [*pieces, SpokenPiece("", "", speed=0.0)]:
        if not piece.is_border:
            text += piece.spoken
            continue
        if any(char.isalnum() for char in text):
            found.append(TextSpan(text.strip(), pause_s, speed, style))
            pause_s = 0.0
        text, pause_s, speed = "", pause_s + piece.pause_s, speed if piece.speed is None else piece.speed
        style = style if piece.style is None else piece.style
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("markup", ["auto", "none"])
@settings(max_examples=150, deadline=None)
@given(text=any_text, size=st.integers(1, 9))
def test_wherever_a_text_is_cut_the_same_is_spoken(markup: str, form: str | None, text: str, size: int) -> None:
    rules = TextRules(markup, 0.5, WORDS, form, styles=StyleRules("all", any_bracket=True))  # type: ignore[arg-type]
    pieces, whole = in_parts(text, rules, size), in_parts(text, rules, 10_000)
    for each in (pieces, whole):
        written = "".join(piece.written for piece in each)
        assert len(written) == len(text)
        assert all(one in (other, LEFT_OUT) for one, other in zip(written, text, strict=True))
    assert spans(pieces) == spans(whole)
    spoken = read(text, rules)
    found = [each for each in spoken.spans if any(char.isalnum() for char in each.text)]
    assert [replace(each, text="") for each in spans(whole)] == [replace(each, text="") for each in found]
    if form is None:
        assert [each.text for each in spans(whole)] == [each.text for each in found]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("**Bold** and `code` 😀, un**like**ly.", [("Bold", "Bold"), ("and", "and"), ("code", "code,")]),
        ("See [the docs](http://x.y/z) now", [("See", "See"), ("the", "the"), ("docs", "docs"), ("now", "now")]),
        ("Ask SQL of nginx!", [("Ask", "Ask"), ("SQL", "sequel"), ("of", "of"), ("nginx!", "engine")]),
        ('One <sub alias="two words">W3C</sub> more', [("One", "One"), ("W3C", "two"), ("more", "more")]),
        ("**SQL** is fun", [("SQL", "sequel"), ("is", "is"), ("fun", "fun")]),
        ("One.\n\n- Two", [("One.", "One."), ("Two", "Two")]),
        ("In New York today", [("In", "In"), ("New", "the"), ("York", "city"), ("today", "today")]),
    ],
)
def test_times_are_of_the_words_as_they_are_written(text: str, words: list[tuple[str, str]]) -> None:
    spoken = read(text, TextRules("auto", 0.5, WORDS))
    times = WordTimes(spoken, CUSTOM_VOICE)
    heard = tuple((float(number), float(number)) for number in range(len(spoken.text) + 1))
    times.feed(PcmChunk(tone(24000), np.zeros((1, 16), np.int16), 5, FinishReason.STOP, text_positions=heard))
    told = times.take()
    assert [text[word.start : word.end] for word in told] == [word.text for word in told]
    got = [(word.text, spoken.text[round(word.start_s) :].split()[0]) for word in told]
    assert got[: len(words)] == words
    if "unlike" in text.replace("*", ""):
        assert got[-1][0] == "un**like**ly."


def chunks(text: str, rules: TextRules, synthesizer: FakeSynthesizer) -> AsyncGenerator[PcmChunk, None]:
    spoken = read(text, rules)
    request, info = SynthesisRequest("id", spoken.text, seed=1), replace(CUSTOM_VOICE, max_segment_chars=60)
    utterance = Utterance(request, spans=spoken.spans, max_segment_chars=rules.max_segment_chars)
    return UtteranceSynthesizer(synthesizer).speak_utterance(utterance, info, Listener())


async def test_a_paragraph_is_a_longer_pause_than_a_sentence() -> None:
    """Sentences of one segment follow each other, paragraphs have silence between them, of the length that is set."""
    for pause_s in (0.0, 0.6):
        synthesizer = FakeSynthesizer(script=utterance(1))
        text = "One sentence. And one.\n\nA paragraph."
        heard = [chunk async for chunk in chunks(text, TextRules("auto", pause_s), synthesizer)]
        speech = pcm_of(utterance(1))
        if pause_s:
            assert synthesizer.texts == ["One sentence. And one.", "A paragraph."]
            assert pcm_of(heard) == speech + bytes(2 * int(24000 * pause_s)) + speech
        else:
            assert synthesizer.texts == ["One sentence. And one. A paragraph."]
            assert pcm_of(heard) == speech


@pytest.mark.parametrize(("wanted", "num_segments"), [(None, 3), (50, 3), (30, 5), (5000, 3)])
async def test_segments_are_as_long_as_the_request_wants(wanted: int | None, num_segments: int) -> None:
    synthesizer = FakeSynthesizer(script=utterance(1))
    rules = TextRules("auto", max_segment_chars=wanted)
    async for _ in chunks("Twenty letters it is. " * 5, rules, synthesizer):
        pass
    assert len(synthesizer.texts) == num_segments


async def test_a_rate_changes_its_part_and_the_times_of_its_words() -> None:
    frames = [
        PcmChunk(
            tone(1920 if number else 960),
            CODES,
            5,
            None,
            1920 * (number + 1),
            readings=(Reading(number, (number / 5,)),),
        )
        for number in range(50)
    ]
    script = [*frames[:-1], replace(frames[-1], finish_reason=FinishReason.STOP)]
    synthesizer = FakeSynthesizer(script=script)
    text = 'Normal. <prosody rate="200%">Fast one.</prosody> <break time="1s"/> Normal.'
    got = [chunk async for chunk in chunks(text, TextRules("ssml"), synthesizer)]
    assert synthesizer.texts == ["Normal.", "Fast one.", "Normal."]
    seconds = len(pcm_of(got)) / 2 / 24000
    assert seconds == pytest.approx(3.96 + 1.98 + 1 + 3.96, abs=0.1)
    places = [place for chunk in got for place in chunk.text_positions]
    assert [at for at, _ in places] == sorted(at for at, _ in places)
    assert places[75][0] == pytest.approx(3.96 + (25.5 * 0.08 - 0.04) / 2)
    assert places[125][0] == pytest.approx(3.96 + 1.98 + 1 + 25.5 * 0.08 - 0.04, abs=0.05)


@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        ("<speak>a</speak", 15, "not well-formed"),
        ("a <b>c</i>", 8, "mismatched tag"),
        ("a & b", 3, "not well-formed"),
        ('äö <break time="soon"/>', 3, "break time 'soon'"),
        ('<break time="10001ms"/>', 0, "break time '10001ms'"),
        ('<break strength="bold"/>', 0, "break strength 'bold'"),
        ('x <prosody rate="never">y</prosody>', 2, "prosody rate 'never'"),
        ('<prosody rate="24%">y</prosody>', 0, "prosody rate '24%'"),
        ('<prosody rate="4.1">y</prosody>', 0, "prosody rate '4.1'"),
        ("<say-as>x</say-as>", 0, "say-as requires an interpret-as"),
        ('<phoneme alphabet="ipa" ph="x">y</phoneme>', 0, "phonemes are not supported"),
        ("<sub>x</sub>", 0, "sub requires an alias"),
        ("<!DOCTYPE a><a/>", 2, "not well-formed"),
        ("&nbsp;", 0, "undefined entity"),
    ],
)
def test_bad_ssml_is_an_error_that_says_where(text: str, place: int, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as raised:
        read(text, TextRules("ssml"))
    assert raised.value.param == "input"
    assert f"at character {place}:" in str(raised.value)


def test_what_ssml_has_no_effect_is_told() -> None:
    text = '<?xml version="1.0"?><speak><emphasis>a</emphasis> <prosody pitch="low" rate="slow">b</prosody>'
    spoken = read(text + '<say-as interpret-as="date">5</say-as></speak>', TextRules("ssml"))
    for limit in ('<prosody rate="25%">a</prosody>', '<prosody rate="4">a</prosody>', '<break time="10s"/>a'):
        assert not read(limit, TextRules("ssml")).left_out
    assert set(spoken.left_out) == {"comment", "tag emphasis", "prosody pitch", "say-as date"}
    assert spoken.text == "a b 5."


@settings(max_examples=200, deadline=None)
@given(text=any_text)
def test_no_ssml_is_more_than_a_client_error(text: str) -> None:
    try:
        read(text, TextRules("ssml", 0.5, WORDS))
    except InvalidRequest as error:
        assert error.param == "input"  # noqa: PT017


def test_nothing_waits_for_more_than_the_next_word() -> None:
    reader, words = TextReader(TextRules("auto", 0.5)), "Hello there all you people. And now"
    pieces = [piece for word in words.split() for piece in reader.feed(f"{word} ", is_last=False)]
    assert "".join(piece.spoken for piece in pieces).startswith(words[:-1])
