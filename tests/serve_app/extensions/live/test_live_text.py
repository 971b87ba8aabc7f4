import asyncio
import random
import time
import unicodedata
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import pytest

from deployments.embedded_voice.english import spoken_english
from deployments.embedded_voice.live_english import LONGEST_UNCUT
from deployments.errors import InvalidRequest, TalkerLost
from deployments.listener import Listener
from deployments.protocol import FinishReason, ModelInfo, PcmChunk, SynthesisRequest
from deployments.serving import mailbox
from deployments.serving.mailbox import read
from serve_app.config import ApiSettings
from serve_app.extension import Node, OpenContext
from serve_app.extensions.live.extension import EXTENSION
from serve_app.extensions.live.live_split import LiveSplit
from serve_app.extensions.live.live_text import _IDLE_S, LiveText, LiveTexts
from serve_app.extensions.live.mailbox_server import WrittenText
from serve_app.extensions.text.spoken_text import CHARS_AT_ONCE, LivePlain, TextRules
from serve_app.extensions.text.style_tags import StyleRules
from serve_app.speech.segments import Utterance
from serve_app.speech.speech_models import SpeechModels
from serve_app.speech.utterance_synthesizer import UtteranceSynthesizer
from serve_app.text.characters import clean
from tests.serve_app.fake import CUSTOM_VOICE, FakeSynthesizer, chunk, pcm_of, tone, utterance

pytestmark = pytest.mark.anyio
ENGLISH = replace(CUSTOM_VOICE, spoken_form="english", max_segment_chars=300)
REQUEST = Utterance(SynthesisRequest("r", "", voice="ryan", seed=1))
LONG = 100_000
TEXT = (
    "# Hello there\n\nIt's 3:45 p.m. on May 5th, and Dr. Smith (who lives on St. Paul Ave.) owes $1,234.56 to NASA. "
    "See [this long page here](https://example.com/a b) or mail a@b.co:\n- buy some milk\n- don't  forget 🙂 eggs\n\n"
    "All of it was e\u0301crit 50% by hand... Wasn't it? The end comes soon"
)


async def spoken(live: LiveText) -> list[str]:
    """What talkers read, segment by segment."""
    segments = []
    while (request := await live.segment(len(segments))) is not None:
        assert request.mailbox is not None
        async with aclosing(read(request.mailbox)) as parts:
            segments.append("".join([part async for part in parts]))
    return segments


def cuts(text: str, seed: int) -> list[str]:
    draw = random.Random(seed)
    places = sorted(draw.randrange(len(text)) for _ in range(draw.randrange(40)))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


async def write(texts: LiveTexts, parts: list[str], info: object = ENGLISH) -> list[str]:
    with await texts.open(REQUEST, info, max_chars=LONG) as live:  # type: ignore[arg-type]
        reading = asyncio.create_task(spoken(live))
        for part in parts:
            live.append(part)
            await asyncio.sleep(0)
        live.finish()
        return await reading


@pytest.mark.parametrize("seed", range(20))
async def test_english_is_spoken_as_if_it_had_come_at_once(texts: LiveTexts, seed: int) -> None:
    text = TEXT[: random.Random(seed).randrange(len(TEXT))]
    [got] = await write(texts, cuts(text, seed), replace(ENGLISH, max_segment_chars=LONG)) or [""]
    assert got == spoken_english(text)


@pytest.mark.parametrize("seed", range(20))
async def test_other_text_is_clean_as_if_it_had_come_at_once(texts: LiveTexts, seed: int) -> None:
    text = f" \u200b{TEXT} 한국어 \u1112\u1161\u11ab a\u200d\u0301 漢字。 👩\u200d👧 \n"
    [got] = await write(texts, cuts(text, seed), replace(CUSTOM_VOICE, max_segment_chars=LONG))
    assert got == clean(text)


def test_marks_without_an_end_are_not_looked_at_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []
    category = unicodedata.category
    monkeypatch.setattr("unicodedata.category", lambda char: looks.append(char) or category(char))
    plain = LivePlain()
    for _ in range(1000):
        assert plain.feed("\u0301", is_last=False) == []
    assert len(looks) <= 64 * 1000


@pytest.mark.parametrize("seed", range(10))
async def test_segments_do_not_depend_on_the_cuts(texts: LiveTexts, seed: int) -> None:
    for info, text in ((ENGLISH, TEXT * 3), (CUSTOM_VOICE, TEXT * 9), (CUSTOM_VOICE, "漢字仮名、" * 300)):
        whole = await write(texts, [text], info)
        assert await write(texts, cuts(text, seed), info) == whole
        assert len(whole) > 2
        assert max(map(len, whole)) <= info.max_segment_chars


def test_a_word_of_a_segment_waits_for_its_end_only() -> None:
    split, given = LiveSplit(100), 0
    for number in range(18):
        given += sum(map(len, split.feed("word ")))
        assert given >= 5 * number


async def test_segments_end_with_sentences(texts: LiveTexts) -> None:
    text = "A sentence of some forty letters or so, it is. " * 30
    segments = await write(texts, [text])
    assert {len(segment) for segment in segments[:-1]} == {187}  # the fourth, which ends in the second half
    assert " ".join(segments) == text.strip()


FLOODS = ["hello there my friend ", "<", "[", "<aaaa ", "- item one\n", "1", "HELLO ", "\u0301\u0323", "漢字", "] ("]
ENDLESS = {"a list's line": "- ", "a bracket": "[ "}


def flooded(unit: str, length: int) -> str:
    text = ENDLESS[unit] + "word to say " * length if unit in ENDLESS else unit * length
    return text[:length]


@pytest.mark.parametrize("unit", [*FLOODS, *ENDLESS])
@pytest.mark.parametrize("info", [ENGLISH, CUSTOM_VOICE], ids=["english", "any"])
async def test_a_long_text_is_taken_in_bounded_parts(
    texts: LiveTexts, unit: str, info: ModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    worked = 0
    width, english = unicodedata.east_asian_width, spoken_english

    def measured(char: str) -> str:
        nonlocal worked
        worked += 1
        return width(char)

    def turned(text: str) -> str:
        nonlocal worked
        worked += len(text)
        return english(text)

    monkeypatch.setattr("unicodedata.east_asian_width", measured)
    monkeypatch.setattr("deployments.embedded_voice.live_english.spoken_english", turned)
    text, turns = flooded(unit, 16_000), []
    with await texts.open(REQUEST, info, max_chars=LONG) as live:
        live.append(text)
        live.finish()
        while True:
            turns.append(worked)
            worked = 0
            if live.is_text_complete:
                break
            await asyncio.sleep(0)
    assert max(turns) <= 4 * (CHARS_AT_ONCE + LONGEST_UNCUT)  # also of spoken text that is longer than what was written
    assert sum(turns) <= 5 * len(text)


@pytest.mark.parametrize("unit", [*FLOODS, *ENDLESS])
@pytest.mark.parametrize("info", [ENGLISH, CUSTOM_VOICE], ids=["english", "any"])
async def test_the_time_of_a_text_is_in_proportion_to_its_length(texts: LiveTexts, unit: str, info: ModelInfo) -> None:
    async def seconds(length: int) -> float:
        with await texts.open(REQUEST, info, max_chars=LONG) as live:
            begun_s = time.thread_time()
            live.append(flooded(unit, length))
            live.finish()
            assert await live.segment(length) is None  # the end of it
            return time.thread_time() - begun_s

    short_s = min([await seconds(2_500) for _ in range(3)])
    long_s = min([await seconds(10_000) for _ in range(2)])
    assert long_s < 9 * short_s + 0.05  # four times; of quadratic work it would be sixteen times


async def test_what_waits_is_spoken_behind_the_end_and_forgotten_when_it_is_closed(texts: LiveTexts) -> None:
    text = "hello there my friend " * 100
    assert "".join(await write(texts, [text], CUSTOM_VOICE)) == clean(text)
    with await texts.open(REQUEST, ENGLISH, max_chars=LONG) as live:
        live.append(text)
        live.finish()
        assert live.is_complete
        assert not live.is_text_complete
    num_parts = len(live.parts)
    await asyncio.sleep(0)
    assert len(live.parts) == num_parts < 100


@pytest.mark.parametrize(
    ("info", "parts"),
    [(ENGLISH, [" W", "h", "e"]), (ENGLISH, ["5 ", "h", "t", "tp ", "is ", "up"]), (CUSTOM_VOICE, ["..", "W"])],
)
async def test_it_has_begun_when_a_word_is_certain_to_come(texts: LiveTexts, info: ModelInfo, parts: list[str]) -> None:
    with await texts.open(REQUEST, info, max_chars=LONG) as live:
        begun = asyncio.create_task(live.wait_for_words())
        for part in parts:
            await asyncio.sleep(0)
            assert not begun.done()
            live.append(part)
        async with asyncio.timeout(_IDLE_S / 2):  # a text to which nothing is added for longer is finished
            assert await begun


@pytest.mark.parametrize("text", ["", "  \n", "...", "🙂"])
async def test_nothing_to_say_never_begins(texts: LiveTexts, text: str) -> None:
    with await texts.open(REQUEST, ENGLISH, max_chars=LONG) as live:
        live.append(text)
        live.finish()
        assert not await live.wait_for_words()


async def test_talkers_read_at_the_address_of_this_node() -> None:
    node = Node(lambda _: True, lambda: True, bytes, address="127.0.0.2")
    assert EXTENSION.open is not None
    texts = EXTENSION.open(OpenContext(ApiSettings(), SpeechModels({}), (), {}, node))
    await texts.server.start()
    assert texts.server.share("token", WrittenText()).host == "127.0.0.2"
    await texts.aclose()


async def test_text_that_is_too_long_is_refused_and_the_rest_spoken(texts: LiveTexts) -> None:
    with await texts.open(REQUEST, ENGLISH, max_chars=12) as live:
        live.append("Hello there")
        with pytest.raises(InvalidRequest) as raised:
            live.append(", you")
        assert (raised.value.param, raised.value.code) == ("text", "string_above_max_length")
        live.append("!")
        live.finish()
        live.finish()
        assert await spoken(live) == ["Hello there!"]


async def test_a_writer_that_falls_silent_has_finished(texts: LiveTexts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time begins anew with each part."""
    monkeypatch.setattr("serve_app.extensions.live.live_text._IDLE_S", 0.05)
    timers, later = list[asyncio.TimerHandle](), (loop := asyncio.get_running_loop()).call_later
    monkeypatch.setattr(loop, "call_later", lambda *call: timers.append(later(*call)) or timers[-1])
    with await texts.open(REQUEST, ENGLISH, max_chars=LONG) as live:
        for part in ("Hello ", "there"):
            live.append(part)
        assert [timer.cancelled() for timer in timers] == [True, True, False]
        assert await spoken(live) == ["Hello there."]
        assert live.is_text_complete
    assert timers[2].cancelled(), "or it keeps the text in memory"


async def test_a_closed_text_is_read_no_more(texts: LiveTexts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "_DELAYS_S", ())
    rules = TextRules("auto", paragraph_pause_s=0.1)
    with await texts.open(REQUEST, ENGLISH, max_chars=LONG, rules=rules) as live:
        live.append("Hello there.\n\nAnd more.")
        live.finish()
        assert await spoken(live) == ["Hello there.", "And more."]
        requests = [live.known_segment(number) for number in range(2)]
    for request in requests:
        assert request is not None
        assert request.mailbox is not None
        with pytest.raises(TalkerLost):
            await anext(mailbox.read(request.mailbox))


def speak(
    live: LiveText, synthesizer: FakeSynthesizer, info: ModelInfo = ENGLISH, listener: Listener | None = None
) -> AsyncGenerator[PcmChunk, None]:
    """As its session has it spoken."""
    speech, may_redraw = UtteranceSynthesizer(synthesizer), live.utterance.may_redraw
    return speech.speak_segments(live.utterance.synthesis, live, info, listener or Listener(), may_redraw=may_redraw)


async def test_segments_are_one_utterance(texts: LiveTexts) -> None:
    synthesizer = FakeSynthesizer(script=utterance(2))
    with await texts.open(REQUEST, ENGLISH, max_chars=LONG) as live:
        live.append("A sentence of some forty letters or so, it is. " * 6)
        heard = [item async for item in speak(live, synthesizer) if live.finish() is None]
    assert [item.finish_reason for item in heard[:-1]] == [None] * (len(heard) - 1)
    assert heard[-1].finish_reason is FinishReason.STOP
    assert [request.request_id for request in synthesizer.requests] == ["r", "r.2"]
    assert [request.continues for request in synthesizer.requests] == [False, True]
    assert pcm_of(heard) == pcm_of(utterance(2)) * 2


async def test_speech_that_ends_before_its_text_goes_on_in_another_segment(texts: LiveTexts) -> None:
    synthesizer = FakeSynthesizer(script=[chunk(tone(1920), finish_reason=FinishReason.STOP)], hasty=range(9))
    with await texts.open(REQUEST, ENGLISH, max_chars=LONG) as live:
        live.append("Hello there all you ")
        heard = speak(live, synthesizer)
        assert (await anext(heard)).finish_reason is None
        going_on = asyncio.create_task(anext(heard))  # type: ignore[arg-type]
        for _ in range(50):
            await asyncio.sleep(0)
        live.append("people of the world")
        live.finish()
        assert (await going_on).finish_reason is FinishReason.STOP
        assert [item async for item in heard] == []
        assert await spoken(live) == ["Hello there all ", "you people of the world."]


@pytest.mark.parametrize("seed", range(5))
async def test_markup_is_left_out_and_its_pauses_are_heard(texts: LiveTexts, seed: int) -> None:
    text = '<speak><break time="1s"/>**Hello** there <break time="200ms"/><break time="300ms"/>dear [you](http://x.y)!'
    text += '<break time="2s"/></p>'
    synthesizer = FakeSynthesizer(script=utterance(2))
    with await texts.open(REQUEST, ENGLISH, max_chars=LONG, rules=TextRules("auto", spoken_form="english")) as live:
        for part in cuts(text, seed):
            live.append(part)
        live.finish()
        heard = [item async for item in speak(live, synthesizer)]
        assert live.text == text
        assert await spoken(live) == ["Hello there.", "dear you!"]
    speech = pcm_of(utterance(2))
    pauses = [bytes(2 * int(24000 * seconds)) for seconds in (1, 0.5, 2)]
    assert pcm_of(heard) == pauses[0] + speech + pauses[1] + speech + pauses[2]
    assert [item.finish_reason for item in heard][-2:] == [None, FinishReason.STOP]


async def test_a_segment_waits_for_its_style(texts: LiveTexts) -> None:
    is_there = asyncio.Event()

    async def restyle(style: str) -> dict[str, str]:
        await is_there.wait()
        if style == "lost":
            raise InvalidRequest("The recording is disabled.", "voice")
        return {"instructions": style}

    rules = TextRules("auto", styles=StyleRules("all"))
    with await texts.open(REQUEST, CUSTOM_VOICE, max_chars=LONG, rules=rules, restyle=restyle) as live:
        live.append("[sad] One. ")
        has_words = asyncio.ensure_future(live.wait_for_words())
        await asyncio.sleep(0)
        assert live.known_segment(0) is None
        is_there.set()
        assert await has_words
        assert live.utterance.synthesis.instructions == "sad"
        live.append('<emotion value="lost"/>Two.')
        live.finish()
        with pytest.raises(InvalidRequest, match="disabled"):
            await live.segment(1)
