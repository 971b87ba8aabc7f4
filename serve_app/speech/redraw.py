"""Another attempt at speech that ended badly before any of it was sent: once, with another seed.

Three places know that nothing was sent, and ask for it here: `SpeechStart` of speech that is over with its first
chunk, `LongText` of a later segment that it has heard ahead, and `WholeResponse` of a whole answer.
"""

import logging
import secrets
from dataclasses import replace
from typing import TypeVar

from deployments.protocol import FinishReason, SynthesisRequest
from deployments.serving import metrics
from serve_app.speech.segments import UtteranceRequest

logger = logging.getLogger(__name__)

Asked = TypeVar("Asked", bound=SynthesisRequest)

_SEED_BITS = 53  # JavaScript's numbers keep so many, and a client may send the seed back


def draw_seed() -> int:
    """A seed for a request whose client gave none."""
    return secrets.randbits(_SEED_BITS)


def ended_badly(reason: FinishReason | None) -> bool:
    """Whether speech is over, and not as it should be."""
    return reason is not None and not reason.is_good


def redraw(request: Asked, reason: FinishReason | None, seed: int, *, model: str) -> Asked:
    """The request of another attempt, which is counted and logged. There is no third one.

    `reason`: why the first attempt ended, None if it ended without samples. `model`: the name of one of several.
    """
    metrics.redrawn(reason, model=model)
    logger.warning("request %s ended before it was sent (%s): another seed", request.request_id, reason)
    again = replace(request, seed=seed)
    return replace(again, redraws=False) if isinstance(again, UtteranceRequest) else again
