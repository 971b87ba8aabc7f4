"""What a codec replica says of its load."""

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from deployments.autoscaling_records import CodecRecord
from deployments.codec.batch import DecodeTask
from deployments.codec.decoder_state import DecoderState
from deployments.codec.pool import capacity as module
from deployments.codec.pool.capacity import CodecLoad
from deployments.protocol import ALL_FRAMES, FinishReason, FrameChunk, PcmChunk, SynthesisRequest
from tests.clock import Clock

FRAME_S = 0.08

pytestmark = pytest.mark.anyio

REQUEST = SynthesisRequest("id", "Hello.")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(50.0)
    monkeypatch.setattr(module, "time", clock)
    return clock


def load_of(workers: int) -> CodecLoad:
    return CodecLoad(workers, frame_s=FRAME_S, max_late_s=0.25)


def task(deadline_s: float) -> DecodeTask:
    return DecodeTask(np.zeros((1, 16), np.int16), DecoderState(0, ()), deadline_s)


class Stream:
    """A talker that makes frames when told to, and a service that decodes them when told to."""

    def __init__(self, gpu_frames: int = 0) -> None:
        self._gpu_frames = gpu_frames
        self.frames: asyncio.Queue[int] = asyncio.Queue()
        self.decode: asyncio.Queue[int] = asyncio.Queue()

    async def generate(self, _: SynthesisRequest) -> AsyncGenerator[FrameChunk, None]:
        while count := await self.frames.get():
            yield FrameChunk(np.zeros((count, 16), np.int16), 3)

    async def synthesize(self, request: SynthesisRequest, generate: module.Generate) -> AsyncGenerator[PcmChunk, None]:
        async with aclosing(generate(replace(request, gpu_frames=self._gpu_frames))) as chunks:
            async for _ in chunks:
                while count := await self.decode.get():
                    yield PcmChunk(b"", np.zeros((count, 16), np.int16), 3)
        yield PcmChunk(b"", np.zeros((0, 16), np.int16), 3, FinishReason.STOP)


Audio = AsyncGenerator[PcmChunk, None]


async def test_frames_wait_from_their_arrival_until_they_are_decoded(fed: list[Any]) -> None:
    load, stream = load_of(1), Stream()
    assert load.record().streams == 0
    async with aclosing(load.track_stream(stream.synthesize, REQUEST, stream.generate)) as chunks:
        first = asyncio.create_task(anext(chunks))
        await asyncio.sleep(0)
        assert (load.record().streams, load.record().starting) == (1, 1)
        stream.frames.put_nowait(20)
        while not load.lag_s:  # noqa: ASYNC110, nothing tells of frames that come
            await asyncio.sleep(0)
        assert (load.record().streams, load.record().starting) == (1, 0)
        stream.decode.put_nowait(2)
        await first
        stream.decode.put_nowait(1)
        await anext(chunks)
        assert load.lag_s == pytest.approx(17 * FRAME_S)
        assert load.record().backlog_s == pytest.approx(5 * FRAME_S)  # up to a chunk waits on purpose
    assert fed == [("codec_lag_seconds", 0, {})]
    assert load.record().streams == 0


@asynccontextmanager
async def beside_a_late_one(clock: Clock, gpu_frames: int = 0) -> AsyncIterator[tuple[CodecLoad, Audio, Stream, Audio]]:
    """The load, a first stream that is very late and stays so, whose place is the only one, and a second stream."""
    load, first, second = load_of(1), Stream(), Stream(gpu_frames)
    for stream in (first, second):
        stream.frames.put_nowait(3)
        stream.decode.put_nowait(1)
    async with aclosing(load.track_stream(first.synthesize, REQUEST, first.generate)) as one:
        await anext(one)
        for _ in range(4):
            await load.measure_call(asyncio.sleep(0), [task(0.0), task(900.0)], waiting=0)
            clock.now_s += 1
        async with aclosing(load.track_stream(second.synthesize, REQUEST, second.generate)) as other:
            yield load, one, second, other


async def test_a_stream_without_a_place_has_its_talker_but_no_decoder(clock: Clock) -> None:
    async with beside_a_late_one(clock) as (load, one, second, other):
        waiting = asyncio.create_task(anext(other))
        while not second.frames.empty():  # noqa: ASYNC110, the queue tells nobody
            await asyncio.sleep(0)
        assert not waiting.done()
        assert load.record().starting == 1
        await one.aclose()
        await waiting


@pytest.mark.parametrize("gpu_frames", [12, ALL_FRAMES])
async def test_what_a_gpu_decodes_does_not_wait_for_a_place(clock: Clock, gpu_frames: int) -> None:
    async with beside_a_late_one(clock, gpu_frames) as (_, _, _, other):
        await anext(other)


async def test_busy_cores_are_a_moving_mean(clock: Clock) -> None:
    load = load_of(2)
    gates = [asyncio.Event(), asyncio.Event()]
    calls = [asyncio.create_task(load.measure_call(gate.wait(), [task(60.0)] * 3, waiting=0)) for gate in gates]
    await asyncio.sleep(0)
    for _ in range(40):
        clock.now_s += 0.5
        record = load.record()
    assert record.busy_cores == pytest.approx(2.0, abs=0.05)
    for gate in gates:
        gate.set()
    assert await asyncio.gather(*calls) == [True, True]
    clock.now_s += 0.5
    assert 1.5 < load.record().busy_cores < 2.0  # a pause between two chunks is not an idle core
    clock.now_s += 60
    assert load.record().busy_cores == pytest.approx(0.0, abs=0.01)


async def test_a_call_is_recorded_unless_of_a_job(clock: Clock, fed: list[tuple[str, float, dict[str, str]]]) -> None:
    load = load_of(1)

    async def decode() -> str:
        clock.now_s += 0.02
        return "decoded"

    assert await load.measure_call(decode(), [task(math.inf)], waiting=9) == "decoded"
    assert fed == []
    assert await load.measure_call(decode(), [task(60.0), task(math.inf)], waiting=4) == "decoded"
    codec = {"pool": "codec"}
    assert fed == [
        *(("step_seconds", pytest.approx(0.02), codec), ("batch_size", 2, codec)),
        *(("queue_depth", 4, codec), ("codec_lag_seconds", 0.0, {})),
    ]


async def test_a_call_that_fails_is_over_and_its_error_passes() -> None:
    load = load_of(1)

    async def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await load.measure_call(fail(), [task(0.0)], waiting=0)
    assert load.record().busy_cores < 0.1


async def test_the_record_is_what_the_policy_reads() -> None:
    record = load_of(3).record()
    assert isinstance(record, CodecRecord)
    assert all(type(value) is float for value in asdict(record).values())
    assert record.cores == 3
