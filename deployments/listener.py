"""The listener of one stream, as seen by all stages that deliver or schedule audio, and the reader of its chunks."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Self, TypeVar

T = TypeVar("T")

# A reader that takes nothing for this long gives up its place: its stream later continues from its codes.
UNREAD_S = 10.0


@dataclass(slots=True)
class Listener:
    """A listener's player, which has no buffer: it begins with the first audio, and runs dry until late audio comes.

    Audio in time never makes up for a stall, because the listener has heard the stall. Times are seconds of one
    monotonic clock.
    """

    due_s: float | None = None  # when the next audio is needed; None before the first
    audio_s: float = 0.0  # delivered so far
    stalled_s: float = 0.0  # silence between the first audio and the latest

    @classmethod
    def of(cls, *, background: bool, in_hand_s: float = 0.0) -> Self:
        """A listener who has `in_hand_s` seconds of audio that another replica made, by `time.monotonic()`; or instead
        the store of a job, for which nothing is ever due.
        """
        if background:
            return cls(math.inf)
        return cls(time.monotonic() + in_hand_s) if in_hand_s else cls()

    @property
    def has_begun(self) -> bool:
        return self.due_s is not None

    def deliver(self, audio_s: float, *, now_s: float) -> float:
        """Count audio that leaves now. Returns how long the player was dry before it; 0.0 for the first audio."""
        due_s = now_s if self.due_s is None else self.due_s
        late_s = max(0.0, now_s - due_s)
        self.due_s = due_s + late_s + audio_s
        self.audio_s += audio_s
        self.stalled_s += late_s
        return late_s

    def postpone(self, taken_s: float) -> None:
        """The reader took this long to ask for more: the listener has not waited, and no audio was late."""
        if self.due_s is not None:
            self.due_s += taken_s

    def wait(self, *, now_s: float) -> None:
        """No audio could come until now: the player may have run dry, and no stage is to blame."""
        if self.due_s is not None:
            self.due_s = max(self.due_s, now_s)

    def deadline_s(self, now_s: float) -> float:
        """When the next sample is due: now, for a stream that has delivered nothing."""
        return now_s if self.due_s is None else self.due_s

    def lead_s(self, now_s: float) -> float:
        """Audio that is delivered and not played yet; negative while the player is dry."""
        return self.deadline_s(now_s) - now_s


class ReaderWatch:
    """Calls `pause` when the reader of a generator has taken nothing for UNREAD_S, and `resume` when it reads again.

    The generator gets each item that it yields by `read`, and calls `read` again when its reader has taken that item.
    One timer serves the stream, because a timer for each item costs more than the item.
    """

    def __init__(self, pause: Callable[[], Awaitable[None]], resume: Callable[[], None] = lambda: None) -> None:
        self._pause, self._resume = pause, resume
        self._offered_s: float | None = None  # since when an item waits, by the clock of the loop
        self._timer: asyncio.TimerHandle | None = None
        self._pausing: asyncio.Task[None] | None = None
        self.was_away = False  # whether `pause` was called before the reader took the item before the latest

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._end_pause()

    async def read(self, next_item: Callable[[], Awaitable[T | None]], *, is_watched: bool = True) -> T | None:
        """The item that the generator yields next. It waits for the reader from then on, without a limit unless
        `is_watched`.
        """
        self._offered_s = None
        self.was_away = self._pausing is not None
        if self.was_away:
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
        finally:  # also if the waiting task is cancelled, because a closing cannot begin a second time
            self._resume()
            if not pausing.done():
                pausing.cancel()
                await asyncio.wait((pausing,))
        pausing.result()

    def _expire(self) -> None:
        self._timer = None
        if self._offered_s is None:
            return  # the next `read` sets it again
        if self._loop.time() < self._offered_s + UNREAD_S:
            self._timer = self._loop.call_at(self._offered_s + UNREAD_S, self._expire)
        else:
            self._pausing = asyncio.ensure_future(self._pause())
