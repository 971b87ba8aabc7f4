"""Who is refused, with which answer, and that a refusal leaves nothing behind."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace

import numpy as np
import pytest

from deployments import listener
from deployments.errors import NotReady, Overloaded
from deployments.protocol import FinishReason, PcmChunk, Reference, SynthesisRequest
from serve_app.config import AdmissionSettings
from serve_app.speech.segments import Utterance
from serve_app.speech.speech_models import SpeechModel
from serve_app.text.spoken import TextSpan
from tests.clock import Clock
from tests.serve_app.fake import CUSTOM_VOICE, FakeSynthesizer, chunk, pcm_of, utterance

pytestmark = pytest.mark.anyio

REQUEST = Utterance(SynthesisRequest("id", "Hello."))
PROMPT = AdmissionSettings(max_streams=8, max_line_s=1000, max_wait_s=1000)
SHORT_LINE = AdmissionSettings(max_line_s=3, max_wait_s=1000)


class Line:
    """A model whose synthesizer has streams that wait until they are let go."""

    def __init__(self, settings: AdmissionSettings = PROMPT, *, talkers: int = 1) -> None:
        self.talkers = talkers
        self.gate = asyncio.Event()
        self.synthesizer = FakeSynthesizer(script=[chunk(b""), self.gate, *utterance(2)])
        self.model = SpeechModel(self.synthesizer, settings, is_running=lambda: self.talkers > 0)
        self.speaking: list[asyncio.Task[bytes]] = []

    async def join(self, client: str = "") -> None:
        self.synthesizer.waiting.clear()
        self.speaking.append(asyncio.create_task(self.speak(client)))
        await self.synthesizer.waiting.wait()

    async def speak(self, client: str = "", *, request: Utterance = REQUEST) -> bytes:
        asked = request.changed(client=client)
        return pcm_of([item async for item in self.model.speak(asked, CUSTOM_VOICE)])

    def hear(self) -> None:
        """Another stream: the pools live."""
        self.model.admission.count_audio()

    async def finish(self) -> None:
        self.gate.set()
        spoken = pcm_of(utterance(2))
        assert await asyncio.gather(*self.speaking) == [spoken] * len(self.speaking)


async def test_a_line_that_moves_too_slowly_takes_nobody(clock: Clock) -> None:
    line = Line(SHORT_LINE)
    await line.join()
    clock.now_s += 3
    await line.join()  # a first audio may take a second as long as none is known
    clock.now_s += 1.5
    line.hear()
    with pytest.raises(Overloaded, match="active streams: 0, waiting for first audio: 2"):
        await line.speak()
    await line.finish()
    assert await line.speak()


async def test_one_client_whose_texts_take_long_holds_nobody_else_up(clock: Clock) -> None:
    line = Line(SHORT_LINE)
    await line.join("mallory")
    clock.now_s += 100
    line.hear()
    with pytest.raises(Overloaded):
        await line.speak("mallory")
    await line.join("ada")
    await line.join("bob")
    clock.now_s += 4.5
    line.hear()
    with pytest.raises(Overloaded):  # now it is a line of many clients
        await line.speak("cleo")
    await line.finish()


async def test_what_a_first_audio_takes_anyway_is_no_line(clock: Clock) -> None:
    line = Line(SHORT_LINE)
    await line.join()
    clock.now_s += 20  # a slow machine, which nobody but this one uses
    await line.finish()
    line.gate.clear()
    await line.join()
    clock.now_s += 20
    await line.join()
    clock.now_s += 4
    line.hear()
    with pytest.raises(Overloaded):
        await line.speak()
    await line.finish()


async def test_retry_after_is_the_line_over_its_speed(clock: Clock) -> None:
    line = Line(SHORT_LINE)
    line.gate.set()
    for _ in range(10):  # two a second
        await line.speak()
        clock.now_s += 0.5
    line.gate.clear()
    for _ in range(5):
        await line.join()
    clock.now_s += 6
    line.hear()
    with pytest.raises(Overloaded) as refused:
        await line.speak()
    elapsed_s = 10 * 0.5 + 6
    assert refused.value.retry_after_s == pytest.approx((5 + 1) / (10 / elapsed_s))
    await line.finish()


class Slow(FakeSynthesizer):
    """Brings frame after frame of 80 ms, each after `pause_s`."""

    def __init__(self, clock: Clock, pause_s: float) -> None:
        super().__init__(script=utterance(100))
        self.clock, self.pause_s = clock, pause_s

    async def synthesize(self, request: SynthesisRequest, info: object = None) -> AsyncGenerator[PcmChunk, None]:
        async for item in super().synthesize(request):
            self.clock.now_s += self.pause_s
            yield item


async def hear(model: SpeechModel, opened: AsyncExitStack, *, streams: int, frames: int, clock: Clock) -> None:
    """So many streams side by side, whose listeners take a moment for each frame."""
    listened = [await opened.enter_async_context(aclosing(model.speak(REQUEST, CUSTOM_VOICE))) for _ in range(streams)]
    for _ in range(frames):
        for stream in listened:
            await anext(stream)
            clock.now_s += 0.01


async def test_while_listeners_hear_pauses_fewer_streams_are_let_in(clock: Clock) -> None:
    settings = AdmissionSettings(max_late_s=0.25, max_line_s=1000, max_wait_s=1000)
    synthesizer = Slow(clock, 0.2)
    model = SpeechModel(synthesizer, settings)
    async with AsyncExitStack() as opened:
        await hear(model, opened, streams=10, frames=40, clock=clock)
        with pytest.raises(Overloaded):
            model.admission.check("")
        with pytest.raises(Overloaded):
            await anext(model.speak(REQUEST, CUSTOM_VOICE))
        assert len(synthesizer.requests) == 10  # nobody behind the ingress heard of the last one
    model.admission.check("")


async def test_a_listener_who_is_slow_is_no_reason_to_refuse_others(clock: Clock) -> None:
    settings = AdmissionSettings(max_late_s=0.25, max_line_s=1000, max_wait_s=1000)
    model = SpeechModel(Slow(clock, 0.001), settings)
    async with AsyncExitStack() as opened:
        await hear(model, opened, streams=10, frames=40, clock=clock)  # 100 ms of them for each frame
        model.admission.check("")


async def test_a_recording_takes_its_time_and_is_no_line(clock: Clock) -> None:
    line = Line(SHORT_LINE)
    request = REQUEST.changed(reference=Reference(np.zeros(24000, np.float32), "Hello."))
    cloning = asyncio.create_task(anext(line.model.speak(request, CUSTOM_VOICE)))
    await line.synthesizer.waiting.wait()
    clock.now_s += 60
    await line.join()
    await line.finish()
    await cloning


async def test_what_has_become_late_is_refused_instead_of_served() -> None:
    line = Line(AdmissionSettings(max_wait_s=0.01))
    with pytest.raises(Overloaded):
        await line.speak()
    assert line.synthesizer.closed.is_set()


async def test_a_stream_that_has_begun_is_never_late() -> None:
    line = Line(AdmissionSettings(max_wait_s=0.01))
    pause = asyncio.Event()
    line.synthesizer.script = [chunk(b"11"), pause, *utterance(2)]
    async with aclosing(line.model.speak(REQUEST, CUSTOM_VOICE)) as chunks:
        assert (await anext(chunks)).pcm == b"11"
        asyncio.get_running_loop().call_later(0.05, pause.set)
        assert pcm_of([item async for item in chunks]) == pcm_of(utterance(2))


async def test_while_no_talker_runs_a_request_waits_longer_and_then_learns_that_it_is_not_ready() -> None:
    line, running = Line(AdmissionSettings(max_wait_s=0.0001, start_wait_s=0.02), talkers=0), asyncio.all_tasks()
    with pytest.raises(NotReady):
        await line.speak()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == running  # the one that logs the start has ended
    line = Line(AdmissionSettings(max_wait_s=0.0001, start_wait_s=1000), talkers=0)
    await line.join()
    await line.join()  # however long the first one waits for the start
    await line.finish()


async def test_a_line_without_a_talker_is_no_reason_to_refuse(clock: Clock) -> None:
    """Its only talker dies while one waits: that one's waiting time says nothing, then and when there is another."""
    line = Line()
    await line.join()
    line.talkers = 0
    clock.now_s += 7.0
    await line.join()
    line.talkers = 1
    await line.join()
    await line.finish()


async def test_a_line_behind_which_nothing_is_heard_may_be_a_death_that_is_not_known_yet(clock: Clock) -> None:
    line = Line(AdmissionSettings(max_line_s=0.25, max_wait_s=1000))
    await line.join()
    clock.now_s += 1.5  # a first audio may take a second as long as none is known
    await line.join()
    line.hear()  # a talker lives, so it has too much to do
    with pytest.raises(Overloaded):
        await line.speak()
    clock.now_s += 1.5
    await line.join()
    clock.now_s += 100  # on a busy machine it takes long to be known
    await line.join()
    await line.finish()


async def test_who_waited_for_the_successor_of_a_dead_talker_is_not_told_to_slow_down() -> None:
    line = Line(AdmissionSettings(max_wait_s=0.05))
    await line.join()
    line.talkers = 0
    line.model.admission.check("")
    line.talkers = 1
    with pytest.raises(NotReady):
        await line.speaking[0]


async def test_to_ask_whether_a_request_would_be_refused_changes_nothing(clock: Clock) -> None:
    line = Line(SHORT_LINE)
    await line.join()
    clock.now_s += 7.0
    assert line.model.admission.refusal_reason("") is None
    line.hear()
    assert line.model.admission.refusal_reason("") == "line"
    line.talkers = 0
    assert line.model.admission.refusal_reason("") is None
    line.talkers = 1
    assert line.model.admission.refusal_reason("") == "line"
    await line.finish()


async def test_leaving_frees_the_place() -> None:
    line = Line(AdmissionSettings(max_streams=1))
    await line.join()
    (speaking,) = line.speaking
    speaking.cancel()
    await asyncio.wait((speaking,))
    line.gate.set()
    assert await line.speak()


def ending(*reasons: FinishReason, sound: bytes = b"") -> FakeSynthesizer:
    """Requests that fall silent or end for these reasons, and others that speak."""
    scripts = [[chunk(b""), chunk(sound, frames=3, finish_reason=reason)] for reason in reasons]
    return FakeSynthesizer(script=utterance(2), scripts=scripts)


async def spoken(synthesizer: FakeSynthesizer, request: Utterance) -> list[PcmChunk]:
    info = synthesizer.info or CUSTOM_VOICE
    return [item async for item in SpeechModel(synthesizer, PROMPT).speak(request, info)]


async def test_what_is_over_before_it_is_heard_is_made_again_with_another_seed() -> None:
    synthesizer = ending(FinishReason.SILENCE)
    chunks = await spoken(synthesizer, replace(REQUEST.changed(seed=5), may_redraw=True))
    assert pcm_of(chunks) == pcm_of(utterance(2))
    assert chunks[-1].finish_reason is FinishReason.STOP
    seeds = [asked.seed for asked in synthesizer.requests]
    assert (len(seeds), len(set(seeds)), seeds[0]) == (2, 2, 5)
    assert chunks[0].seed == seeds[-1]  # the client learns it
    assert sum(len(item.codes) for item in chunks) == 2  # and pays for no others


@pytest.mark.parametrize(
    ("reasons", "sound", "may_redraw", "end", "num_asked"),
    [
        ([FinishReason.EARLY], b"11", True, FinishReason.STOP, 2),
        ([FinishReason.STOP], b"11", True, FinishReason.STOP, 1),
        ([FinishReason.LENGTH], b"11", True, FinishReason.LENGTH, 1),
        ([FinishReason.SILENCE], b"", False, FinishReason.SILENCE, 1),  # a seed of the client's is kept
        ([FinishReason.LOOP] * 9, b"", True, FinishReason.LOOP, 2),  # after two seeds it is reported unchanged
    ],
)
async def test_what_ends_badly_in_its_first_chunk_is_made_again_once(
    reasons: list[FinishReason], sound: bytes, may_redraw: bool, end: FinishReason, num_asked: int
) -> None:
    synthesizer = ending(*reasons, sound=sound)
    chunks = await spoken(synthesizer, replace(REQUEST.changed(seed=5), may_redraw=may_redraw))
    heard = pcm_of(utterance(2)) if len(reasons) < num_asked else sound
    assert (pcm_of(chunks), chunks[-1].finish_reason) == (heard, end)
    assert (len(synthesizer.requests), synthesizer.requests[0].seed) == (num_asked, 5)


@pytest.mark.parametrize(("sound", "pause_s"), [(b"", 0.0), (b"11", 0.1)])
async def test_a_long_text_whose_first_segment_ends_badly_begins_again(sound: bytes, pause_s: float) -> None:
    """One of two segments, or of two spans behind pauses."""
    synthesizer = ending(FinishReason.EARLY, sound=sound)
    request = replace(REQUEST.changed(text="One two. Three four."), may_redraw=True)
    if pause_s:
        spans = (TextSpan("One two.", pause_s=pause_s), TextSpan("Three four.", pause_s=pause_s))
        request = replace(request, spans=spans)
    else:
        synthesizer.info = replace(CUSTOM_VOICE, max_segment_chars=12)
    chunks = await spoken(synthesizer, request)
    assert pcm_of(chunks) == 2 * (bytes(2 * int(pause_s * CUSTOM_VOICE.sample_rate)) + pcm_of(utterance(2)))
    assert [asked.text for asked in synthesizer.requests] == ["One two.", "One two.", "Three four."]
    assert chunks[-1].finish_reason is FinishReason.STOP


async def test_a_reader_that_takes_nothing_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "UNREAD_S", 0.0)
    line = Line(AdmissionSettings(max_streams=1, max_line_s=1000, max_wait_s=1000))
    line.gate.set()
    left = asyncio.Event()
    make_room = line.model.admission.release_place

    async def tell_and_make_room() -> None:
        await make_room()
        left.set()

    monkeypatch.setattr(line.model.admission, "release_place", tell_and_make_room)
    async with aclosing(line.model.speak(REQUEST, CUSTOM_VOICE)) as paused:
        heard = [await anext(paused)]
        await asyncio.wait_for(left.wait(), 5.0)
        monkeypatch.setattr(listener, "UNREAD_S", 60.0)
        assert await line.speak() == pcm_of(utterance(2))  # somebody else has the only place
        heard.append(await anext(paused))
        with pytest.raises(Overloaded):
            await line.speak()
        heard += [item async for item in paused]
    assert pcm_of(heard) == pcm_of(utterance(2))
    assert (line.model.admission.num_streams, line.model.admission.num_speaking) == (0, 0)


async def test_who_leaves_while_away_is_counted_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "UNREAD_S", 0.0)
    line = Line()
    line.gate.set()
    async with aclosing(line.model.speak(REQUEST, CUSTOM_VOICE)) as paused:
        await anext(paused)
        for _ in range(10):
            await asyncio.sleep(0)
        assert (line.model.admission.num_streams, line.model.admission.num_speaking) == (0, 0)
    assert (line.model.admission.num_streams, line.model.admission.num_speaking) == (0, 0)
