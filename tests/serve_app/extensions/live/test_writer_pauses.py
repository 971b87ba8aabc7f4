import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import numpy as np
import pytest

from deployments.errors import Overloaded
from deployments.listener import Listener
from deployments.protocol import FinishReason, PcmChunk
from serve_app.config import AdmissionSettings
from serve_app.extensions.live.live_text import LiveTexts, without_clicks
from tests.clock import Clock
from tests.serve_app.fake import CUSTOM_VOICE, chunk, pcm_of, tone
from tests.serve_app.speech.test_speech_models import REQUEST, Line

pytestmark = pytest.mark.anyio
RATE, SIZE, FADE = 24000, 1920, 240


async def script(steps: Sequence[PcmChunk | asyncio.Event]) -> AsyncGenerator[PcmChunk, None]:
    for step in steps:
        if isinstance(step, asyncio.Event):
            await step.wait()
        else:
            yield step


def tones(start: int, stop: int) -> list[PcmChunk]:
    return [chunk(tone(SIZE, start=number * SIZE)) for number in range(start, stop)]


async def heard(steps: AsyncGenerator[PcmChunk, None], *, may_stall: bool) -> AsyncGenerator[PcmChunk, None]:
    """Without clicks, as a listener hears it who takes each chunk at once."""
    listener = Listener()
    async with aclosing(without_clicks(steps, RATE, listener, may_stall=lambda: may_stall)) as chunks:
        async for item in chunks:
            listener.deliver(item.num_samples / RATE, now_s=time.monotonic())
            yield item


async def test_what_is_not_interrupted_comes_sample_by_sample() -> None:
    steps = [*tones(0, 5), chunk(tone(SIZE, start=5 * SIZE), finish_reason=FinishReason.STOP)]
    chunks = [item async for item in heard(script(steps), may_stall=True)]
    assert pcm_of(chunks) == pcm_of(steps)
    assert [len(item.codes) for item in chunks] == [1] * 6
    assert len(chunks[0].pcm) == 2 * (SIZE - FADE)


async def test_a_pause_is_faded_into_and_out_of() -> None:
    more = asyncio.Event()
    steps = [*tones(0, 2), more, *tones(2, 4), chunk(b"", frames=0, finish_reason=FinishReason.STOP)]
    chunks = []
    async for item in heard(script(steps), may_stall=True):
        chunks.append(item)
        if not len(item.codes):
            more.set()
    whole = np.frombuffer(tone(4 * SIZE), "<i2").astype(float)
    got = np.frombuffer(pcm_of(chunks), "<i2").astype(float)
    gains = np.ones(4 * SIZE)
    gains[2 * SIZE - FADE : 2 * SIZE] = np.linspace(1, 0, FADE)
    gains[2 * SIZE : 2 * SIZE + FADE] = np.linspace(0, 1, FADE)
    assert np.abs(got - whole * gains).max() <= 1
    assert sum(len(item.codes) for item in chunks) == 4


async def test_what_comes_late_of_a_text_that_is_whole_is_left_alone() -> None:
    more = asyncio.Event()
    steps = [*tones(0, 1), more, *tones(1, 2)]
    asyncio.get_running_loop().call_later(0.2, more.set)
    assert pcm_of([item async for item in heard(script(steps), may_stall=False)]) == tone(2 * SIZE)


async def test_leaving_it_closes_what_is_behind() -> None:
    never = asyncio.Event()
    closed = asyncio.Event()

    async def endless() -> AsyncGenerator[PcmChunk, None]:
        try:
            yield chunk(tone(SIZE))
            await never.wait()
        finally:
            closed.set()

    async with aclosing(heard(endless(), may_stall=True)) as chunks:
        await anext(chunks)
        await anext(chunks)
    assert closed.is_set()


async def test_what_a_writer_takes_is_no_line(texts: LiveTexts, clock: Clock) -> None:
    line = Line(AdmissionSettings(max_line_s=3, max_wait_s=0.02))
    with await texts.open(REQUEST, CUSTOM_VOICE, max_chars=1000) as live:
        live.append("Well, ")
        speaking = asyncio.create_task(line.speak(request=live.utterance))
        await line.synthesizer.waiting.wait()
        await asyncio.sleep(0.05)
        assert not speaking.done()
        clock.now_s += 100
        await line.join()
        live.append("here is what the writer had in mind all along, ")
        for waiting in (speaking, *line.speaking):  # and from now on it does
            with pytest.raises(Overloaded):
                await waiting


async def test_a_short_text_that_is_over_has_been_written(texts: LiveTexts) -> None:
    line = Line(AdmissionSettings(max_line_s=3, max_wait_s=0.02))
    with await texts.open(REQUEST, CUSTOM_VOICE, max_chars=1000) as live:
        live.append("Well")
        live.finish()
        with pytest.raises(Overloaded):
            await line.speak(request=live.utterance)
