"""What is kept of the end of speech, and which request goes on from it."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest

from deployments.listener import Listener
from deployments.protocol import FinishReason, PcmChunk, Reference, SynthesisRequest, Tail
from serve_app.extensions.continuity import tails as tails_module
from serve_app.extensions.continuity.dialogue import one_after_another
from serve_app.extensions.continuity.tails import TailStore
from serve_app.extensions.live.live_text import LiveTexts
from serve_app.extensions.text.spoken_text import TextRules
from serve_app.speech.segments import StreamTail, Utterance
from serve_app.speech.utterance_synthesizer import UtteranceSynthesizer
from serve_app.text.spoken import TextSpan
from tests.clock import Clock
from tests.serve_app.extensions.live.test_live_text import speak
from tests.serve_app.fake import CUSTOM_VOICE, FakeSynthesizer

pytestmark = pytest.mark.anyio

INFO = replace(CUSTOM_VOICE, max_segment_chars=40)
TEXT = "The boat drifted on the lake. The hen settled on the nest. Teamwork it takes."
REQUEST = SynthesisRequest("id", TEXT, client="me", voice="ryan", seed=7)
UTTERANCE = Utterance(REQUEST, joins=True)


def numbered(frames: int, *, start: int = 0, reason: FinishReason | None = None) -> PcmChunk:
    codes = np.repeat(np.arange(start, start + frames, dtype=np.int16)[:, None], 16, axis=1)
    return PcmChunk(b"12" * frames, codes, 5, reason)


END = numbered(0, reason=FinishReason.STOP)


def end_of(*chunks: PcmChunk) -> StreamTail:
    end = StreamTail()
    for chunk in chunks:
        end.add(chunk)
    return end


def test_a_tail_begins_with_a_word_within_two_seconds_and_ends_with_the_speech() -> None:
    text = "The boat drifted on the lake."
    end = end_of(numbered(40), numbered(18, start=40, reason=FinishReason.STOP))  # two frames a character
    tail = end.tail(text)
    assert tail is not None
    assert tail.text == "on the lake. "
    assert tail.codes[:, 0].tolist() == list(range(34, 58))


@pytest.mark.parametrize("reason", [reason for reason in FinishReason if reason is not FinishReason.STOP])
def test_speech_that_did_not_end_by_itself_has_no_tail(reason: FinishReason) -> None:
    assert end_of(numbered(30, reason=reason)).tail("The boat drifted.") is None


@pytest.mark.parametrize(
    ("text", "frames", "expected"),
    [
        ("Yes.", 8, "Yes. "),  # all of a short text
        ("Yes.", 4, None),  # too short to tell a voice
        ("今天天气很好我们去公园", 44, "气很好我们去公园"[-6:]),  # no spaces, so any character begins a word
        ("Supercalifragilistic", 60, None),  # a word of more than two seconds
        ("a b " * 80, 20, None),  # 320 characters in 20 frames were not all spoken
        ("  ", 30, None),
    ],
)
def test_what_a_tail_can_be(text: str, frames: int, expected: str | None) -> None:
    tail = end_of(numbered(frames, reason=FinishReason.STOP)).tail(text)
    if expected is None and tail is not None:
        assert len(tail.text) <= 100
        assert len(tail.codes) <= 25
    else:
        assert (tail and tail.text) == expected


async def test_a_segment_that_is_made_again_keeps_its_tail_and_gives_the_next_one_its_own() -> None:
    reasons = (FinishReason.STOP, FinishReason.EARLY, FinishReason.STOP, FinishReason.STOP)
    two_s = bytes(4 * INFO.sample_rate)
    scripts = [
        [replace(numbered(30, start=100 * number), pcm=two_s), numbered(0, reason=reason)]
        for number, reason in enumerate(reasons, start=1)
    ]
    synthesizer = FakeSynthesizer(scripts=scripts)
    async with aclosing(
        UtteranceSynthesizer(synthesizer).speak_utterance(replace(UTTERANCE, may_redraw=True), INFO, Listener())
    ) as chunks:
        assert [item async for item in chunks][-1].finish_reason is FinishReason.STOP
    first, bad, again, last = synthesizer.requests
    assert (first.tail, bad.request_id, again.request_id) == (None, "id.2", "id.2")
    assert bad.tail is not None
    assert again.tail is bad.tail
    assert last.tail is not None
    assert last.tail.codes[-1, 0] == 329  # of the third call, which was sent


@pytest.mark.parametrize("changed", [{"instructions": "sad"}, {"reference": Reference(None, key=b"take")}])
async def test_a_style_is_joined_unless_it_has_another_recording(changed: dict[str, object]) -> None:
    synthesizer = FakeSynthesizer(script=[numbered(30), END], hasty=range(9))
    spans = (TextSpan("The boat drifted on the lake."), TextSpan("It sank.", style="sad"))
    styled = replace(UTTERANCE, spans=spans, styles={"sad": changed})
    async with aclosing(UtteranceSynthesizer(synthesizer).speak_utterance(styled, INFO, Listener())) as chunks:
        assert [item async for item in chunks]
    first, second = synthesizer.requests
    assert {name: getattr(second, name) for name in changed} == changed
    assert (first.instructions, second.tail is not None) == (None, "reference" not in changed)


@pytest.mark.parametrize(("rest", "is_joined"), [("Short. ", False), ("Now this is much longer. " * 5, True)])
async def test_a_live_segment_is_joined_where_its_text_is_long(texts: LiveTexts, rest: str, *, is_joined: bool) -> None:
    synthesizer = FakeSynthesizer(script=[numbered(30), END], hasty=range(9))
    info = replace(CUSTOM_VOICE, max_segment_chars=200)
    asked = UTTERANCE.changed(text="")
    rules = TextRules("auto", paragraph_pause_s=0.6)
    with await texts.open(asked, info, max_chars=1000, rules=rules) as live:
        live.append("The boat drifted on the lake.\n\n" + rest + "And so")
        async with aclosing(speak(live, synthesizer, info)) as chunks:
            while len(synthesizer.requests) < 2:
                await anext(chunks)
        first, second = synthesizer.requests[:2]
        assert first.tail is None
        assert (second.tail is not None) is is_joined
        if second.tail is not None:
            assert "The boat drifted on the lake.".endswith(second.tail.text.rstrip())


async def test_a_live_segment_that_ended_before_its_text_has_no_tail(texts: LiveTexts) -> None:
    synthesizer = FakeSynthesizer(script=[numbered(30), END], hasty=range(9))
    with await texts.open(UTTERANCE.changed(text=""), CUSTOM_VOICE, max_chars=1000) as live:
        live.append("The boat drifted on the lake and ")
        async with aclosing(speak(live, synthesizer, CUSTOM_VOICE)) as chunks:
            await anext(chunks)
            await anext(chunks)
            going_on = asyncio.ensure_future(anext(chunks))
            await asyncio.sleep(0)
            live.append("on and on, until the evening came and everybody went home again to rest. ")
            live.finish()
            await going_on
    assert [request.tail for request in synthesizer.requests] == [None, None]


@pytest.mark.parametrize(("reasons", "told"), [("stop stop", "stop"), ("loop stop", "loop"), ("loop length", "loop")])
async def test_a_dialogue_ends_as_its_first_part_that_ended_badly(reasons: str, told: str) -> None:
    async def speak(part: Utterance) -> AsyncGenerator[PcmChunk, None]:
        yield numbered(9)
        yield numbered(0, reason=FinishReason(reasons.split()[part.synthesis.seed]))

    parts = [UTTERANCE.changed(seed=number) for number in range(2)]
    heard = [(each.segment, each.num_text_tokens, each.finish_reason) async for each in one_after_another(parts, speak)]
    assert heard == [(0, 5, None), (0, 5, None), (1, 10, None), (1, 10, told)]


TAIL = Tail("the lake. ", np.zeros((18, 16), np.int16))


@pytest.mark.parametrize(
    ("changes", "previous", "is_found"),
    [
        ({"request_id": "b"}, "id", True),
        ({"request_id": "b", "client": "another"}, "id", False),
        ({"request_id": "b", "voice": "serena"}, "id", False),
        ({"request_id": "b", "model": "another"}, "id", False),
        ({"request_id": "b", "reference": Reference(np.zeros(9, np.float32))}, "id", False),
        ({"request_id": "b", "instructions": "Whisper."}, "id", True),
        ({}, "other", False),
    ],
)
def test_a_tail_is_for_the_same_client_and_voice(changes: dict[str, object], previous: str, *, is_found: bool) -> None:
    tails = TailStore(joins=False)
    tails.save(REQUEST, TAIL)
    assert tails.find(replace(REQUEST, **changes), previous) is (TAIL if is_found else None)  # type: ignore[arg-type]


def test_a_designed_voice_is_its_description() -> None:
    designed = replace(REQUEST, voice=None, instructions="A calm voice.")
    tails = TailStore(joins=False)
    tails.save(designed, TAIL)
    assert tails.find(designed, "id") is TAIL
    assert tails.find(replace(designed, instructions="A loud voice."), "id") is None


def test_tails_are_kept_for_some_minutes_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, tails = Clock(), TailStore(joins=False)
    monkeypatch.setattr(tails_module.time, "monotonic", clock)
    for number in range(20_000):
        tails.save(replace(REQUEST, request_id=str(number)), TAIL)
    kept = [number for number in range(20_000) if tails.find(REQUEST, str(number)) is not None]
    assert kept == list(range(20_000 - len(kept), 20_000))
    assert 1000 < len(kept) < 20_000
    tails.save(replace(REQUEST, request_id="19999"), replace(TAIL, text="new"))
    assert (found := tails.find(REQUEST, "19999")) is not None
    assert found.text == "new"
    clock.now_s += 601
    assert tails.find(REQUEST, "19999") is None
