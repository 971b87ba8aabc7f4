"""How many streams at once come in time: learned from those that came late."""

from dataclasses import dataclass

# What is late is judged over this time; a second such time must agree, since a replica that dies delays streams once.
_PERIOD_S = 1.0
# Late beyond this share: too many streams. Fewer than half of it: one more may be tried.
_LATE_SHARE = 0.2
_FEWER = 0.85
_MORE = 0.05


@dataclass(slots=True)
class _Share:
    seen: int = 0
    late: int = 0

    @property
    def value(self) -> float:
        return self.late / self.seen if self.seen else 0.0


class StreamLimit:
    """Falls by a seventh while too much is late, rises slowly while it is reached and nothing is.

    What a stream costs is no guide: few streams make small batches, and small batches look dear.
    Times come from one monotonic clock.
    """

    def __init__(self, *, least: int) -> None:
        """It never falls below `least`."""
        self._least = least
        self.streams: float | None = None  # None: nothing has been late yet
        self._beginnings, self._chunks = _Share(), _Share()
        self._since_s: float | None = None
        self._was_bad = self._was_reached = False

    def has_room(self, streams: int) -> bool:
        """Whether one more may join so many."""
        room = self.streams is None or streams + 1 <= self.streams
        self._was_reached |= not room
        return room

    def begun(self, *, late: bool, streams: int, now_s: float) -> None:
        """The first audio of one of `streams` came."""
        self._count(self._beginnings, late, streams, now_s)

    def delivered(self, *, late: bool, streams: int, now_s: float) -> None:
        """A later chunk came."""
        self._count(self._chunks, late, streams, now_s)

    def _count(self, share: _Share, late: bool, streams: int, now_s: float) -> None:
        share.seen += 1
        share.late += late
        self._since_s = now_s if self._since_s is None else self._since_s
        if now_s - self._since_s >= _PERIOD_S:
            self._judge(max(self._beginnings.value, self._chunks.value), streams)
            self._beginnings, self._chunks, self._since_s = _Share(), _Share(), now_s

    def _judge(self, late_share: float, streams: int) -> None:
        is_bad = late_share > _LATE_SHARE
        has_shown = self.streams is None or streams <= self.streams  # the last change
        if is_bad and self._was_bad and has_shown:
            self.streams = max(float(self._least), _FEWER * streams)
        elif self.streams is not None and self._was_reached and late_share < _LATE_SHARE / 2:
            self.streams += max(1.0, _MORE * self.streams)
        self._was_bad, self._was_reached = is_bad, False
