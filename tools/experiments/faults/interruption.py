"""What a listener had of a moment at which something behind the stream broke: pure functions of its trace."""

import itertools
import statistics
from dataclasses import dataclass

from loadtest.traces import Trace

SETTLED_S = 2.0  # a gap begins within this time after the moment


@dataclass(frozen=True, slots=True)
class Interruption:
    """One stream that was being delivered at that moment."""

    request_id: str | None
    delivered_s: float  # audio that its client had then
    buffered_s: float  # of it, what a player that began with the first sample had not played
    next_s: float  # from the moment to the next audio, less the usual time between two chunks; 0.0: no longer
    gap_s: float  # longest time without audio behind it, as much less
    heard_s: float  # how long such a player fell silent afterwards


def interruption(trace: Trace, moment_s: float) -> Interruption | None:
    """How a stream took it, at `moment_s` of its run's clock; None where it had not begun or was complete."""
    arrivals_s, samples = trace.playable
    if trace.layout is None or not arrivals_s or not arrivals_s[0] < moment_s < arrivals_s[-1]:
        return None
    pairs = list(itertools.pairwise(arrivals_s))
    usual_s = statistics.median(later - earlier for earlier, later in pairs)
    after = [
        later - max(earlier, moment_s)
        for earlier, later in pairs
        if later > moment_s and earlier < moment_s + SETTLED_S
    ]
    playback = trace.playback
    assert playback is not None
    late_s = [late_s for late_s, at_s in zip(playback.lateness_s, arrivals_s[1:], strict=True) if at_s > moment_s]
    had = max(total for total, at_s in zip(samples, arrivals_s, strict=True) if at_s <= moment_s)
    had_s = had / trace.layout.sample_rate
    return Interruption(
        request_id=trace.request_id,
        delivered_s=had_s,
        buffered_s=max(0.0, had_s - (moment_s - arrivals_s[0])),
        next_s=max(0.0, min(at_s for at_s in arrivals_s if at_s > moment_s) - moment_s - usual_s),
        gap_s=max(0.0, max(after) - usual_s),
        heard_s=sum(late for late in late_s if late > playback.sample_s),
    )
