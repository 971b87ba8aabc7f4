import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import numpy as np
import pytest

from deployments.codec.batch import Decoded, DecodeTask
from deployments.codec.decoder_state import DecoderState
from deployments.codec.plan import ChunkPlan
from deployments.codec.pool.stream import Decode, DecodingStart, StreamDecoder
from deployments.errors import EngineError, TalkerLost
from deployments.protocol import Codes, FinishReason, FrameChunk, PcmChunk
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
