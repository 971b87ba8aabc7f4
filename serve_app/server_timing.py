"""How the time to a response's first audio was spent, as a `Server-Timing` header for whoever wants to know."""

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise

from deployments.protocol import Mark, Marks, PcmChunk, SynthesisRequest, reached


class ServerTiming:
    """Follows one request from its arrival to the first bytes of its response."""

    def __init__(self, received_ns: int) -> None:
        """`received_ns` of time.time_ns()."""
        self._marks: Marks = (Mark("received", received_ns),)

    def begin(self, request: SynthesisRequest) -> SynthesisRequest:
        """The request, marked: every stage on its way will leave a mark of its own."""
        return reached(replace(request, marks=self._marks), "request")

    async def watch(self, chunks: AsyncGenerator[PcmChunk, None]) -> AsyncGenerator[PcmChunk, None]:
        """`chunks`, of which one brings the marks."""
        seen = False
        async with aclosing(chunks):
            async for chunk in chunks:
                if chunk.marks and not seen:  # of the first audio; later segments bring their own
                    self._marks, seen = chunk.marks, True
                yield chunk

    def headers(self) -> Mapping[str, str]:
        """To be asked for when the response starts."""
        return {"server-timing": server_timing((*self._marks, Mark("response", time.time_ns())))}


def server_timing(marks: Marks) -> str:
    """Milliseconds from each mark to the next, under the name of the latter; the first is a time of day, in seconds."""
    first = marks[0]
    later = [f"{mark.stage};dur={(mark.at_ns - before.at_ns) / 1e6:.3f}" for before, mark in pairwise(marks)]
    return ", ".join([f'{first.stage};desc="{first.at_ns / 1e9:.6f}"', *later])
