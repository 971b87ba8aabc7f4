"""The clock for expiry of stored data. It is ignored until it is steady, because deletions cannot be undone."""

import time

_STEP_S = 5.0  # allowed drift between wall and monotonic clock from one reading to the next
_SETTLE_S = 600.0


class SteadyClock:
    """The wall clock, trusted once it has kept pace with the monotonic clock for a while. Read it every few seconds."""

    def __init__(self, *, shortest_s: float) -> None:
        """`shortest_s`: the shortest time after which data expires; waiting longer for the clock is useless."""
        self._settle_s = min(_SETTLE_S, shortest_s)
        self._offset_s: float | None = None
        self._steady_since_s = 0.0

    def now(self) -> float | None:
        """Seconds since 1970; None while the clock is not trusted, which includes the time after a start."""
        now_s, monotonic_s = time.time(), time.monotonic()
        offset_s = now_s - monotonic_s
        if self._offset_s is None or abs(offset_s - self._offset_s) > _STEP_S:
            self._steady_since_s = monotonic_s
        self._offset_s = offset_s
        return now_s if monotonic_s - self._steady_since_s >= self._settle_s else None
