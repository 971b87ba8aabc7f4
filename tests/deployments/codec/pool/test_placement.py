import asyncio
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing, suppress
from dataclasses import replace
from math import inf

import numpy as np
import pytest

from deployments.codec.pool.capacity import CodecLoad
from deployments.codec.pool.service import Placement
from deployments.config import CodecPlacement
from deployments.protocol import ALL_FRAMES, FrameChunk, PcmChunk, SynthesisRequest
from deployments.serving.replica_streams import Generate


def placement_of(name: CodecPlacement, *, on_gpu: bool = True) -> Placement:
    placement = Placement(name)
    placement.talker_on_gpu = on_gpu
    return placement


@pytest.mark.parametrize(("name", "on_gpu", "expected"), [
    ("pool", True, 0), ("hybrid", False, 0), ("hybrid", True, 9), ("inline", True, ALL_FRAMES),
    ("inline", False, ALL_FRAMES),
])  # fmt: skip
def test_an_idle_pool_asks_for_its_placement(name: CodecPlacement, on_gpu: bool, expected: int) -> None:
    with placement_of(name, on_gpu=on_gpu).admit(inf) as frames:
        assert frames == expected


def test_the_busier_the_pool_the_more_the_gpu_does() -> None:
    placement = placement_of("hybrid")
    with ExitStack() as streams:
        asked = [streams.enter_context(placement.admit(9.0)) for _ in range(12)]
    assert asked == sorted(asked)
    assert asked[0] < 20
    assert asked[-1] == ALL_FRAMES
    assert sum(frames < ALL_FRAMES for frames in asked) == 8
    with suppress(ValueError), placement.admit(9.0):
        raise ValueError
    with placement.admit(9.0) as frames:
        assert frames == asked[0]  # all have left


def test_models_that_share_a_pool_are_placed_by_all_its_streams() -> None:
    here = placement_of("hybrid")
    other = Placement("hybrid", beside=here)
    other.talker_on_gpu = True
    with ExitStack() as streams:
        for _ in range(9):
            streams.enter_context(here.admit(9.0))
        assert streams.enter_context(other.admit(9.0)) == ALL_FRAMES
    with Placement("pool", beside=here).admit(9.0) as frames:
        assert frames == 0


def test_jobs_are_made_where_no_worker_is_taken_from_others() -> None:
    hybrid, inline = Placement("hybrid"), Placement("inline")
    hybrid.talker_on_gpu = inline.talker_on_gpu = True
    with hybrid.admit(2.0, background=True) as frames, hybrid.admit(2.0, background=True):
        assert frames == 0
        with hybrid.admit(2.0) as beside:
            assert beside < ALL_FRAMES, "the pool is not full of them"
    with inline.admit(2.0, background=True) as frames:
        assert frames == ALL_FRAMES


@pytest.mark.anyio
@pytest.mark.parametrize("gpu_frames", [12, ALL_FRAMES])
async def test_what_a_gpu_decodes_does_not_wait_for_a_place(gpu_frames: int) -> None:
    """Another stream of the same client has the only one."""
    load, codes = CodecLoad(1, frame_s=0.08, max_late_s=0.25, worker_capacity=lambda: 1.0), np.zeros((1, 16), np.int16)

    async def generate(request: SynthesisRequest) -> AsyncGenerator[FrameChunk, None]:
        yield FrameChunk(codes, 3)

    def stream(gpu_frames: int) -> AsyncGenerator[PcmChunk, None]:
        async def decode(request: SynthesisRequest, generate: Generate) -> AsyncGenerator[PcmChunk, None]:
            async for chunk in generate(replace(request, gpu_frames=gpu_frames)):
                yield PcmChunk(b"", chunk.codes, 3)

        return load.track_stream(decode, SynthesisRequest("r", "Hello."), generate)

    async with aclosing(stream(0)) as first, aclosing(stream(gpu_frames)) as second:
        await anext(first)
        await asyncio.wait_for(anext(second), 10)
