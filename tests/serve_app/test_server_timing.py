"""The header that says how the time to first audio was spent."""

from collections.abc import AsyncGenerator

import numpy as np
import pytest

from deployments.protocol import Mark, PcmChunk, SynthesisRequest, reached
from serve_app.server_timing import ServerTiming, server_timing

pytestmark = pytest.mark.anyio

CODES = np.zeros((1, 16), np.int16)


def test_each_stage_lasts_from_the_mark_before_it() -> None:
    marks = (Mark("received", 5_000_000_000), Mark("request", 5_001_500_000), Mark("to-talker", 5_001_750_000))
    assert server_timing(marks) == 'received;desc="5.000000", request;dur=1.500, to-talker;dur=0.250'


def test_only_marked_requests_are_marked_further() -> None:
    request = SynthesisRequest("r", "Hello.")
    assert reached(request, "to-codec") is request
    marked = ServerTiming(1).begin(request)
    assert [mark.stage for mark in reached(marked, "to-codec").marks] == ["received", "request", "to-codec"]


async def test_the_header_tells_of_the_first_marks_that_came_back() -> None:
    timing = ServerTiming(0)
    request = timing.begin(SynthesisRequest("r", "Hello."))

    async def chunks() -> AsyncGenerator[PcmChunk, None]:
        yield reached(PcmChunk(b"12", CODES, 1, marks=request.marks), "from-talker")
        yield reached(PcmChunk(b"34", CODES, 1, marks=request.marks), "of-a-later-segment")

    assert [chunk.pcm async for chunk in timing.watch(chunks())] == [b"12", b"34"]
    entries = timing.headers()["server-timing"].split(", ")
    assert [entry.partition(";")[0] for entry in entries] == ["received", "request", "from-talker", "response"]
