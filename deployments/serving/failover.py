"""Failover of a stream: if its replica is lost, another replica continues from its codes.

The reader of a stream keeps the stream's codes. After a loss, the reader sends the codes with the same request to
another replica. Sampling depends only on seed and frame, so that replica makes the codes the lost one would have made.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from typing import Generic, TypeVar

import numpy as np

from deployments.errors import Moved, NotReady, Overloaded, ReplicaLost, TalkrayError
from deployments.listener import Listener, ReaderTimeout
from deployments.protocol import ClonePrompt, FrameChunk, Marks, PcmChunk, Progress, SynthesisRequest
from deployments.serving import metrics

logger = logging.getLogger(__name__)

_FIRST_DELAY_S = 0.02  # before the second retry; the first retry is immediate
_MAX_DELAY_S = 0.5
# A stream fails if no new frame arrives within _GIVE_UP_S of a loss, or after _MAX_LOSSES dead replicas. Moves, and
# calls that Serve cancelled, do not count. A stream also fails if _MAX_FUTILE_LOSSES replicas in a row die without
# producing a new frame, because the request itself may be crashing them.
_GIVE_UP_S = 30.0
_MAX_LOSSES = 12
_MAX_FUTILE_LOSSES = 3

ReplicaChunk = TypeVar("ReplicaChunk", FrameChunk, PcmChunk)  # chunks received from the replica
ReaderChunk = TypeVar("ReaderChunk", FrameChunk, PcmChunk)  # chunks given to the reader


class ReceivedProgress:
    """The part of a stream that its reader has received. Another replica continues from here."""

    def __init__(self, earlier: Progress | None = None) -> None:
        """Start with `earlier`, the part that has already been received."""
        self._has_attempt = False
        self._listener = Listener.of(background=False, in_hand_s=0.0 if earlier is None else earlier.in_hand_s)
        self._codes = [] if earlier is None else [earlier.codes]
        self._clone_prompt: ClonePrompt | None = None
        self.samples = 0 if earlier is None else earlier.samples

    def add(self, chunk: FrameChunk | PcmChunk, samples: int) -> None:
        """Add a chunk. `samples` is the number of samples delivered up to the end of this chunk."""
        if len(chunk.codes):
            self._codes.append(chunk.codes)
        self._clone_prompt = chunk.clone_prompt or self._clone_prompt
        self.samples = samples

    def deliver(self, audio_s: float) -> None:
        """Count `audio_s` seconds of audio that are being sent to the listener now."""
        if audio_s:
            self._listener.deliver(audio_s, now_s=time.monotonic())

    def next_request(self, request: SynthesisRequest) -> SynthesisRequest:
        """Return the request for the rest of the stream. Each call begins a new attempt.

        From the second attempt on, the request sets `is_retry`, as the previous replica may be hung. A clone prompt
        made by a replica replaces the recording.
        """
        is_retry = self._has_attempt
        self._has_attempt = True
        if request.reference is not None:
            request = replace(request, reference=request.reference.with_prompt(self._clone_prompt))
        return replace(request, resume=self.progress, is_retry=is_retry)

    @property
    def progress(self) -> Progress | None:
        """The received part; None before the first frame."""
        if not self._codes:
            return None
        in_hand_s = max(0.0, self._listener.lead_s(time.monotonic()))
        return Progress(np.concatenate(self._codes), self.samples, in_hand_s)


class ReplicaStream(ABC, Generic[ReplicaChunk, ReaderChunk]):
    """Stream produced by replicas. Subclasses request chunks from a replica and convert each one for the reader."""

    def __init__(self, request_id: str, lost: type[ReplicaLost], *, is_background: bool = False) -> None:
        """Create a stream. `lost` is the error for a lost replica of the called pool."""
        self.request_id, self.lost, self.is_background = request_id, lost, is_background

    @abstractmethod
    def call(self) -> AsyncGenerator[ReplicaChunk, None]:
        """Call a replica for the chunks that follow those received."""

    @abstractmethod
    def receive(self, chunk: ReplicaChunk) -> ReaderChunk | None:
        """Return the chunk for the reader, or None. Stores the progress that the next `call` needs."""


@dataclass(frozen=True, slots=True)
class Handover:
    """A stream's move from one replica to the next."""

    reason: str
    began_s: float  # time of the loss, from time.monotonic()
    is_loss: bool = True  # False if the call was closed because the reader paused


class AttemptStage(Enum):
    """A stream's progress at the most recently called replica."""

    CALLED = auto()
    ACCEPTED = auto()
    PROGRESSED = auto()  # a new frame or the end has arrived


class Attempts:
    """A stream's retry policy: decides after each loss whether and when to retry. Logs each switch of replicas."""

    def __init__(self, lost: type[ReplicaLost], request_id: str, *, most_losses: int = _MAX_LOSSES) -> None:
        """Create a policy. `lost` is the error for a lost replica of the called pool."""
        self._lost, self._request_id, self._most_losses = lost, request_id, most_losses
        self._stage = AttemptStage.CALLED
        self._handover: Handover | None = None  # set between a loss and the next new frame
        self._num_losses = 0
        self._num_futile = 0  # consecutive losses without a new frame in between
        self._delay_s = 0.0  # before the next attempt
        self._unreported_losses: Marks = ()
        self.has_ended = False  # whether the last chunk has arrived

    def record_progress(self, chunk: FrameChunk | PcmChunk) -> None:
        """Record a chunk. A chunk without codes shows that the replica has accepted the stream."""
        self.has_ended = chunk.finish_reason is not None
        if len(chunk.codes) or self.has_ended:
            if self._handover is not None:
                self._report(self._handover)
            self._stage = AttemptStage.PROGRESSED
            self._handover = None
            self._delay_s = 0.0
        elif self._stage is AttemptStage.CALLED:
            self._stage = AttemptStage.ACCEPTED

    def with_losses(self, item: ReaderChunk) -> ReaderChunk:
        """Return `item` with all losses not yet reported at the start of its trail."""
        if not self._unreported_losses:
            return item
        trail = self._unreported_losses + item.trail
        self._unreported_losses = ()
        return replace(item, trail=trail)

    def resume(self) -> None:
        """Prepare for a new call after the reader paused and the previous call was closed."""
        self._stage = AttemptStage.CALLED
        self._handover = Handover("its reader returned", time.monotonic(), is_loss=False)

    def delay_after(self, error: TalkrayError) -> float:
        """Record a failure. Returns the seconds until the next attempt. Raises `error` or `lost` if none remain."""
        now_s = time.monotonic()
        died = isinstance(error, self._lost)
        if self._handover is None:
            if not died and not isinstance(error, Moved):
                raise error  # rejected at the start, or lost in a later stage
            self._handover = Handover(f"{type(error).__name__}: {error}", now_s)
        is_loss = died and self._stage is not AttemptStage.CALLED
        self._num_losses += is_loss
        self._num_futile = 0 if self._stage is AttemptStage.PROGRESSED else self._num_futile + is_loss
        self._stage = AttemptStage.CALLED
        waited_s = now_s - self._handover.began_s
        if waited_s > _GIVE_UP_S or self._num_losses >= self._most_losses or self._num_futile >= _MAX_FUTILE_LOSSES:
            reason = f"given up after {self._num_losses} losses; the last outage began with: {self._handover.reason}"
            raise self._lost(reason, error.beside if isinstance(error, ReplicaLost) else 0) from error
        delay_s = self._delay_s
        self._delay_s = min(max(2 * delay_s, _FIRST_DELAY_S), _MAX_DELAY_S)
        return delay_s

    def _report(self, handover: Handover) -> None:
        gap_s = time.monotonic() - handover.began_s
        if not handover.is_loss:
            logger.info("request %s continues %.3f s after %s", self._request_id, gap_s, handover.reason)
            return
        lost = self._lost.__name__
        self._unreported_losses += ((lost, time.time_ns() - int(gap_s * 1e9)),)
        metrics.FAILOVERS.record(1, reason=lost)
        metrics.FAILOVER_GAP.record(max(gap_s, 1e-6), reason=lost)
        logger.warning("request %s continues %.3f s after %s: %s", self._request_id, gap_s, lost, handover.reason)


async def with_failover(stream: ReplicaStream[ReplicaChunk, ReaderChunk]) -> AsyncGenerator[ReaderChunk, None]:
    """Yield the chunks of a stream until its last chunk, from as many replicas as necessary.

    If the replica raises `lost` or Moved, another replica is called. NotReady and Overloaded are then retried too.
    Other errors are raised, and `lost` if all attempts fail. The stream ends early if `receive` returns a finish reason
    for a chunk without one.

    If the reader takes nothing for UNREAD_S, the call is closed. Another call starts when the reader continues. The
    first item has no such limit, because a reader that prefetches takes only the first item.
    """
    # The job queue decides whether to retry a lost segment, because the segment may crash replicas.
    most_losses = 1 if stream.is_background else _MAX_LOSSES
    attempts = Attempts(stream.lost, stream.request_id, most_losses=most_losses)
    has_begun = False
    while not attempts.has_ended:
        try:
            async with aclosing(stream.call()) as chunks, ReaderTimeout(chunks.aclose, attempts.resume) as reader:
                next_item = partial(_next_item, stream, chunks, attempts, reader)
                while (item := await reader.read(next_item, is_watched=has_begun)) is not None:
                    has_begun = True
                    yield item
                    if item.finish_reason is not None and not attempts.has_ended:
                        return
        except (ReplicaLost, NotReady, Overloaded) as error:
            if not attempts.has_ended:  # a loss after the last chunk is harmless
                await asyncio.sleep(attempts.delay_after(error))


async def _next_item(
    stream: ReplicaStream[ReplicaChunk, ReaderChunk],
    chunks: AsyncGenerator[ReplicaChunk, None],
    attempts: Attempts,
    reader: ReaderTimeout,
) -> ReaderChunk | None:
    """Return the reader's next chunk; None after the last one, or if the call was closed because the reader paused.

    Raises `lost` if the chunks end before the last one has arrived.
    """
    if reader.was_paused:
        return None
    async for chunk in chunks:
        if attempts.has_ended:
            continue  # let the call end by itself, because Serve would cancel the request's other calls with it
        attempts.record_progress(chunk)
        if (item := stream.receive(chunk)) is not None:
            return attempts.with_losses(item)
    if not attempts.has_ended:
        raise stream.lost("the stream ended without its last chunk")
    return None
