"""How far sequences go ahead of their listeners: which ones sit out of a step, and whose frames wait to be sent.

Every sequence with a row takes part in a step, with three exceptions.

1. Sequences far ahead of their listeners sit out while another sequence waits for its first frame or for a frame that
   is nearly due, because a step with fewer sequences is shorter. They then keep their rows for longer. So once half of
   the rows are taken, they sit out for frames that are nearly due only.
2. A sequence sits out while its next frame needs text that the client has not written yet.
3. Background sequences sit out wherever others would, and beyond a number that follows the load: they are parked, which
   means that they keep their rows and KV blocks. They never make others sit out.
"""

import math
from collections.abc import Collection

from deployments.talker.state.sequence import Sequence

# A frame is nearly due if the listener has less audio in hand than this time, and than this number of steps takes.
_NEARLY_DUE_STEPS = 3
_NEARLY_DUE_S = 0.25
# Frames of a sequence may wait for more of them if its listener has more audio in hand than this.
_HOLDING_LEAD_S = 0.41


class Pacing:
    """Chooses the sequences of each step among those that have a row."""

    def __init__(self, *, max_num_seqs: int, max_lead_s: float) -> None:
        """`max_lead_s`: with less audio in hand no sequence sits out for another one."""
        self._max_num_seqs, self._max_lead_s = max_num_seqs, max_lead_s
        self._scheduled_s = self._step_s = 0.0  # when the last step began, and how long the step before took

    def due(self, running: Collection[Sequence], now_s: float, most_background: int) -> list[Sequence]:
        """The sequences of the step that begins now. Beside others it has at most `most_background` background
        sequences, the oldest. Call it once a step, because the time between two calls is the duration of a step.
        """
        self._step_s, self._scheduled_s = now_s - self._scheduled_s, now_s
        background = [sequence for sequence in running if sequence.is_background]
        ready = [sequence for sequence in running if not sequence.awaits_text and not sequence.is_background]
        if not ready or (self._max_lead_s == math.inf and not background):
            return background + ready
        leads = [sequence.listener.lead_s(now_s) for sequence in ready]
        if not self._has_urgent(ready, leads, has_rows=2 * (len(running) - len(background)) <= self._max_num_seqs):
            return background[:most_background] + ready
        due = [sequence for sequence, lead_s in zip(ready, leads, strict=True) if lead_s < self._max_lead_s]
        return due or ready

    def _has_urgent(self, ready: list[Sequence], leads: list[float], *, has_rows: bool) -> bool:
        """Whether one of these waits for a frame for which others sit out."""
        nearly_due_s = min(_NEARLY_DUE_S, _NEARLY_DUE_STEPS * self._step_s)
        return any(
            lead_s < nearly_due_s if sequence.listener.has_begun else has_rows
            for sequence, lead_s in zip(ready, leads, strict=True)
        )


def may_wait(sequence: Sequence, now_s: float) -> bool:
    """Whether frames that were not sent may wait for the next ones: the listener has audio, and they will come."""
    goes_on = sequence.finish_reason is None and not sequence.awaits_text
    return goes_on and sequence.sent_lead_s(now_s) > _HOLDING_LEAD_S
