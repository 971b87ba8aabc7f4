"""How many streams a codec replica decodes at once: as many as it has seen that it can in time."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

# Fewer at once when chunks come late, one more at a time while they do not: neither more often than this.
_PERIOD_S = 1.0
_FEWER = 0.8


class Places:
    """Streams enter in order while there is a place. All methods belong to one event loop, times to one clock.

    What decoding costs is no guide: a worker that decodes few streams makes small batches, and seems to be dear.
    """

    def __init__(self, *, max_late_s: float) -> None:
        """Chunks may be done `max_late_s` after their listener needs them."""
        self._max_late_s = max_late_s
        self.limit: int | None = None  # streams at once; None: nothing has been late yet
        self._changed_s = 0.0
        self._taken = 0
        self._line: deque[asyncio.Future[None]] = deque()

    @property
    def num_waiting(self) -> int:
        """Streams that wait for a place."""
        return len(self._line)

    @asynccontextmanager
    async def take(self, *, at_once: bool) -> AsyncIterator[None]:
        """A place for as long as the context lasts, at the end of the line, or whether there is one or not."""
        if at_once or (not self._line and self._has_room()):
            self._taken += 1
        else:
            await self._wait()
        try:
            yield
        finally:
            self._taken -= 1
            self._admit()

    def decoded(self, late_s: float, *, now_s: float) -> None:
        """Learn from a call whose most urgent chunk was done `late_s` after it was needed."""
        if late_s > self._max_late_s:
            self._lower(now_s)
        elif self.limit is not None and self._taken >= self.limit and now_s - self._changed_s >= _PERIOD_S:
            self.limit, self._changed_s = self.limit + 1, now_s
            self._admit()

    def _lower(self, now_s: float) -> None:
        if self.limit is not None and (self._taken > self.limit or now_s - self._changed_s < _PERIOD_S):
            self._changed_s = now_s if self._taken > self.limit else self._changed_s
            return  # the last change has not shown yet
        self.limit, self._changed_s = max(1, int(_FEWER * self._taken)), now_s

    def _has_room(self) -> bool:
        return self.limit is None or self._taken < self.limit

    async def _wait(self) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._line.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # both came at once: the place goes to the next one
                self._taken -= 1
                self._admit()
            elif turn in self._line:
                self._line.remove(turn)
            raise

    def _admit(self) -> None:
        while self._line and self._has_room():
            turn = self._line.popleft()
            if not turn.done():
                self._taken += 1
                turn.set_result(None)
