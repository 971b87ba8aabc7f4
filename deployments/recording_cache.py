"""Cache of results of reference recordings, by the recordings' keys, because clones of one voice are requested
repeatedly.

A stored voice that was deleted is forgotten: vectors and codes of a voice are biometric data.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from threading import Lock
from typing import Generic, TypeVar

T = TypeVar("T")

VOICE_BYTES = 16  # of the key of a recording of a stored voice: they name the voice in its present version
_MOST_FORGOTTEN = 10_000


@dataclass(frozen=True, slots=True)
class Lookups:
    """Numbers of cache hits and misses."""

    hits: int = 0
    misses: int = 0


class ByRecording(Generic[T]):
    """Results up to a number of bytes; the least recently used one is evicted first. Any thread may call.

    Results are shared, so callers may not write to them.
    """

    def __init__(self, *, max_bytes: int, size: Callable[[T], int] = attrgetter("nbytes")) -> None:
        self._max_bytes, self._size = max_bytes, size
        self._results: OrderedDict[bytes, T] = OrderedDict()
        self._held = 0
        self._forgotten: dict[bytes, None] = {}  # the last voices that were, whose results may still be under way
        self._lock = Lock()
        self._hits = self._misses = 0

    def get(self, key: bytes, compute: Callable[[], T]) -> T:
        """The result for a recording, computed if it is not there."""
        result = self.find(key)
        with self._lock:
            self._hits += result is not None
            self._misses += result is None
        if result is None:
            result = compute()  # twice if two ask for it at the same time: neither waits for the other
            self.keep(key, result)
        return result

    def find(self, key: bytes) -> T | None:
        """The result for a recording, if it is cached. Does not update hit statistics."""
        with self._lock:
            if key in self._results:
                self._results.move_to_end(key)
            return self._results.get(key)

    def keep(self, key: bytes, result: T) -> None:
        """A result from elsewhere; it replaces the one that is there."""
        size = self._size(result)
        if size > self._max_bytes:
            return
        with self._lock:
            if key[:VOICE_BYTES] in self._forgotten:
                return
            if key in self._results:
                self._held -= self._size(self._results.pop(key))
            self._results[key] = result
            self._held += size
            while self._held > self._max_bytes:
                _, oldest = self._results.popitem(last=False)
                self._held -= self._size(oldest)

    def forget(self, voices: Iterable[bytes]) -> int:
        """Drop all results of these voices, the first VOICE_BYTES of keys, and keep none that come later. Returns how
        many there were.
        """
        with self._lock:
            self._forgotten.update(dict.fromkeys(voices))
            while len(self._forgotten) > _MOST_FORGOTTEN:
                del self._forgotten[next(iter(self._forgotten))]
            over = [key for key in self._results if key[:VOICE_BYTES] in self._forgotten]
            for key in over:
                self._held -= self._size(self._results.pop(key))
        return len(over)

    def take_lookups(self) -> Lookups:
        with self._lock:
            lookups, self._hits, self._misses = Lookups(self._hits, self._misses), 0, 0
        return lookups
