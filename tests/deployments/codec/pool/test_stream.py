import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from unittest import mock

import numpy as np
import pytest

from deployments.codec.batch import Decoded, DecodeTask
from deployments.codec.decoder_state import DecoderState
from deployments.codec.plan import ChunkPlan
from deployments.codec.pool.stream import Decode, DecodingStart, StreamDecoder
from deployments.errors import EngineError, TalkerLost
from deployments.protocol import ALL_FRAMES, Codes, FinishReason, FrameChunk, PcmChunk
from deployments.speech_detection import EndingGuard, LeadingSilence
from tests.deployments.codec.pool.test_service import collect, joined_codes, joined_pcm

pytestmark = pytest.mark.anyio

GROUPS = 4
FRAME_SAMPLES = 30
SAMPLE_RATE = 300
FRAME_S = FRAME_SAMPLES / SAMPLE_RATE
RAMP = (1, 2, 4, 8, 12)
NOWHERE = DecodingStart(DecoderState(0, ()))


class Source:
    """A talker that follows a script of codes to send, errors to raise and events to wait for."""

    def __init__(
        self, *script: Codes | Exception | asyncio.Event, reason: FinishReason | None, decodes: bool = False
    ) -> None:
        self._script, self._reason, self._decodes = script, reason, decodes
        self.exhausted = asyncio.Event()
        self.closed = asyncio.Event()

    async def frames(self) -> AsyncGenerator[FrameChunk, None]:
        last = self._script[-1]
        try:
            for step in self._script:
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, Exception):
                    raise step
                else:
                    pcm = step[:, 0].repeat(FRAME_SAMPLES if self._decodes else 0)
                    yield FrameChunk(step, 5, self._reason if step is last else None, pcm.tobytes())
            self.exhausted.set()
        finally:
            self.closed.set()


class FakeDecode:
    """A frame of the code c becomes samples of the value c; notes the tasks."""

    def __init__(self) -> None:
        self.tasks: list[DecodeTask] = []
        self.open = asyncio.Event()
        self.open.set()

    async def __call__(self, task: DecodeTask) -> Decoded:
        self.tasks.append(task)
        await self.open.wait()
        return Decoded(task.codes[:, 0].repeat(FRAME_SAMPLES), DecoderState(task.state.position + len(task.codes), ()))


def numbered(count: int, *, start: int = 1) -> Codes:
    """Frames [count, groups] that carry their number."""
    return np.arange(start, start + count, dtype=np.int16)[:, None].repeat(GROUPS, axis=1)


def decoder_of(
    decode: Decode, *, start: DecodingStart = NOWHERE, silence: LeadingSilence | None = None,
    guard: EndingGuard | None = None, load: Callable[[], int] = lambda: 0,
) -> StreamDecoder:  # fmt: skip
    sizes = {"frame_samples": FRAME_SAMPLES, "sample_rate": SAMPLE_RATE}
    plan = ChunkPlan(RAMP, frame_s=FRAME_S)
    return StreamDecoder(decode, plan, start, **sizes, silence=silence, guard=guard, load=load)


def run(decode: FakeDecode, source: Source, *, silence: LeadingSilence | None = None) -> AsyncGenerator[PcmChunk, None]:
    return decoder_of(decode, silence=silence).decode_chunks(source.frames())


async def collect_until_error(chunks: AsyncGenerator[PcmChunk, None]) -> tuple[list[PcmChunk], Exception]:
    seen = []
    try:
        async for chunk in chunks:
            seen.append(chunk)  # noqa: PERF401  a comprehension would lose them
    except (TalkerLost, EngineError) as error:
        return seen, error
    raise AssertionError("the stream ended without an error")


@pytest.fixture
def decode() -> FakeDecode:
    return FakeDecode()


async def test_a_fast_talker_fills_the_ramp(decode: FakeDecode) -> None:
    chunks = await collect(run(decode, Source(numbered(45), reason=FinishReason.STOP)))
    assert [len(chunk.codes) for chunk in chunks] == [1, 2, 4, 8, 12, 12, 6]
    assert [len(task.codes) for task in decode.tasks] == [1, 2, 4, 8, 12, 12, 8]
    assert np.array_equal(joined_codes(chunks), numbered(45))
    assert np.array_equal(joined_pcm(chunks), numbered(45)[:, 0].repeat(FRAME_SAMPLES))
    assert [chunk.finish_reason for chunk in chunks] == [None] * 6 + [FinishReason.STOP]
    assert [len(chunk.pcm) for chunk in chunks] == [2 * FRAME_SAMPLES * len(chunk.codes) for chunk in chunks]
    assert {chunk.num_text_tokens for chunk in chunks} == {5}


async def test_the_first_frame_does_not_wait_for_the_second(decode: FakeDecode) -> None:
    more = asyncio.Event()
    source, looks = Source(numbered(1), more, numbered(3, start=2), reason=FinishReason.LENGTH), list[int]()
    decoder = decoder_of(decode, load=lambda: looks.append(1) or 0)
    async with aclosing(decoder.decode_chunks(source.frames())) as chunks:
        first = await anext(chunks)
        assert np.array_equal(first.codes, numbered(1))
        assert first.finish_reason is None
        second = asyncio.create_task(anext(chunks))
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(looks) <= 5, "it sleeps while the talker makes nothing, however low the lead"
        more.set()
        rest = [await second, *[chunk async for chunk in chunks]]
    assert np.array_equal(joined_codes([first, *rest]), numbered(4))
    assert rest[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("reason", FinishReason)
async def test_no_frames_are_one_empty_chunk(decode: FakeDecode, reason: FinishReason) -> None:
    (chunk,) = await collect(run(decode, Source(numbered(0), reason=reason)))
    assert (chunk.pcm, chunk.codes.shape, chunk.finish_reason) == (b"", (0, GROUPS), reason)
    assert decode.tasks == []


async def test_an_end_that_comes_late_is_an_empty_last_chunk(decode: FakeDecode) -> None:
    end = asyncio.Event()
    source = Source(numbered(1), end, numbered(0), reason=FinishReason.STOP)
    async with aclosing(run(decode, source)) as chunks:
        first = await anext(chunks)
        end.set()
        (last,) = [chunk async for chunk in chunks]
    assert (last.pcm, len(last.codes), last.finish_reason) == (b"", 0, FinishReason.STOP)
    assert np.array_equal(joined_codes([first, last]), numbered(1))


async def test_frames_are_read_while_earlier_ones_are_decoded(decode: FakeDecode) -> None:
    decode.open.clear()
    source = Source(numbered(2), numbered(20, start=3), numbered(9, start=23), reason=FinishReason.STOP)
    reading = asyncio.create_task(collect(run(decode, source)))
    await source.exhausted.wait()
    assert [len(task.codes) for task in decode.tasks] == [1]
    decode.open.set()
    assert np.array_equal(joined_codes(await reading), numbered(31))


async def test_for_a_reader_that_takes_nothing_nothing_is_decoded(decode: FakeDecode) -> None:
    """Its codes wait: 32 bytes a frame. What it misses meanwhile it gets when it goes on."""
    source = Source(*[numbered(1, start=number) for number in range(1, 201)], reason=FinishReason.STOP)
    async with aclosing(run(decode, source)) as chunks:
        first = await anext(chunks)
        await source.exhausted.wait()
        assert len(decode.tasks) == 1
        rest = [chunk async for chunk in chunks]
    assert np.array_equal(joined_pcm([first, *rest]), np.arange(1, 201).repeat(FRAME_SAMPLES))


async def test_an_error_comes_after_the_audio_before_it(decode: FakeDecode) -> None:
    gone = TalkerLost("gone")
    seen, error = await collect_until_error(run(decode, Source(numbered(9), gone, reason=None)))
    assert error is gone
    assert np.array_equal(joined_codes(seen), numbered(9))
    assert {chunk.finish_reason for chunk in seen} == {None}


async def test_an_error_before_the_first_frame_is_the_first_thing(decode: FakeDecode) -> None:
    with pytest.raises(TalkerLost):
        await anext(run(decode, Source(TalkerLost("gone"), reason=None)))
    assert decode.tasks == []


async def test_frames_that_end_without_a_reason_are_no_clean_end(decode: FakeDecode) -> None:
    seen, error = await collect_until_error(run(decode, Source(numbered(3), reason=None)))
    assert isinstance(error, EngineError)
    assert {chunk.finish_reason for chunk in seen} == {None}
    assert np.array_equal(joined_codes(seen), numbered(3))


async def test_leaving_closes_the_talkers_stream_and_ends_the_reader(decode: FakeDecode) -> None:
    before = asyncio.all_tasks()
    source = Source(numbered(1), asyncio.Event(), numbered(1), reason=FinishReason.STOP)
    async with aclosing(run(decode, source)) as chunks:
        await anext(chunks)
        assert not source.closed.is_set()
    assert source.closed.is_set()
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("while_decoding", [True, False])
async def test_a_cancelled_stream_closes_the_talkers_too(decode: FakeDecode, while_decoding: bool) -> None:
    if while_decoding:
        decode.open.clear()
    before = asyncio.all_tasks()
    reached, never = asyncio.Event(), asyncio.Event()

    async def frames() -> AsyncGenerator[FrameChunk, None]:
        try:
            if while_decoding:
                yield FrameChunk(numbered(1), 5)
            reached.set()
            await never.wait()
        finally:
            closed.set()

    closed = asyncio.Event()
    decoder = decoder_of(decode)
    stream = asyncio.create_task(collect(decoder.decode_chunks(frames())))
    await reached.wait()
    stream.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stream
    assert closed.is_set()
    assert asyncio.all_tasks() == before


async def test_a_decoder_that_fails_ends_the_stream_and_closes_the_talkers() -> None:
    async def failing(task: DecodeTask) -> Decoded:
        raise EngineError("bad codes")

    source = Source(numbered(1), asyncio.Event(), numbered(1), reason=FinishReason.STOP)
    stream = decoder_of(failing)
    with pytest.raises(EngineError, match="bad codes"):
        await collect(stream.decode_chunks(source.frames()))
    assert source.closed.is_set()


async def test_deadlines_follow_the_audio_delivered(decode: FakeDecode) -> None:
    await collect(run(decode, Source(numbered(20), reason=FinishReason.STOP)))
    _, second, third, fourth, fifth = (task.deadline_s for task in decode.tasks)
    assert third - second == pytest.approx(2 * FRAME_S)
    assert fourth - third == pytest.approx(4 * FRAME_S)
    assert fifth - fourth == pytest.approx(8 * FRAME_S)


async def test_a_stream_that_goes_on_here_is_as_urgent_and_as_far_as_it_was(decode: FakeDecode) -> None:
    heard, now_s = numbered(7), time.monotonic()
    start = DecodingStart(NOWHERE.state, heard, position=7 * FRAME_SAMPLES, in_hand_s=60.0)
    source = Source(numbered(20, start=8), reason=FinishReason.STOP)
    chunks = await collect(decoder_of(decode, start=start).decode_chunks(source.frames()))
    assert [len(chunk.codes) for chunk in chunks] == [8, 12]
    recall, first = next(task for task in decode.tasks if task.state_only), decode.tasks[-2]
    assert now_s + 60.0 <= recall.deadline_s <= now_s + 90.0
    assert first.deadline_s == recall.deadline_s


async def test_quiet_frames_in_front_go_but_their_codes_stay(decode: FakeDecode) -> None:
    codes = np.concatenate([np.zeros((6, GROUPS), np.int16), numbered(10, start=5000)])
    with mock.patch("deployments.speech_detection._KEEP_S", 0.0):
        silence = LeadingSilence(SAMPLE_RATE)
    chunks = await collect(run(decode, Source(codes, reason=FinishReason.STOP), silence=silence))
    assert np.array_equal(joined_codes(chunks), codes)
    assert np.array_equal(joined_pcm(chunks), codes[6:, 0].repeat(FRAME_SAMPLES))
    due = [task.deadline_s for task in decode.tasks]
    assert due[2] > due[1] > due[0]  # nothing delivered yet: each chunk is due when it is asked for
    assert chunks[0].pcm == chunks[1].pcm == b""
    assert [len(task.codes) for task in decode.tasks][:7] == [1] * 7, "the ramp begins with the sound"


@pytest.mark.parametrize("gpu_frames", [0, ALL_FRAMES])
async def test_a_missed_end_is_made_up_for_and_the_talker_left(decode: FakeDecode, gpu_frames: int) -> None:
    """5000: loud enough to be sound."""
    codes = np.concatenate([numbered(30, start=5000), np.zeros((300, GROUPS), np.int16)])
    source = Source(codes, asyncio.Event(), numbered(1), reason=FinishReason.STOP, decodes=gpu_frames > 0)
    decoder = decoder_of(decode, guard=EndingGuard(FRAME_SAMPLES, SAMPLE_RATE))
    chunks = await collect(decoder.decode_chunks(source.frames(), gpu_frames=gpu_frames))
    assert chunks[-1].finish_reason is FinishReason.SILENCE
    assert np.array_equal(joined_codes(chunks), codes[: len(joined_codes(chunks))])
    assert 30 + 30 <= len(joined_codes(chunks)) <= 30 + 80  # 3 to 8 s
    assert len(joined_pcm(chunks)) == len(joined_codes(chunks)) * FRAME_SAMPLES
    assert source.closed.is_set()
