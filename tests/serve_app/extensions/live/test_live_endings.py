"""Planted endings of texts that are still written: what was not sent yet is made again, else the end says so."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import pytest

from deployments.listener import Listener
from deployments.protocol import FinishReason, PcmChunk, SynthesisRequest
from serve_app.extensions.live.live_text import LiveText, LiveTexts
from serve_app.extensions.text.spoken_text import TextRules
from serve_app.speech.segments import Utterance
from tests.serve_app.extensions.live.test_live_text import speak
from tests.serve_app.fake import CUSTOM_VOICE, FakeSynthesizer, chunk, pcm_of

pytestmark = pytest.mark.anyio
REQUEST = Utterance(SynthesisRequest("id", "", voice="ryan", seed=7), may_redraw=True)
BAD = [FinishReason.EARLY, FinishReason.RUNAWAY, FinishReason.LOOP]
STOP = FinishReason.STOP


def sound(value: int, *, seconds: float = 2.0) -> PcmChunk:
    return chunk(bytes([value]) * (2 * int(seconds * CUSTOM_VOICE.sample_rate)))


def end(reason: FinishReason) -> PcmChunk:
    return chunk(b"", frames=0, finish_reason=reason)


async def opened(texts: LiveTexts, request: Utterance = REQUEST) -> LiveText:
    """Two paragraphs, of which the second may go on."""
    live = await texts.open(request, CUSTOM_VOICE, max_chars=1000, rules=TextRules("auto", paragraph_pause_s=0.1))
    live.append("One two three.\n\nFour five six ")
    return live


async def speaking(live: LiveText, synthesizer: FakeSynthesizer) -> AsyncGenerator[PcmChunk, None]:
    """As a listener hears it who takes each chunk at once."""
    listener = Listener()
    async with aclosing(speak(live, synthesizer, CUSTOM_VOICE, listener)) as chunks:
        async for item in chunks:
            listener.deliver(item.num_samples / CUSTOM_VOICE.sample_rate, now_s=time.monotonic())
            yield item


async def heard(live: LiveText, synthesizer: FakeSynthesizer) -> list[PcmChunk]:
    async with aclosing(speaking(live, synthesizer)) as chunks:
        return [item async for item in chunks if item.pcm.strip(b"\0") or item.finish_reason]


@pytest.mark.parametrize(("may_redraw", "second"), [(True, 3), (False, 2)])
@pytest.mark.parametrize("reason", BAD)
async def test_it_is_redrawn_and_says_so(texts: LiveTexts, reason: FinishReason, may_redraw: bool, second: int) -> None:
    synthesizer = FakeSynthesizer(scripts=[[sound(1), end(STOP)], [sound(2), end(reason)], [sound(3), end(reason)]])
    with await opened(texts, replace(REQUEST, may_redraw=may_redraw)) as live:
        live.finish()
        chunks = await heard(live, synthesizer)
    assert (pcm_of(chunks), chunks[-1].finish_reason) == (pcm_of([sound(1), sound(second)]), reason)


@pytest.mark.parametrize("reason", BAD)
async def test_what_the_listener_needs_is_sent_and_the_end_says_so(texts: LiveTexts, reason: FinishReason) -> None:
    may_end = asyncio.Event()
    synthesizer = FakeSynthesizer(scripts=[[sound(1, seconds=0.5), end(STOP)], [sound(2), may_end, end(reason)]])
    with await opened(texts) as live:
        live.finish()
        async with aclosing(speaking(live, synthesizer)) as chunks:
            async for item in chunks:
                if item.pcm == sound(2).pcm:
                    may_end.set()
    assert item.finish_reason is reason
    assert len(synthesizer.requests) == 2


@pytest.mark.parametrize("reason", [STOP, *BAD])
async def test_what_is_written_after_an_unsent_end_is_spoken_once(texts: LiveTexts, reason: FinishReason) -> None:
    """The second segment ends while its text is still written, and nothing of it has been sent by then."""
    ways = [[sound(2), end(reason)]] + [[sound(3), end(STOP)]] * (not reason.is_good) + [[sound(4), end(STOP)]]
    synthesizer = FakeSynthesizer(scripts=[[sound(1), end(STOP)], *ways], hasty=[1])
    with await opened(texts) as live:
        async with aclosing(speaking(live, synthesizer)) as chunks:
            pcm = b""
            while not pcm.endswith((sound(2).pcm, sound(3).pcm)):
                pcm += (await anext(chunks)).pcm
            live.append("seven eight nine.")
            live.finish()
            rest = [item async for item in chunks]
    assert rest[-1].finish_reason is STOP
    assert sound(4).pcm in pcm_of(rest)
    assert len(synthesizer.texts) == (3 if reason.is_good else 4)
    assert synthesizer.texts[-1].endswith("seven eight nine.")
    if not reason.is_good:
        assert "".join(synthesizer.texts[2:]) == "Four five six seven eight nine."
