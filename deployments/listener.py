"""Model of a listener's playback, shared by delivery and scheduling, and a timeout for slow readers."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Self, TypeVar

T = TypeVar("T")

# A stream releases its replica if its reader takes nothing for this long. It can later continue from its codes.
UNREAD_S = 10.0


@dataclass(slots=True)
class Listener:
    """Model of an unbuffered player. Playback starts with the first audio, and stalls whenever audio arrives late.

    Early audio never reduces the stall time, because the listener has already heard the stall. Times are seconds of
    one monotonic clock.
    """

    due_s: float | None = None  # time at which the player needs the next audio; None before the first audio
    audio_s: float = 0.0  # seconds of audio delivered so far
    stalled_s: float = 0.0  # seconds of silence since the first audio

    @classmethod
    def of(cls, *, background: bool, in_hand_s: float = 0.0) -> Self:
        """Return a listener with `in_hand_s` seconds of audio from another replica, by `time.monotonic()`.

        For `background` work, return a listener that never needs audio by a certain time.
        """
        if background:
            return cls(math.inf)
        return cls(time.monotonic() + in_hand_s) if in_hand_s else cls()

    @property
    def has_begun(self) -> bool:
        return self.due_s is not None

    def deliver(self, audio_s: float, *, now_s: float) -> float:
        """Count audio that is sent now. Returns the seconds that the player stalled before it; 0.0 for first audio."""
        due_s = now_s if self.due_s is None else self.due_s
        late_s = max(0.0, now_s - due_s)
        self.due_s = due_s + late_s + audio_s
        self.audio_s += audio_s
        self.stalled_s += late_s
        return late_s

    def postpone(self, taken_s: float) -> None:
        """Move the due time by the seconds that the reader took to ask for more audio, so that this is not a delay."""
        if self.due_s is not None:
            self.due_s += taken_s

    def reset_due(self, *, now_s: float) -> None:
        """Move the due time to now, because no stage could have produced audio earlier. The stall is not counted."""
        if self.due_s is not None:
            self.due_s = max(self.due_s, now_s)

    def deadline_s(self, now_s: float) -> float:
        """Return the time at which the player needs the next sample; `now_s` before the first delivery."""
        return now_s if self.due_s is None else self.due_s

    def lead_s(self, now_s: float) -> float:
        """Return the seconds of audio delivered but not yet played; negative while the player is stalled."""
        return self.deadline_s(now_s) - now_s


class ReaderTimeout:
    """Timeout for a generator's reader. Calls `pause` if UNREAD_S pass without a read, and `resume` on the next read.

    The generator calls `read` for each item that it yields, and again once its reader has taken the item. One timer
    serves the entire stream, because a timer per item would cost more than the item.
    """

    def __init__(self, pause: Callable[[], Awaitable[None]], resume: Callable[[], None] = lambda: None) -> None:
        self._pause, self._resume = pause, resume
        self._offered_s: float | None = None  # event loop time at which the current item was offered
        self._timer: asyncio.TimerHandle | None = None
        self._pausing: asyncio.Task[None] | None = None
        self.was_paused = False  # whether `pause` ran before the reader took the previous item

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._end_pause()

    async def read(self, next_item: Callable[[], Awaitable[T | None]], *, is_watched: bool = True) -> T | None:
        """Return the item to yield next. The timeout for the reader starts on return, unless `is_watched` is off.

        Returns None if `next_item` does.
        """
        self._offered_s = None
        self.was_paused = self._pausing is not None
        if self.was_paused:
            await self._end_pause()
        if (item := await next_item()) is not None and is_watched:
            self._offered_s = self._loop.time()
            if self._timer is None:
                self._timer = self._loop.call_at(self._offered_s + UNREAD_S, self._expire)
        return item

    async def _end_pause(self) -> None:
        if self._pausing is None:
            return
        pausing, self._pausing = self._pausing, None
        try:
            await asyncio.wait((pausing,))
        finally:  # also after a cancellation, because `aclose` cannot run twice
            self._resume()
            if not pausing.done():
                pausing.cancel()
                await asyncio.wait((pausing,))
        pausing.result()

    def _expire(self) -> None:
        self._timer = None
        if self._offered_s is None:
            return  # the next `read` starts the timer again
        if self._loop.time() < self._offered_s + UNREAD_S:
            self._timer = self._loop.call_at(self._offered_s + UNREAD_S, self._expire)
        else:
            self._pausing = asyncio.ensure_future(self._pause())
