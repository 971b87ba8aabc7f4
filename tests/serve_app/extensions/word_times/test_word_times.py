import asyncio
from dataclasses import replace

import numpy as np
import pytest

from deployments.embedded_voice.english import spoken_english
from deployments.listener import Listener
from deployments.protocol import FinishReason, ModelInfo, PcmChunk, Reading, SynthesisRequest
from serve_app.extensions.live.live_text import LiveTexts
from serve_app.extensions.text.spoken_text import TextRules, read
from serve_app.extensions.word_times.word_times import Spoken, WordTimes
from serve_app.speech.observers import Word
from serve_app.speech.segments import Utterance
from serve_app.speech.utterance_synthesizer import UtteranceSynthesizer
from serve_app.text.spoken import SpokenText
from tests.serve_app.fake import FOLLOWED, FakeSynthesizer, tone

pytestmark = pytest.mark.anyio
ENGLISH = replace(FOLLOWED, spoken_form="english")
ESTIMATED = replace(FOLLOWED, word_times=False)
FRAME_S, SIZE = 0.08, 1920
CODES = np.zeros((1, 16), np.int16)
TEXT = "Hello there, all of you!"


def source(text: str, info: ModelInfo, **rules: object) -> SpokenText:
    return read(text, TextRules(spoken_form=info.spoken_form, **rules))  # type: ignore[arg-type]


def frame(number: int, chars: float, *, reason: FinishReason | None = None, dropped: int = 0) -> PcmChunk:
    """A frame that has come `chars` characters far; `dropped` samples at the start of the stream were quiet."""
    pcm = tone(SIZE)[2 * max(0, dropped - number * SIZE) :]
    return PcmChunk(pcm, CODES, 5, reason, (number + 1) * SIZE, readings=(Reading(number, (chars,)),))


def heard(at: list[tuple[float, float]], pcm: bytes = b"", reason: FinishReason | None = None) -> PcmChunk:
    return PcmChunk(pcm, CODES, 5, reason, text_positions=tuple(at))


def words(times: WordTimes, chunks: list[PcmChunk]) -> list[Word]:
    return [word for chunk in chunks for word in told(times, chunk)]


def told(times: WordTimes, chunk: PcmChunk) -> list[Word]:
    times.feed(chunk)
    return times.take()


def test_a_word_begins_where_it_is_reached_and_ends_where_the_next_one_does() -> None:
    times = WordTimes(source(TEXT, FOLLOWED), FOLLOWED)
    chunks = [heard([(0.04 + 0.1 * number, 3.0 * number)]) for number in range(8)]
    got = words(times, [*chunks, heard([(0.9, 24.0)], tone(24000), FinishReason.STOP)])
    assert [word.text for word in got] == ["Hello", "there,", "all", "of", "you!"]
    assert [TEXT[word.start : word.end] for word in got] == [word.text for word in got]
    assert [word.start_s for word in got] == pytest.approx([0, 0.24, 0.04 + 13 / 30, 0.04 + 17 / 30, 0.04 + 20 / 30])
    assert [word.end_s for word in got] == pytest.approx([word.start_s for word in got[1:]] + [1.0])


def test_words_are_told_once_each_and_as_soon_as_the_next_one_begins() -> None:
    times = WordTimes(source(TEXT, FOLLOWED), FOLLOWED)
    steps = [heard([(0.1, 2.0)]), heard([(0.2, 7.0), (0.3, 14.0)]), heard([(0.4, 14.0)]), heard([(0.5, 21.0)])]
    known = [[word.text for word in told(times, step)] for step in steps]
    assert known == [[], ["Hello", "there,"], [], ["all", "of"]]
    assert [word.text for word in told(times, heard([], tone(100), FinishReason.STOP))] == ["you!"]


def test_frames_that_come_again_change_nothing() -> None:
    times, again = (WordTimes(source(TEXT, FOLLOWED), FOLLOWED) for _ in range(2))
    chunks = [heard([(0.1 * number, 3.0 * number)]) for number in range(1, 9)]
    repeated = [chunk for number in range(len(chunks)) for chunk in (chunks[number], chunks[max(0, number - 2)])]
    assert words(times, chunks) == words(again, repeated)


@pytest.mark.parametrize(
    ("played_s", "spoken"),
    [
        (0.0, ("", TEXT, None)), (0.1, ("", TEXT, None)), (0.2, ("Hello", " there, all of you!", "Hello")),
        (0.55, ("Hello there,", " all of you!", "there,")), (0.95, ("Hello there, all of", " you!", "of")),
        (9.0, (TEXT, "", "you!")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("speed", [1.0, 1.5])
def test_the_truth_of_an_interruption(played_s: float, spoken: tuple[str, str, str | None], speed: float) -> None:
    times = WordTimes(source(TEXT, FOLLOWED), FOLLOWED, speed=speed)
    words(times, [heard([(0.1 * number, 2.0 * number) for number in range(1, 13)], tone(28800), FinishReason.STOP)])
    assert times.spoken(played_s / speed) == Spoken(*spoken)


@pytest.mark.parametrize(
    ("text", "begins"),
    [
        ("It costs $1,234 at most, they say.", "It costs one at most they say"),
        ("It is 100 km away, they say.", "It is one hundred away they say"),
    ],
)
def test_figures_are_one_word_as_it_was_written(text: str, begins: str) -> None:
    times, spoken = WordTimes(source(text, ENGLISH), ENGLISH), source(text, ENGLISH).text
    chunks = [heard([(0.01 * number, number)]) for number in range(1, len(spoken) + 1)]
    got = words(times, [*chunks, heard([], tone(24000), FinishReason.STOP)])
    assert [word.text for word in got] == text.split()
    assert [word.start_s for word in got] == pytest.approx([0.01 * spoken.index(word) for word in begins.split()])


@pytest.mark.parametrize("info", [FOLLOWED, ESTIMATED])
def test_nothing_is_told_where_nothing_is_known(info: ModelInfo) -> None:
    times = WordTimes(source(TEXT, info), info)
    assert words(times, [heard([], tone(SIZE)), heard([], b"", FinishReason.STOP)]) == []
    assert not times.are_known
    assert times.spoken(1.0) == Spoken("", TEXT, None, is_estimate=info is ESTIMATED)


FRAMES = [(0.04 + 0.08 * number, 2.0 * number) for number in range(5)]  # to within "there,"


@pytest.mark.parametrize("again", [0, 3])
def test_estimated_words_that_no_reading_came_to_share_the_rest_of_the_audio(again: int) -> None:
    """Also where the last readings bring nothing new."""
    times = WordTimes(source(TEXT, ESTIMATED), ESTIMATED)
    more = [(0.44 + 0.08 * number, 8.0) for number in range(again)]
    got = words(times, [heard(FRAMES + more), heard([], tone(24000), FinishReason.STOP)])
    assert [word.text for word in got] == TEXT.split()
    assert all(word.is_estimate for word in got)
    begins = [word.start_s for word in got]
    assert begins[:2] == pytest.approx([0, 0.28])
    assert begins[2:] == pytest.approx([0.28 + (TEXT.index(word) - 6) / 18 * 0.72 for word in ("all", "of", "you!")])
    assert [word.end_s for word in got] == pytest.approx([*begins[1:], 1.0])
    assert times.spoken(1.0) == Spoken(TEXT, "", "you!", is_estimate=True)


def test_what_was_told_stays_when_the_rest_is_spread() -> None:
    times = WordTimes(source(TEXT, ESTIMATED), ESTIMATED)
    early = told(times, heard(FRAMES, tone(12000)))
    assert early[0].text == "Hello"
    rest = told(times, heard([], tone(12000), FinishReason.STOP))
    assert (rest[0].text, rest[0].start_s) == ("there,", early[0].end_s)


@pytest.mark.parametrize(
    ("info", "reason"), [*((ESTIMATED, each) for each in FinishReason if each != "stop"), (FOLLOWED, FinishReason.STOP)]
)
def test_words_that_no_audio_came_to_are_not_told(info: ModelInfo, reason: FinishReason) -> None:
    times = WordTimes(source(TEXT, info), info)
    got = words(times, [heard(FRAMES), heard([], tone(24000), reason)])
    assert [(word.text, word.is_estimate) for word in got] == [
        (text, info is ESTIMATED) for text in ("Hello", "there,")
    ]


@pytest.mark.parametrize(("reason", "is_told"), [(FinishReason.STOP, True), (FinishReason.EARLY, False)])
def test_a_known_head_may_miss_the_last_words_of_a_good_end(reason: FinishReason, *, is_told: bool) -> None:
    """As the embedded voice's at "for you.", which it read up to 0.005 characters before "you"."""
    text = "Two messages for you."
    times = WordTimes(source(text, FOLLOWED), FOLLOWED)
    read_to = [(0.12, 0.0), (0.28, 4.0), (0.6, 13.0), (0.92, 16.995), (1.0, 16.995)]
    got = words(times, [heard(read_to, tone(30000)), heard([], b"", reason)])
    assert [word.text for word in got] == text.split()[: 4 if is_told else 3]
    assert not any(word.is_estimate for word in got)
    assert got[-1].end_s == pytest.approx(1.25)
    assert times.spoken(1.25) == Spoken(text, "", "you.") if is_told else times.spoken(1.25).last_word == "for"


async def test_times_are_those_of_the_audio_that_is_delivered() -> None:
    """Quiet frames that were dropped at a segment's start do not count, and segments follow each other."""
    script = [frame(number, 2.0 * number, dropped=3000) for number in range(6)]
    script.append(replace(frame(6, 12.0), finish_reason=FinishReason.STOP))
    request = Utterance(SynthesisRequest("r", "Hello there. And goodbye now.", word_times=True))
    info = replace(FOLLOWED, max_segment_chars=17)
    synthesizer = UtteranceSynthesizer(FakeSynthesizer(script=script))
    chunks = [chunk async for chunk in synthesizer.speak_utterance(request, info, Listener())]
    delivered_s = (7 * SIZE - 3000) / 24000
    first = [(max(0.0, (number + 0.5) * FRAME_S - 0.125), 2.0 * number) for number in range(7)]
    second = [(seconds + delivered_s, 13 + chars) for seconds, chars in first]
    second[:2] = [((number + 0.5) * FRAME_S - 0.125 + delivered_s, 13 + 2.0 * number) for number in range(2)]
    got = [place for chunk in chunks for place in chunk.text_positions]
    assert np.allclose(got, first + second)
    assert sum(len(chunk.pcm) for chunk in chunks) == 2 * 2 * (7 * SIZE - 3000)


async def test_words_of_a_text_that_is_being_written(texts: LiveTexts) -> None:
    with await texts.open(Utterance(SynthesisRequest("r", "")), ENGLISH, max_chars=1000) as live:
        times = WordTimes(live, ENGLISH)
        for part in ("Hel", "lo the", "re a", "ll of y"):
            live.append(part)
        assert [word.text for word in told(times, heard([(0.5, 8.0)]))] == ["Hello"]
        live.append("ou!")
        live.finish()
        await asyncio.sleep(0)
        got = words(times, [heard([(1.0, 24.0)]), heard([], tone(24000), FinishReason.STOP)])
        assert [word.text for word in got] == ["there", "all", "of", "you!"]
        assert times.spoken(0.45) == Spoken("Hello", " there all of you!", "Hello")


async def test_cut_words_of_other_texts_are_whole_words(texts: LiveTexts) -> None:
    with await texts.open(Utterance(SynthesisRequest("r", "")), FOLLOWED, max_chars=1000) as live:
        times = WordTimes(live, FOLLOWED)
        for char in TEXT:
            live.append(char)
        live.finish()
        got = words(times, [heard([(2.4, 24.0)], tone(57600), FinishReason.STOP)])
    assert [(word.text, round(word.start_s, 3)) for word in got] == [
        ("Hello", 0), ("there,", 0.6), ("all", 1.3), ("of", 1.7), ("you!", 2.0)
    ]  # fmt: skip


def test_a_long_text_is_looked_at_as_far_as_it_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    turned: list[str] = []
    monkeypatch.setattr(
        "deployments.embedded_voice.live_english.spoken_english",
        lambda text: turned.append(text) or spoken_english(text),
    )
    text = "Hello there, all of you! " * 2000
    times = WordTimes(source(text, ENGLISH), ENGLISH)
    assert not turned
    assert [word.text for word in words(times, [heard([(0.0, 0.0), (1.0, 30.0)])])] == TEXT.split()
    assert sum(map(len, turned)) < 1000
