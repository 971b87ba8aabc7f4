"""Pauses of the writer of a live text: silence, into which the sound fades and out of which it comes."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

import numpy as np

from deployments.playback import PlaybackClock
from deployments.protocol import PcmChunk
from serve_app.speech.segments import heed

_FADE_S = 0.01
_SAMPLE_BYTES = 2
# So long before a player that began with the first audio runs dry, the end of the sound goes to it.
_MARGIN_S = 0.06


async def without_clicks(
    chunks: AsyncGenerator[PcmChunk, None], sample_rate: int, *, may_pause: Callable[[], bool]
) -> AsyncGenerator[PcmChunk, None]:
    """`chunks`, whose last 10 ms are held back as long as they `may_pause`: if so, they end the sound softly.

    Speech that is not interrupted comes as it is, sample by sample.
    """
    size = int(_FADE_S * sample_rate) * _SAMPLE_BYTES
    clock, held, last, is_silent = PlaybackClock(), b"", None, False
    coming: asyncio.Future[PcmChunk | None] | None = None
    try:
        while True:
            coming = asyncio.ensure_future(anext(chunks, None))
            coming.add_done_callback(heed)
            if held and last is not None:
                await asyncio.wait((coming,), timeout=max(0.0, clock.lead_s(time.monotonic()) - _MARGIN_S))
                if not coming.done() and may_pause():
                    yield replace(last, pcm=_faded(held, np.linspace(1, 0, len(held) // _SAMPLE_BYTES)))
                    held, is_silent = b"", True
            chunk = await coming
            if chunk is None:
                return
            pcm = chunk.pcm
            if is_silent and pcm:
                pcm, is_silent = _faded(pcm[:size], np.linspace(0, 1, min(size, len(pcm)) // 2)) + pcm[size:], False
            pcm, held = held + pcm, b""
            if chunk.finish_reason is None and may_pause():
                pcm, held = pcm[:-size], pcm[-size:]
            clock.deliver(len(pcm) / _SAMPLE_BYTES / sample_rate, now_s=time.monotonic())
            last = replace(chunk, pcm=b"", codes=chunk.codes[:0], marks=())
            yield replace(chunk, pcm=pcm)
    finally:
        try:
            if coming is not None and not coming.done():
                coming.cancel()
                await asyncio.wait((coming,))
        finally:  # also where the waiting task is cancelled; a task that still runs has been cancelled itself
            if coming is None or coming.done():
                await chunks.aclose()


def _faded(pcm: bytes, gains: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> bytes:
    return (np.frombuffer(pcm, "<i2") * gains).astype("<i2").tobytes()
