"""Segments of jobs in the codec pool: last in its queue, and in no count."""

import asyncio
import math
from collections.abc import AsyncGenerator

import numpy as np
import pytest

from deployments.codec.batch import DecodeTask
from deployments.codec.pool.capacity import CodecLoad
from deployments.codec.pool.service import Placement
from deployments.listener import Listener
from deployments.protocol import ALL_FRAMES, FrameChunk, PcmChunk, SynthesisRequest
from deployments.serving.replica_streams import Generate
from tests.deployments.codec.pool.test_gate import NOWHERE

pytestmark = pytest.mark.anyio

CODES = np.zeros((1, 16), np.int16)
OF_A_JOB = SynthesisRequest("1", "text", background=True)


def test_they_are_made_where_no_worker_is_taken_from_others() -> None:
    hybrid, inline = Placement("hybrid"), Placement("inline")
    hybrid.talker_on_gpu = inline.talker_on_gpu = True
    with hybrid.admit(2.0, background=True) as frames, hybrid.admit(2.0, background=True):
        assert frames == 0
        with hybrid.admit(2.0) as beside:
            assert beside < ALL_FRAMES, "the pool is not full of them"
    with inline.admit(2.0, background=True) as frames:
        assert frames == ALL_FRAMES


async def test_they_wait_for_no_room_and_are_reported_by_themselves() -> None:
    load = CodecLoad(1, frame_s=0.08, max_late_s=0.25, worker_capacity=lambda: 0.0)
    going_on = asyncio.Event()

    async def generate(request: SynthesisRequest) -> AsyncGenerator[FrameChunk, None]:
        yield FrameChunk(CODES, 1)

    async def synthesize(request: SynthesisRequest, generate: Generate) -> AsyncGenerator[PcmChunk, None]:
        async for chunk in generate(request):
            yield PcmChunk(b"", chunk.codes, 1)
        await going_on.wait()

    stream, other = (load.track_stream(synthesize, OF_A_JOB, generate) for _ in range(2))
    for each in (stream, other):
        assert len((await anext(each)).codes) == 1  # although there is room for no stream
    record = load.record()
    assert (record.background, record.streams, record.starting, record.backlog_s) == (2.0, 0.0, 0.0, 0.0)
    await other.aclose()
    assert load.record().background == 1.0

    async def decoding() -> int:
        return 7

    assert await load.measure_call(decoding(), [DecodeTask(CODES, NOWHERE, math.inf)], waiting=0) == 7
    assert load.record().busy_cores == 0.0
    going_on.set()
    assert [chunk async for chunk in stream] == []
    assert load.record().background == 0.0


def test_nothing_is_ever_due_for_a_job() -> None:
    listener = Listener.of(background=True)
    assert listener.deliver(1.0, now_s=5.0) == 0.0
    assert listener.deliver(1.0, now_s=500.0) == 0.0
    assert (listener.lead_s(600.0), listener.stalled_s) == (math.inf, 0.0)
