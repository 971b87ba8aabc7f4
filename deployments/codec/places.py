"""How many streams a codec replica decodes at once: as many as it has seen that it can in time."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from deployments.stream_limit import StreamLimit


class Places:
    """Streams enter in order while there is a place. All methods belong to one event loop, times to one clock."""

    def __init__(self, *, max_late_s: float, limit: StreamLimit | None = None) -> None:
        """Chunks may be done `max_late_s` after their listener needs them. `limit` may know something already."""
        self._max_late_s = max_late_s
        self._limit = limit or StreamLimit(least=1)
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
        self._limit.delivered(late=late_s > self._max_late_s, streams=self._taken, now_s=now_s)
        self._admit()

    def _has_room(self) -> bool:
        return self._limit.has_room(self._taken)

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
