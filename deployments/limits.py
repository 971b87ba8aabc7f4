"""Measurements for admission: a queue's rate, and the number of concurrent streams that receive audio in time."""

from collections import deque

# Bounds for `Retry-After`. An earlier retry would fail again; a later one could miss a pool that has since grown.
_SHORTEST_S = 0.5
_LONGEST_S = 30.0
_WINDOW_S = 20.0  # period over which a rate counts events
# Estimate used before the first measurement.
_UNKNOWN_S = 1.0
# Lateness is judged over this period. A second period must agree, because a lost replica delays streams only once.
_PERIOD_S = 1.0
# A larger share of late chunks means too many streams. Below half of this share, the limit may rise.
_LATE_SHARE = 0.1
_LEAST_FEWER = 0.1  # share of streams by which the limit falls, or half the late share if that is larger
_MORE = 0.05  # share of streams by which the limit rises, but by at least one stream every two periods
_LEAST_MORE = 0.5


class Rate:
    """Events per second over a sliding window. All times come from one monotonic clock."""

    def __init__(self) -> None:
        self._times_s: deque[float] = deque()

    def count(self, now_s: float) -> None:
        self._times_s.append(now_s)
        self._drop_old(now_s)

    def per_second(self, now_s: float) -> float:
        """Return the events per second, or 0.0 if the window is empty. A new window starts at its first event."""
        self._drop_old(now_s)
        if not self._times_s:
            return 0.0
        return len(self._times_s) / min(_WINDOW_S, max(1.0, now_s - self._times_s[0]))

    def retry_after_s(self, ahead: int, now_s: float) -> float:
        """Return the `Retry-After` seconds for a client with `ahead` others ahead of it in the queue."""
        rate = self.per_second(now_s)
        return min(max((ahead + 1) / rate, _SHORTEST_S), _LONGEST_S) if rate else _UNKNOWN_S

    def _drop_old(self, now_s: float) -> None:
        while self._times_s and now_s - self._times_s[0] > _WINDOW_S:
            self._times_s.popleft()


class StreamLimit:
    """Limit on concurrent streams. Late chunks lower the limit in proportion to their share.

    The limit rises slowly while it is reached and few chunks are late. It cannot be predicted from the cost of one
    stream, because small batches cost more per stream. All times come from one monotonic clock.
    """

    def __init__(self, *, least: int) -> None:
        """Create a limit that never falls below `least` streams."""
        self._least = least
        self.streams: float | None = None  # None until a chunk has been late
        self._seen = self._late = 0  # chunks in this period
        self._most = 0  # maximum number of concurrent streams in this period
        self._since_s: float | None = None
        self._was_bad = self._was_reached = False

    def has_room(self, streams: int) -> bool:
        """Return whether one more stream may join `streams` running streams."""
        room = self.streams is None or streams + 1 <= self.streams
        self._was_reached |= not room
        return room

    def count_chunk(self, *, late: bool, streams: int, now_s: float) -> None:
        """Count a chunk that was delivered while `streams` streams were running."""
        self._seen += 1
        self._late += late
        self._most = max(self._most, streams)
        self._since_s = now_s if self._since_s is None else self._since_s
        if now_s - self._since_s >= _PERIOD_S:
            self._judge(self._late / self._seen, streams)
            self._seen = self._late = self._most = 0
            self._since_s = now_s

    def _judge(self, late_share: float, streams: int) -> None:
        is_bad = late_share > _LATE_SHARE
        has_shown = self.streams is None or streams <= self.streams  # the effect of the last change
        if is_bad and self._was_bad and has_shown:
            most = self._most if self.streams is None else min(self._most, self.streams)
            self.streams = max(float(self._least), most * (1.0 - max(_LEAST_FEWER, late_share / 2)))
        elif self.streams is not None and self._was_reached and late_share < _LATE_SHARE / 2:
            self.streams += max(_LEAST_MORE, _MORE * self.streams)
        self._was_bad, self._was_reached = is_bad, False
