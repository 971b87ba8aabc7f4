"""The threads that decode, and whether one of them hangs."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from deployments.codec.batch import out_of_memory
from deployments.errors import CodecLost
from deployments.serving.starvation import ThreadWork

CHECK_S = 0.25
# A thread that decodes on a CPU uses it all the time. On a GPU it may wait, but no call takes nearly as long.
LONGEST_IDLENESS_S = 1.25
_LONGEST_GPU_CALL_S = 1.5

P = ParamSpec("P")
T = TypeVar("T")


class Workers:
    """Runs calls in threads. Once a call hangs, it and all others raise CodecLost: Python cannot end a thread."""

    def __init__(self, count: int, *, on_gpu: bool) -> None:
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="codec")
        self._on_gpu = on_gpu
        self.hang = False

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of a call; raises what it raises."""
        watched = _Watched()
        running = asyncio.get_running_loop().run_in_executor(self._threads, watched.run, lambda: call(*args, **kwargs))
        while not running.done():
            if self.hang or watched.hangs(on_gpu=self._on_gpu):
                self.hang = True
                raise CodecLost("a decoder thread of this codec replica hangs")
            await asyncio.wait((running,), timeout=CHECK_S)
        try:
            return running.result()
        except (MemoryError, RuntimeError) as error:
            raise out_of_memory(error) or error from error


class _Watched:
    """One call, seen from outside."""

    def __init__(self) -> None:
        self._work: ThreadWork | None = None  # while it runs
        self._began_s = 0.0

    def run(self, call: Callable[[], T]) -> T:
        self._began_s, self._work = time.monotonic(), ThreadWork()
        try:
            return call()
        finally:
            self._work = None

    def hangs(self, *, on_gpu: bool) -> bool:
        work, now_s = self._work, time.monotonic()
        if work is None:
            return False
        if on_gpu:
            return now_s - self._began_s > _LONGEST_GPU_CALL_S
        return work.idle_s(now_s) > LONGEST_IDLENESS_S
