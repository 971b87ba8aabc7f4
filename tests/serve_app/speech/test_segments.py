import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, nullcontext
from dataclasses import replace

import pytest

from deployments import listener as listeners
from deployments.errors import EngineError, Overloaded
from deployments.listener import Listener
from deployments.protocol import FinishReason, ModelInfo, PcmChunk, Sampling, SynthesisRequest
from serve_app.speech.segments import SECOND_ATTEMPT, Segments, Utterance, segment_seed
from serve_app.speech.utterance_synthesizer import Synthesizer, UtteranceSynthesizer, stop_reading
from serve_app.text.spoken import TextSpan
from tests.serve_app.fake import CUSTOM_VOICE, NUM_TEXT_TOKENS, FakeSynthesizer, Step, chunk, pcm_of, utterance
from tests.serve_app.one_model import posted, refusal

pytestmark = pytest.mark.anyio

TEXT = "One two. Three four. Five six."
REQUEST = Utterance(SynthesisRequest("id", TEXT, seed=7, sampling=Sampling(max_new_tokens=9)))
INFO = replace(CUSTOM_VOICE, max_segment_chars=12)
STOP = chunk(b"", frames=0, finish_reason=FinishReason.STOP)


class Recorder:
    """One script a segment; what begins and what is closed is written down in order."""

    def __init__(self, *scripts: list[Step]) -> None:
        self.scripts = scripts
        self.log: list[str] = []
        self.begun = asyncio.Condition()
        self._telling: set[asyncio.Task[None]] = set()

    async def describe(self) -> ModelInfo:
        return INFO

    async def synthesize(self, request: SynthesisRequest, info: object = None) -> AsyncGenerator[PcmChunk, None]:
        number = int(request.request_id.partition(".")[2] or 1)
        self.log.append(f"begin {number}")
        await self._tell()
        try:
            for step in self.scripts[number - 1]:
                match step:
                    case PcmChunk():
                        yield step
                    case Exception():
                        raise step
                    case asyncio.Event():
                        await step.wait()
        finally:
            self.log.append(f"close {number}")
            closed = asyncio.create_task(self._tell())
            self._telling.add(closed)

    async def _tell(self) -> None:
        async with self.begun:
            self.begun.notify_all()

    async def until(self, entry: str) -> None:
        async with self.begun:
            await self.begun.wait_for(lambda: entry in self.log)


async def spoken(synthesizer: Synthesizer) -> list[PcmChunk]:
    return [chunk async for chunk in UtteranceSynthesizer(synthesizer).speak_utterance(REQUEST, INFO, Listener())]


@pytest.mark.parametrize(
    ("second", "rest", "reason"),
    [
        ([chunk(b"22"), STOP], [chunk(b"33"), chunk(b"44"), STOP], FinishReason.STOP),
        ([chunk(b"22", finish_reason=FinishReason.RUNAWAY)], [chunk(b"33"), STOP], FinishReason.RUNAWAY),
        ([], [chunk(b"33"), STOP], FinishReason.STOP),
        ([STOP], [chunk(b"33"), STOP], FinishReason.STOP),
    ],
)
async def test_segments_follow_each_other(second: list[Step], rest: list[Step], reason: FinishReason) -> None:
    chunks = await spoken(Recorder([chunk(b"11"), STOP], second, rest))
    assert pcm_of(chunks) == b"11" + pcm_of(second) + pcm_of(rest)  # type: ignore[arg-type]
    assert [item.finish_reason for item in chunks] == [None] * (len(chunks) - 1) + [reason]
    assert chunks[-1].num_text_tokens == (3 if second else 2) * NUM_TEXT_TOKENS
    counts = [item.num_text_tokens for item in chunks]
    assert counts == sorted(counts)


async def spoken_twice(*segments: list[Step], may_redraw: bool = True) -> tuple[list[PcmChunk], list[SynthesisRequest]]:
    """Two segments; a script for each of the calls, which waits for an event until `sound(2)` has come."""
    synthesizer = FakeSynthesizer(INFO, scripts=segments)
    request = replace(REQUEST.changed(text="One two. Three four."), may_redraw=may_redraw)
    events = [step for script in segments for step in script if isinstance(step, asyncio.Event)]
    chunks, listener = [], Listener()
    async for item in UtteranceSynthesizer(synthesizer).speak_utterance(request, INFO, listener):
        chunks.append(item)
        listener.deliver(item.num_samples / INFO.sample_rate, now_s=time.monotonic())
        for event in events:
            if item.pcm == sound(2).pcm:
                event.set()
    return chunks, synthesizer.requests


def sound(value: int) -> PcmChunk:
    """Two seconds."""
    return chunk(bytes([value]) * 4 * INFO.sample_rate)


EARLY = chunk(b"", frames=0, finish_reason=FinishReason.EARLY)


QUICK = chunk(bytes(INFO.sample_rate))  # half a second: no time to hear the next segment out


@pytest.mark.parametrize(
    ("first", "second", "may_redraw", "heard", "num_asked"),
    [
        (sound(1), [sound(2), EARLY], True, sound(3), 3),  # it is made again once
        (QUICK, [sound(2), asyncio.Event(), EARLY], True, sound(2), 2),  # the listener needs it
        (sound(1), [sound(2), EARLY], False, sound(2), 2),  # a client that gave a seed gets what it makes
    ],
)
async def test_the_end_says_how_a_later_segment_ended(
    first: PcmChunk, second: list[Step], may_redraw: bool, heard: PcmChunk, num_asked: int
) -> None:
    chunks, asked = await spoken_twice([first, STOP], second, [sound(3), EARLY], may_redraw=may_redraw)
    assert (pcm_of(chunks), len(asked)) == (pcm_of([first, heard]), num_asked)
    assert chunks[-1].finish_reason is FinishReason.EARLY


async def test_the_next_segment_begins_while_one_sounds_and_none_behind_it() -> None:
    sounds, more = asyncio.Event(), asyncio.Event()
    recorder = Recorder([chunk(b""), sounds, chunk(b"11"), more, STOP], [chunk(b"22"), STOP], [chunk(b"33"), STOP])
    async with aclosing(UtteranceSynthesizer(recorder).speak_utterance(REQUEST, INFO, Listener())) as chunks:
        assert (await anext(chunks)).pcm == b""
        for _ in range(9):
            await asyncio.sleep(0)
        assert recorder.log == ["begin 1"], "nothing is asked ahead of the first sound"
        sounds.set()
        assert (await anext(chunks)).pcm == b"11"
        await recorder.until("begin 2")
        assert recorder.log == ["begin 1", "begin 2"]
        more.set()
        rest = [item async for item in chunks]
    assert pcm_of(rest) == b"2233"
    assert [entry for entry in recorder.log if entry.startswith("begin")] == ["begin 1", "begin 2", "begin 3"]


@pytest.mark.parametrize("fails", [False, True])
async def test_leaving_or_an_error_closes_every_segment_that_has_begun(fails: bool) -> None:
    fail = asyncio.Event()
    recorder = Recorder([chunk(b"11"), fail, Overloaded("full")], [chunk(b"22"), asyncio.Event()], [STOP])
    with pytest.raises(Overloaded) if fails else nullcontext():
        async with aclosing(UtteranceSynthesizer(recorder).speak_utterance(REQUEST, INFO, Listener())) as chunks:
            await anext(chunks)
            await recorder.until("begin 2")
            if fails:
                fail.set()
                await anext(chunks)
    assert sorted(recorder.log) == ["begin 1", "begin 2", "close 1", "close 2"]


async def test_an_error_passes_through_where_its_segment_would_sound() -> None:
    recorder = Recorder([chunk(b"11"), STOP], [EngineError("broken")], [STOP])
    async with aclosing(UtteranceSynthesizer(recorder).speak_utterance(REQUEST, INFO, Listener())) as chunks:
        assert pcm_of([await anext(chunks), await anext(chunks)]) == b"11"
        with pytest.raises(EngineError):
            await anext(chunks)
    assert "begin 3" not in recorder.log


async def test_a_later_segment_that_is_refused_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.speech.utterance_synthesizer._RETRY_AFTER_S", 0.0)
    refused = [[Overloaded("full")]] * 3
    full = FakeSynthesizer(INFO, scripts=[[chunk(b"11"), STOP], *refused, [chunk(b"22"), STOP], [chunk(b"33"), STOP]])
    chunks = [item async for item in UtteranceSynthesizer(full).speak_utterance(REQUEST, INFO, Listener())]
    assert pcm_of(chunks) == b"112233"
    assert chunks[-1].finish_reason is FinishReason.STOP


async def test_patience_with_a_full_server_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.speech.utterance_synthesizer._GIVE_UP_AFTER_S", 0.0)
    full = FakeSynthesizer(INFO, scripts=[[chunk(b"11"), STOP], [Overloaded("full")], [chunk(b"22"), STOP], [STOP]])
    async with aclosing(UtteranceSynthesizer(full).speak_utterance(REQUEST, INFO, Listener())) as chunks:
        assert pcm_of([await anext(chunks), await anext(chunks)]) == b"11"
        with pytest.raises(Overloaded):
            await anext(chunks)


async def test_a_first_segment_that_is_refused_is_not_asked_for_again() -> None:
    full = FakeSynthesizer(INFO, scripts=[[Overloaded("full")], [chunk(b"11"), STOP]])
    with pytest.raises(Overloaded):
        await spoken(full)
    assert len(full.requests) == 1


def requests(request: Utterance, max_chars: int) -> list[SynthesisRequest | None]:
    segments = Segments.of(request, max_chars)
    numbers = range(len(request.synthesis.text))
    return [segments.known_segment(number) for number in numbers if segments.known_segment(number)]


def test_a_plan_has_all_pauses_and_speeds() -> None:
    spans = (TextSpan("One two.", 0.0, 2.0), TextSpan("Three four.", 1.5), TextSpan("", 0.5))
    assert Segments.of(replace(REQUEST, spans=spans), INFO.max_segment_chars).plan() == [*spans]


def test_the_seeds_of_segments_stay() -> None:
    """Clients have kept audio of a seed, and jobs have kept segments."""
    seeds = [segment_seed(7, number) for number in (0, 1, 2, SECOND_ATTEMPT)]
    assert seeds == [7, 12580252801055498829, 3008764343706420560, 13299856485676249231]
    assert segment_seed(2**53 - 1, 1) == 6335090069054922610


async def test_requests_of_the_segments() -> None:
    first, second, third = requests(REQUEST, INFO.max_segment_chars)
    assert first == replace(REQUEST.synthesis, text="One two.", following=("Three four.", "Five six."))
    assert (second.text, third.text) == ("Three four.", "Five six.")
    assert (second.request_id, third.request_id) == ("id.2", "id.3")
    assert (first.continues, second.continues, third.continues) == (False, True, True)
    assert second.sampling == REQUEST.synthesis.sampling
    assert len({first.seed, second.seed, third.seed}) == 3
    assert all(0 <= request.seed < 2**64 for request in (second, third))
    assert requests(REQUEST, INFO.max_segment_chars) == [first, second, third]
    assert requests(REQUEST, 1000) == [REQUEST.synthesis]
    assert {type(each) for each in (first, second, third)} == {SynthesisRequest}  # replicas know no other


@pytest.mark.parametrize("text", ["你好", "9" * 4096], ids=["that the voice cannot speak", "that grows when spoken"])
async def test_text_is_refused(text: str) -> None:
    synthesizer = FakeSynthesizer(replace(CUSTOM_VOICE, spoken_form="english"), utterance())
    answer = await posted(synthesizer, "/v1/audio/speech", json={"input": text, "voice": "alloy"})
    assert refusal(answer) == (400, "input")
    assert synthesizer.requests == []


async def test_a_segment_asked_ahead_is_left_while_its_reader_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "UNREAD_S", 0.0)
    recorder = Recorder([chunk(b"11"), chunk(b"12"), STOP], [chunk(b"22"), STOP], [chunk(b"33"), STOP])
    async with aclosing(UtteranceSynthesizer(recorder).speak_utterance(REQUEST, INFO, Listener())) as chunks:
        heard = await anext(chunks)
        await recorder.until("begin 2")
        await asyncio.wait_for(recorder.until("close 2"), 5.0)
        monkeypatch.undo()
        rest = [item async for item in chunks]
    assert heard.pcm + pcm_of(rest) == b"11122233"
    assert recorder.log.count("begin 2") == 2


async def test_chunks_that_are_being_read_are_left_to_their_reader_where_nobody_waits_for_it() -> None:
    may_end = asyncio.Event()

    async def slow() -> AsyncGenerator[PcmChunk, None]:
        try:
            yield await asyncio.get_running_loop().create_future()
        finally:
            await may_end.wait()

    chunks = slow()
    reading = asyncio.ensure_future(anext(chunks))
    await asyncio.sleep(0)
    stopping = asyncio.create_task(stop_reading(chunks, reading))
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await reading
