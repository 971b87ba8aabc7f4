"""How many streams a codec replica decodes at once: as many as it has measured that it can in real time."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

# The cost of decoding is a mean over about so much audio.
_MEMORY_S = 30.0
# Before so much audio is decoded nothing is known.
_FIRST_S = 2.0


class Places:
    """Streams enter in order while there is a place. All methods belong to one event loop."""

    def __init__(self, workers: int, *, max_use: float) -> None:
        """`max_use`: share of the workers that the streams may need. Near 1 one slow call makes a stream run dry."""
        self._workers, self._max_use = workers, max_use
        self._busy_s = 0.0  # of workers, for
        self._audio_s = 0.0  # so much audio: both fade together
        self._taken = 0
        self._line: deque[asyncio.Future[None]] = deque()

    @property
    def num_waiting(self) -> int:
        """Streams that wait for a place."""
        return len(self._line)

    @property
    def capacity(self) -> int | None:
        """Streams at once; None while nothing is known, one at least."""
        if self._audio_s < _FIRST_S:
            return None
        cost = self._busy_s / self._audio_s  # workers for one stream
        return max(1, int(self._max_use * self._workers / cost))

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

    def decoded(self, busy_s: float, audio_s: float) -> None:
        """Learn from a call that kept a worker busy for `busy_s` and gave `audio_s` of audio."""
        kept = max(0.0, 1.0 - audio_s / _MEMORY_S)
        self._busy_s = self._busy_s * kept + busy_s
        self._audio_s = self._audio_s * kept + audio_s
        self._admit()

    def _has_room(self) -> bool:
        return self.capacity is None or self._taken < self.capacity

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
