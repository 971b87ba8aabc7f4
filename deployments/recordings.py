"""What was computed from reference recordings, kept by what is in them: clones of one voice come again and again."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Lookups:
    """How often a result was there, and how often not."""

    hits: int = 0
    misses: int = 0


class ByRecording(Generic[T]):
    """Results within a number of bytes; the one that was not used for the longest time gives way. Any thread may call.

    Results are shared: nobody may write to them.
    """

    def __init__(self, *, max_bytes: int, size: Callable[[T], int]) -> None:
        self._max_bytes, self._size = max_bytes, size
        self._results: OrderedDict[bytes, T] = OrderedDict()
        self._held = 0
        self._lock = Lock()
        self._hits = self._misses = 0

    def get(self, recording: NDArray[np.float32] | bytes, compute: Callable[[], T]) -> T:
        """The result for a recording, its samples or a file, computed where it is not there."""
        data = recording if isinstance(recording, bytes) else np.ascontiguousarray(recording).data
        key = hashlib.sha256(data).digest()  # which processors have instructions for
        with self._lock:
            if key in self._results:
                self._results.move_to_end(key)
                self._hits += 1
                return self._results[key]
            self._misses += 1
        result = compute()  # twice where two ask for it at once: neither waits for the other
        with self._lock:
            self._keep(key, result)
        return result

    def take_lookups(self) -> Lookups:
        """Those since the last time."""
        with self._lock:
            lookups, self._hits, self._misses = Lookups(self._hits, self._misses), 0, 0
        return lookups

    def _keep(self, key: bytes, result: T) -> None:
        size = self._size(result)
        if key in self._results or size > self._max_bytes:
            return
        self._results[key] = result
        self._held += size
        while self._held > self._max_bytes:
            _, oldest = self._results.popitem(last=False)
            self._held -= self._size(oldest)
