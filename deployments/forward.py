"""Streams whose audio the talker brings, from the first frame to the last: nothing is left to decode."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

import numpy as np

from deployments.codec.frames import Generate, all_frames
from deployments.codec.silence import LeadingSilence
from deployments.errors import EngineError
from deployments.protocol import ALL_FRAMES, Codes, GenerateRequest, ModelInfo, PcmChunk, SynthesisRequest, reached


async def forward(request: SynthesisRequest, generate: Generate, info: ModelInfo) -> AsyncGenerator[PcmChunk, None]:
    """Audio of one utterance as a talker's GPU makes it, on one talker after the other where it has to be.

    `generate` asks a talker. Raises what it raises, and EngineError where audio is missing at the end.
    """
    frame_bytes = 2 * info.frame_samples
    silence = None if request.leading_silence else LeadingSilence(info.sample_rate)
    waiting: list[Codes] = []  # frames without audio so far, each [num_code_groups]
    position = 0
    asked = GenerateRequest(request, gpu_frames=ALL_FRAMES)
    async with aclosing(all_frames(generate, asked, frame_bytes=frame_bytes)) as chunks:
        async for chunk in chunks:
            chunk = reached(chunk, "from-talker")
            waiting.extend(chunk.codes)
            if not chunk.pcm and chunk.finish_reason is None:
                continue
            pcm = np.frombuffer(chunk.pcm, np.int16)
            count = len(chunk.pcm) // frame_bytes
            codes, waiting = waiting[:count], waiting[count:]
            if chunk.finish_reason is not None and waiting:
                raise EngineError(f"the talker has left {len(waiting)} frames without audio: speech is missing")
            heard = pcm if silence is None else silence.trim(pcm)
            position += len(pcm)
            yield PcmChunk(
                heard.tobytes(),
                np.stack(codes) if codes else chunk.codes[:0],
                chunk.num_text_tokens,
                chunk.finish_reason,
                position,
                chunk.marks,
            )
