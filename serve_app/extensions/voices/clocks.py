"""Clock for expiring stored data. It waits until it is steady, because deletions cannot be undone."""

import time

_STEP_S = 5.0  # maximum drift between the wall clock and the monotonic clock from one reading to the next
_SETTLE_S = 600.0


class SteadyClock:
    """Wall clock that returns a time only after it has kept pace with the monotonic clock for up to ten minutes.

    Call `now` every few seconds.
    """

    def __init__(self, *, shortest_s: float) -> None:
        """`shortest_s` is the shortest lifetime of any data, in seconds. The clock never waits longer than that."""
        self._settle_s = min(_SETTLE_S, shortest_s)
        self._offset_s: float | None = None
        self._steady_since_s = 0.0

    def now(self) -> float | None:
        """Return the seconds since 1970, or None while the clock is not steady yet, for example just after startup."""
        now_s, monotonic_s = time.time(), time.monotonic()
        offset_s = now_s - monotonic_s
        if self._offset_s is None or abs(offset_s - self._offset_s) > _STEP_S:
            self._steady_since_s = monotonic_s
        self._offset_s = offset_s
        return now_s if monotonic_s - self._steady_since_s >= self._settle_s else None
