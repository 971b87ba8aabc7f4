"""Event loops and engines on a clock that stands still while they work: hours pass in no time, and always the same."""

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import pytest

from tests.clock import Clock

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock, self._turns = clock, 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Sockets first. If none is ready, the time of the next timer has come."""
        self._turns += 1
        assert self._turns < 400_000, "this loop goes round for ever"
        if (ready := super().select(0)) or timeout is not None:
            self._clock.now_s += 0.0 if ready else timeout or 0.0
            return ready
        return super().select(5.0) or pytest.fail("nothing will ever wake this loop")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Without threads: what goes to an executor is done at once. It sets `call_s` to the time that it would take."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(_Selector(clock))
        self.time = clock.monotonic  # type: ignore[method-assign]
        self.call_s = 0.0

    def run_in_executor(self, executor: object, func: Callable[..., T], *args: Any) -> "asyncio.Future[T]":  # type: ignore[override]
        done: asyncio.Future[T] = self.create_future()
        try:
            finish: Callable[[], None] = partial(done.set_result, func(*args))
        except Exception as error:
            finish = partial(done.set_exception, error)
        call_s, self.call_s = self.call_s, 0.0
        self.call_later(call_s, lambda: done.done() or finish())
        return done


def virtual_clock(monkeypatch: pytest.MonkeyPatch, now_s: float = 1000.0) -> Clock:
    """The time of all modules from now on. The wall clock is 9,000 seconds ahead of it."""
    clock = Clock(now_s)
    monkeypatch.setattr(time, "monotonic", clock)
    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: round(clock.now_s * 1e9))
    monkeypatch.setattr(time, "time", lambda: clock.now_s + 9000)
    monkeypatch.setattr(time, "time_ns", lambda: round((clock.now_s + 9000) * 1e9))
    return clock


def run_virtual(clock: Clock, work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(clock)) as runner:
        return runner.run(work)
