"""Frames of one utterance from its first to its last, whatever becomes of the talkers that make them."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace

import numpy as np

from deployments.errors import TalkerLost
from deployments.failover import persist
from deployments.protocol import ALL_FRAMES, FrameChunk, GenerateRequest

Generate = Callable[[GenerateRequest], AsyncGenerator[FrameChunk, None]]


async def all_frames(
    generate: Generate, request: GenerateRequest, *, frame_bytes: int
) -> AsyncGenerator[FrameChunk, None]:
    """Frames of an utterance behind `request.prefix`, to its end: a talker that is lost is followed by another one."""
    frames = [] if request.prefix is None else [request.prefix]
    num_known = 0 if request.prefix is None else len(request.prefix)
    num_heard = 0  # frames behind those whose audio a talker brought

    def ask() -> AsyncGenerator[FrameChunk, None]:
        prefix = np.concatenate(frames) if frames else None
        wanted = request.gpu_frames if request.gpu_frames >= ALL_FRAMES else max(0, request.gpu_frames - num_heard)
        heard = num_known + num_heard if wanted and prefix is not None else None
        return generate(replace(request, prefix=prefix, heard=heard, gpu_frames=wanted))

    async with aclosing(persist(ask, request_id=request.synthesis.request_id, lost=TalkerLost)) as chunks:
        async for chunk in chunks:
            if len(chunk.codes):
                frames.append(chunk.codes)
            num_heard += len(chunk.pcm) // frame_bytes
            yield chunk
