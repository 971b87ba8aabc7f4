"""Redrawing: another attempt, once and with another seed, at speech that ended badly before any of it was sent.

Four places redraw, each where it alone knows that nothing was sent:

- `peek_or_redraw` for `Admission`: the utterance, if its speech is over with its first samples. All segments change.
- `LongText` a segment after the first audio, if it ends badly while it is read ahead. The others stay.
- `respond` an answer that is sent whole, after its end. Its bytes, tail and usage are thrown away.
- `SegmentMaker` a segment of a job, after its end, before it is stored.

The guard is one: `Utterance.redraws`, which `Utterance.redrawn` clears for the second attempt.
"""

import logging
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from deployments.protocol import FinishReason, PcmChunk, SynthesisRequest
from deployments.serving import metrics

if TYPE_CHECKING:
    from serve_app.speech.segments import Utterance

logger = logging.getLogger(__name__)

_SEED_BITS = 53  # JavaScript's numbers keep so many, and a client may send the seed back


def draw_seed() -> int:
    """A seed for a request whose client gave none."""
    return secrets.randbits(_SEED_BITS)


def ended_badly(reason: FinishReason | None) -> bool:
    """Whether speech is over, and not as it should be."""
    return reason is not None and not reason.is_good


def redrawn(request: SynthesisRequest, reason: FinishReason | None, *, seed: int) -> SynthesisRequest:
    """The request for the second attempt, which is counted and logged here.

    `reason`: why the first attempt ended, None if it ended without samples.
    """
    metrics.redrawn(reason, model=request.model)
    logger.warning("request %s ended before it was sent (%s): another seed", request.request_id, reason)
    return replace(request, seed=seed)


class PeekedSpeech:
    """Speech that was read as far as its first samples. `next` gives all of its chunks, these first."""

    def __init__(self, chunks: AsyncGenerator[PcmChunk, None], *, seed: int | None = None) -> None:
        """The chunks of the start get the `seed`, if it is not the request's."""
        self._chunks, self._seed = chunks, seed
        self._peeked: deque[PcmChunk] = deque()

    @property
    def has_failed(self) -> bool:
        """Whether chunks were read, and the last of them ended speech: before any samples, or badly."""
        return ended_badly(self.reason) or (bool(self._peeked) and not self._peeked[-1].pcm)

    @property
    def reason(self) -> FinishReason | None:
        return self._peeked[-1].finish_reason if self._peeked else None

    async def peek(self) -> None:
        """Read up to the first samples."""
        while not (self._peeked and self._peeked[-1].pcm) and (chunk := await anext(self._chunks, None)) is not None:
            self._peeked.append(chunk if self._seed is None else replace(chunk, seed=self._seed))

    async def next(self) -> PcmChunk | None:
        return self._peeked.popleft() if self._peeked else await anext(self._chunks, None)


async def peek_or_redraw(
    utterance: "Utterance",
    speak: Callable[["Utterance"], AsyncGenerator[PcmChunk, None]],
    calls: AsyncExitStack,
) -> PeekedSpeech:
    """Speech with its first samples, redrawn if it is over with them, badly, and the utterance allows it.

    `calls` closes the calls that `speak` makes.
    """

    async def peeked(utterance: "Utterance", *, new_seed: int | None = None) -> PeekedSpeech:
        chunks = await calls.enter_async_context(aclosing(speak(utterance)))
        speech = PeekedSpeech(chunks, seed=new_seed)
        await speech.peek()
        return speech

    speech = await peeked(utterance)
    if not (utterance.redraws and speech.has_failed):
        return speech
    second = utterance.redrawn(speech.reason)
    return await peeked(second, new_seed=second.synthesis.seed)
