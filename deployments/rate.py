"""How fast something happens, and how long a line in front of it takes."""

from collections import deque

# Told to a client whatever the estimate: sooner is no use, and later would keep it away from a pool that has grown.
_SHORTEST_S = 0.5
_LONGEST_S = 30.0
# While nothing has been measured.
_UNKNOWN_S = 1.0


class Rate:
    """Events per second over a sliding window. Times come from one monotonic clock."""

    def __init__(self, window_s: float = 20.0) -> None:
        self._window_s = window_s
        self._times_s: deque[float] = deque()

    def count(self, now_s: float) -> None:
        """One happened now."""
        self._times_s.append(now_s)
        self._forget(now_s)

    def per_second(self, now_s: float) -> float:
        """0.0 where the window holds none; early on, over the time since the first."""
        self._forget(now_s)
        if not self._times_s:
            return 0.0
        return len(self._times_s) / min(self._window_s, max(1.0, now_s - self._times_s[0]))

    def retry_after_s(self, ahead: int, now_s: float) -> float:
        """When a client should ask again that would stand behind `ahead` others in a line that moves at this rate."""
        rate = self.per_second(now_s)
        return min(max((ahead + 1) / rate, _SHORTEST_S), _LONGEST_S) if rate else _UNKNOWN_S

    def _forget(self, now_s: float) -> None:
        while self._times_s and now_s - self._times_s[0] > self._window_s:
            self._times_s.popleft()
