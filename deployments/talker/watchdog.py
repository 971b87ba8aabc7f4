"""A thread beside the engine that says it is alive, and ends the process when a step does not."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from deployments.serving.starvation import ThreadWork

logger = logging.getLogger(__name__)

_PERIOD_S = 0.25
# A step on a GPU takes milliseconds. On a CPU one may take long, but it uses the processor all the time.
_LONGEST_STEP_S = {"cuda": 1.5, "cpu": 60.0}
_LONGEST_IDLENESS_S = 1.25
EXIT_CODE = 70


class Watchdog:
    """Watches the thread that constructs it."""

    def __init__(
        self, device_type: str, alive: Callable[[], None], *, give_up: Callable[[int], object] = os._exit
    ) -> None:
        """`alive` is called from the watchdog's thread four times a second."""
        self._longest_step_s = _LONGEST_STEP_S.get(device_type, _LONGEST_STEP_S["cpu"])
        self._alive, self._give_up = alive, give_up
        self._work = ThreadWork()
        self._step_began_s: float | None = None
        self._ended = threading.Event()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around work that must not take forever."""
        self._step_began_s = time.monotonic()
        try:
            yield
        finally:
            self._step_began_s = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """The watchdog's thread, for as long as there are steps."""
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(_PERIOD_S):
            began_s, now_s = self._step_began_s, time.monotonic()
            idle_s = self._work.idle_s(now_s)
            if began_s is not None:
                self._judge(now_s - began_s, min(now_s - began_s, idle_s))
            self._alive()

    def _judge(self, step_s: float, idle_s: float) -> None:
        if step_s > self._longest_step_s or idle_s > _LONGEST_IDLENESS_S:
            logger.error("a step hangs: it takes %.1f s, the last %.1f s without work; giving up", step_s, idle_s)
            self._give_up(EXIT_CODE)
