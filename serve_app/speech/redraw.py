"""Another attempt at speech that ended badly before any of it was sent: once, with another seed.

Four places make it, because they know that nothing was sent: `Admission` where speech is over with its first chunk,
`LongText` with a later segment that it has heard ahead, `SpeechService.respond` with an answer that is sent whole, and
`SegmentMaker` with a segment of a job.
"""

import logging
import secrets
from dataclasses import replace

from deployments.protocol import FinishReason, SynthesisRequest
from deployments.serving import metrics

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
